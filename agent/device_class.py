"""The class this device belongs to, from the first look at its name to its own measurements."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from profiles.classes import seen_of, shipped_classes
from profiles.facts import Facts, named
from profiles.strategy import Choice, ClassMap, Strategy, choose


class DeviceClassing:
    """Holds the present choice.

    Args:
        slowed: a slow-down is declared: this device acts another one, and its own name says nothing.
        digests: of the models that are here now.
    """

    def __init__(
        self, digests: Callable[[], frozenset[str]], *, slowed: bool, classes: ClassMap | None = None,
        facts: Facts | None = None,
    ) -> None:  # fmt: skip
        self._digests = digests
        self._slowed = slowed
        self._classes = classes or shipped_classes()
        self._facts = facts or named()
        self._rates: tuple[float, ...] = ()
        self._measured_for: frozenset[str] | None = None
        self._current = self._choose(trusted=False)

    def know(self, facts: Facts) -> None:
        """All facts of the device are here now."""
        self._facts = facts
        self._current = self._choose(trusted=self._current.trusted)

    def measured(self, flops_per_s: Sequence[float], digests: frozenset[str]) -> None:
        """The models with these digests were measured here."""
        self._rates, self._measured_for = tuple(flops_per_s), digests
        self._current = self._choose(trusted=True)

    @property
    def choice(self) -> Choice:
        """The class and its strategy. With a model that was not measured yet the strategy is not trusted."""
        trusted = self._measured_for is not None and self._digests() <= self._measured_for
        if trusted != self._current.trusted:
            self._current = self._choose(trusted=trusted)
        return self._current

    def strategy(self) -> Strategy:
        """What this device begins with now, and its bounds."""
        return self.choice.strategy

    def status(self) -> Mapping[str, Any]:
        """For the status document."""
        choice = self.choice
        return {"name": choice.name, "title": choice.title, "why": choice.why, "trusted": choice.trusted,
                "start": list(choice.strategy.start)}  # fmt: skip

    def _choose(self, trusted: bool) -> Choice:
        return choose(seen_of(self._facts, self._rates, slowed=self._slowed), self._classes, trusted=trusted)

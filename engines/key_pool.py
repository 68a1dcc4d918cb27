"""Which of several keys of one provider is used next, and which rest. Pure: time is an argument, monotonic seconds.

A key that was told to slow down rests as long as it was told, or longer with each refusal in a row; one that is not
accepted rests long, for somebody may be about to mend it. Keys may be replaced while requests run.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from attrs import define, field, frozen

MAX_KEYS = 64


@frozen
class CoolDown:
    """first_s, longest_s: rest of a limited key that was not told for how long. refused_s: of one not accepted."""

    first_s: float = 1.0
    longest_s: float = 60.0
    refused_s: float = 300.0


@define
class _Kept:
    rests_until_s: float = -inf
    limited: int = 0
    used: int = 0


@define
class KeyPool:
    """Keys in turn, those that rest left out."""

    rules: CoolDown = field(factory=CoolDown)
    _keys: dict[str, _Kept] = field(factory=dict)
    _turn: int = 0
    _given: Sequence[str] = ()

    def replace(self, keys: Sequence[str]) -> None:
        """The keys from now on; one that stays keeps its rest. More than MAX_KEYS are cut off.

        `keys` is not changed afterwards: the same object again is no news.
        """
        if keys is self._given:
            return
        self._given = keys
        wanted = tuple(dict.fromkeys(keys))[:MAX_KEYS]
        self._keys = {key: self._keys.get(key) or _Kept() for key in wanted}

    def __len__(self) -> int:
        return len(self._keys)

    def choose(self, now_s: float) -> str | None:
        """The key that was used longest ago among those that do not rest; None when all rest, or there is none."""
        free = [(kept.used, key) for key, kept in self._keys.items() if kept.rests_until_s <= now_s]
        if not free:
            return None
        key = min(free)[1] if len(free) > 1 else free[0][1]
        self._turn += 1
        self._keys[key].used = self._turn
        return key

    def wait_s(self, now_s: float) -> float:
        """Seconds until some key may be used; infinite without keys."""
        return max(0.0, min((kept.rests_until_s for kept in self._keys.values()), default=inf) - now_s)

    def succeeded(self, key: str) -> None:
        """It was accepted."""
        kept = self._keys.get(key)
        if kept is not None:
            kept.limited = 0

    def limited(self, key: str, now_s: float, retry_after_s: float | None) -> None:
        """It was told to slow down (429)."""
        kept = self._keys.get(key)
        if kept is None:
            return
        kept.limited += 1
        own_s = min(self.rules.longest_s, self.rules.first_s * 2.0 ** min(16, kept.limited - 1))
        rest_s = own_s if retry_after_s is None else min(retry_after_s, 10 * self.rules.longest_s)
        kept.rests_until_s = max(kept.rests_until_s, now_s + rest_s)

    def refused(self, key: str, now_s: float) -> None:
        """It is not accepted (401, 403), or its account is empty (402)."""
        kept = self._keys.get(key)
        if kept is not None:
            kept.rests_until_s = max(kept.rests_until_s, now_s + self.rules.refused_s)

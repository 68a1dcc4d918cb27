"""Pure: from what a device is and was measured to do to the strategy that it begins with, and its bounds.

A board or chip that is known by name belongs to its class. Another one belongs to the class that computes nearest to
what was measured here; without measurements the kinds of its cores, then its architecture, hint at one.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from math import exp, log
from statistics import median

from attrs import evolve, field, frozen

MOBILENET_V2_FLOPS = 0.6e9
RESNET50_FLOPS = 8.2e9
"""Operations for one picture of 224 x 224; a multiply-add is two. The first has depthwise convolutions, which keep a
core waiting for memory, the second is dense: between them lies most of what a device runs."""

KINDS = ("device", "cut", "cloud")


@frozen
class Strategy:
    """What a device begins with, and what it never exceeds.

    speed_ratio: device seconds over server seconds, a prior until something was measured. start: kinds of arms that may
    be taken at once when a link becomes known. Bounds: arms (kinds), hedge_ratio (of device seconds, below policy),
    max_models_bytes (None: the usual share of memory), threads of a tensor model (0: the usual rule).
    """

    speed_ratio: float = 1.0
    start: tuple[str, ...] = ("device",)
    arms: tuple[str, ...] = KINDS
    hedge_ratio: float = 1.0
    max_models_bytes: int | None = None
    threads: int = 0


UNCLASSED = Strategy()
"""Of a device that nobody classified."""


@frozen
class DeviceClass:
    """match: parts of names of boards and chips. cores: kinds of cores. archs, npus: hints. figures: their source."""

    name: str
    title: str
    mobilenet_v2_s: float
    resnet50_s: float
    strategy: Strategy
    figures: str = ""
    match: tuple[str, ...] = ()
    cores: tuple[str, ...] = ()
    archs: tuple[str, ...] = ()
    npus: tuple[str, ...] = ()

    @property
    def flops_per_s(self) -> float:
        """Geometric mean over both nets."""
        rates = (MOBILENET_V2_FLOPS / self.mobilenet_v2_s, RESNET50_FLOPS / self.resnet50_s)
        return exp(sum(map(log, rates)) / len(rates))


@frozen
class Seen:
    """What is known of a device. names: board, chip, CPU, in the system's words. flops_per_s: of each measured model.

    slowed: a slow-down is declared, so that it only acts another device and its names say nothing.
    """

    names: tuple[str, ...] = ()
    arch: str | None = None
    npu: str | None = None
    flops_per_s: tuple[float, ...] = ()
    slowed: bool = False


@frozen
class Choice:
    """The class of a device, why, and its strategy. trusted: every model that is here was measured here."""

    name: str
    title: str
    why: str
    strategy: Strategy
    trusted: bool = False


@frozen
class ClassMap:
    """All classes, and the conservative strategy of a device that is like none."""

    classes: tuple[DeviceClass, ...] = ()
    unknown: Strategy = field(factory=lambda: Strategy(hedge_ratio=0.1))
    unknown_title: str = "unknown device"


def choose(seen: Seen, known: ClassMap, *, trusted: bool) -> Choice:
    """The class of a device. Until its measurements are `trusted` it begins on the device whatever its class."""
    found, why = _class_of(seen, known.classes)
    strategy = found.strategy if found is not None else known.unknown
    if not trusted:
        strategy = evolve(strategy, start=UNCLASSED.start)
    name, title = (found.name, found.title) if found is not None else ("unknown", known.unknown_title)
    return Choice(name, title, why, strategy, trusted)


def nearest(flops_per_s: Sequence[float], classes: Sequence[DeviceClass]) -> tuple[DeviceClass, float] | None:
    """The class with the least distance to what was measured, and by which factor they differ; None without either.

    The distance is that of the logarithms: half as fast is as far as twice as fast. Ties go to the slower class.
    """
    rates = [rate for rate in flops_per_s if 0.0 < rate < float("inf")]
    if not rates or not classes:
        return None
    middle = median(rates)
    found = min(classes, key=lambda one: (abs(log(middle / one.flops_per_s)), one.flops_per_s))
    return found, exp(abs(log(middle / found.flops_per_s)))


def _class_of(seen: Seen, classes: Sequence[DeviceClass]) -> tuple[DeviceClass | None, str]:
    if not seen.slowed:
        for one in classes:
            name = next((name for name in seen.names if _named(name, one.match)), None)
            if name is not None:
                return one, f"it is a {name}"
    measured = nearest(seen.flops_per_s, classes)
    if measured is not None:
        found, factor = measured
        return found, f"it computes like one, within a factor of {factor:.1f}"
    if not seen.slowed:
        return _hinted(seen, classes)
    return None, "nothing was measured yet"


def _hinted(seen: Seen, classes: Sequence[DeviceClass]) -> tuple[DeviceClass | None, str]:
    """Accelerator, cores, architecture: worth less than any measurement."""
    for one in classes:
        if seen.npu is not None and seen.npu in one.npus:
            return one, f"it has a {seen.npu}; nothing was measured yet"
    cores = {kind for name in seen.names for kind in name.split("+")}
    like = max(classes, key=lambda one: _shared(cores, one), default=None)
    if like is not None and _shared(cores, like):
        return like, "its cores are of that kind; nothing was measured yet"
    for one in classes:
        if seen.arch is not None and seen.arch.lower() in one.archs:
            return one, f"its architecture is {seen.arch}; nothing was measured yet"
    return None, "it is not known, and nothing was measured yet"


def _shared(cores: AbstractSet[str], one: DeviceClass) -> int:
    """How many kinds of cores the best of a class's hints has, if all of them are here."""
    hints = [set(hint.split("+")) for hint in one.cores]
    return max((len(hint) for hint in hints if hint <= cores), default=0)


def _named(name: str, parts: Sequence[str]) -> bool:
    return any(part in name.lower() for part in parts)

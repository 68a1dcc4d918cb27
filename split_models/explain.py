"""Pure: how one model's arms stand, and how they would stand at other bandwidths; what `midstream split` shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf, isfinite, log10

from attrs import evolve, field, frozen

from netprobe.view import LinkView
from protocol.policy import SplitPolicy
from split_models.arm_cost import Arm, ArmCost
from split_models.planner import DOWN, Ranked, propose

REPORT_SCHEMA = "midstream.split-report/1.0"
MBIT = 1e6 / 8


@frozen
class LinkShown:
    """One link's way up. `known` is False before the first transfer; age_s is None then."""

    name: str
    known: bool
    floor_s: float
    bytes_per_s: float
    rtt_s: float | None
    samples: int
    age_s: float | None


@frozen
class SplitReport:
    """One model on one device at one moment. Sizes are those of a typical request; raw models have no encoded input.

    held: the arm in use, and why. costs: of every arm, link time apart. hedged_s: device seconds started as hedges, of
    `requested_s` that a device-only run would have taken.
    """

    schema: str
    model: str
    digest: str
    held: str
    reason: str
    device_wait_s: float
    links: tuple[LinkShown, ...]
    costs: tuple[ArmCost, ...]
    policy: SplitPolicy
    hedged_s: float = 0.0
    requested_s: float = 0.0
    single_cuts: int = 0


@frozen
class Curve:
    """Predicted seconds of one arm at each of the bandwidths; infinite where it cannot answer."""

    arm: Arm
    seconds: tuple[float, ...]
    excluded: str = field(default="")


def shown(name: str, view: LinkView) -> LinkShown:
    """What a report says of a link."""
    known = view.samples > 0
    age_s = view.age_s if isfinite(view.age_s) else None
    return LinkShown(name, known, view.floor_s, view.bytes_per_s, view.rtt_s, view.samples, age_s)


def viewed(link: LinkShown) -> LinkView:
    """The view that a report was made of, as far as a plan needs it."""
    age_s = inf if link.age_s is None else link.age_s
    return LinkView(link.floor_s, link.bytes_per_s, link.rtt_s, link.samples, age_s)


def now(report: SplitReport) -> Sequence[Ranked]:
    """The arms as the planner ranks them at this moment, best first, those that may not be used last."""
    links = {link.name: viewed(link) for link in report.links}
    return propose(report.costs, links, report.device_wait_s, report.policy).ranking


def bandwidths(low_bytes_per_s: float, high_bytes_per_s: float, count: int) -> tuple[float, ...]:
    """`count` bandwidths evenly spaced on a logarithmic scale, both ends included."""
    if count < 2 or not 0 < low_bytes_per_s < high_bytes_per_s:
        raise ValueError("two bandwidths at least, the lower one above zero")
    step = (log10(high_bytes_per_s) - log10(low_bytes_per_s)) / (count - 1)
    return tuple(low_bytes_per_s * 10 ** (step * place) for place in range(count))


def curves(report: SplitReport, rates_bytes_per_s: Sequence[float], floor_s: float | None = None) -> Sequence[Curve]:
    """Every arm at each bandwidth, both ways as fast; `floor_s` (default: each link's own) is what no byte costs.

    An arm that is not loaded is shown as if it were: it would be, before its first request.
    """
    costs = [evolve(cost, loaded=True) for cost in report.costs]
    found: dict[Arm, list[Ranked]] = {cost.arm: [] for cost in costs}
    for rate in rates_bytes_per_s:
        views = _views(report.links, rate, floor_s)
        for entry in propose(costs, views, report.device_wait_s, report.policy).ranking:
            found[entry.arm].append(entry)
    return [
        Curve(arm, tuple(entry.predicted_s for entry in entries), entries[0].excluded if entries else "")
        for arm, entries in found.items()
    ]


def best_at(curves_of_arms: Sequence[Curve]) -> Sequence[Arm | None]:
    """The soonest arm that may be used, at each bandwidth."""
    allowed = [curve for curve in curves_of_arms if not curve.excluded]
    count = len(curves_of_arms[0].seconds) if curves_of_arms else 0
    if not allowed:
        return [None] * count
    return [min(allowed, key=lambda curve: curve.seconds[place]).arm for place in range(count)]


def spans(arms: Sequence[Arm | None], rates_bytes_per_s: Sequence[float]) -> Sequence[tuple[Arm | None, float, float]]:
    """Runs of one best arm as (arm, lowest, highest bandwidth)."""
    found: list[tuple[Arm | None, float, float]] = []
    for arm, rate in zip(arms, rates_bytes_per_s, strict=True):
        if found and found[-1][0] == arm:
            found[-1] = (arm, found[-1][1], rate)
        else:
            found.append((arm, rate, rate))
    return found


def _views(links: Sequence[LinkShown], rate: float, floor_s: float | None) -> Mapping[str, LinkView]:
    found: dict[str, LinkView] = {}
    for link in links:
        floor = floor_s if floor_s is not None else (link.floor_s if link.known else (link.rtt_s or 0.0))
        view = LinkView(floor_s=floor, bytes_per_s=rate, rtt_s=link.rtt_s, samples=1, age_s=0.0)
        found[link.name] = view
        found[link.name + DOWN] = evolve(view, floor_s=0.0)  # what no byte costs is paid once
    return found

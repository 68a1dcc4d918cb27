"""Pure: which arm answers the next request at the least cost, and when to look at a link that fell silent.

seconds = wait for the device + device seconds + link(up) + link(down) + server seconds; the objective weighs seconds,
joules and server seconds; constraints come first. A link nobody knows costs infinite seconds, and so does one in
trouble.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf, isfinite

from attrs import frozen

from netprobe.round_trip import SMALL_BYTES
from netprobe.view import UNKNOWN_LINK, LinkView
from protocol.events import TransferSample
from protocol.policy import SplitPolicy
from split_models.arm_cost import DEVICE_ARM, Arm, ArmCost

DOWN = "/down"
"""`links["cloud"]` is the way up; `links["cloud" + DOWN]`, where there is one, the way down."""

OTHER_SIZE = 2.0
"""A transfer so many times as large tells the floor from the rate."""

_ORDER = {"device": 0, "cut": 1, "cloud": 2}


@frozen
class Ranked:
    """One arm as the planner saw it. `excluded` says why it may not be chosen, empty if it may.

    link_s: the part of `predicted_s` that is spent on the wire.
    """

    arm: Arm
    predicted_s: float
    objective: float
    excluded: str = ""
    link_s: float = 0.0


@frozen
class Proposal:
    """The arm to use. `ranking` is best first, excluded arms last; `wanted` would be better, were it loaded."""

    arm: Arm
    predicted_s: float
    ranking: tuple[Ranked, ...]
    reason: str
    wanted: Arm | None = None

    def of(self, arm: Arm) -> Ranked | None:
        """The entry of an arm, or None when it was not on offer."""
        return next((entry for entry in self.ranking if entry.arm == arm), None)


def propose(
    costs: Sequence[ArmCost],
    links: Mapping[str, LinkView],
    device_wait_s: float,
    policy: SplitPolicy,
    troubles: Mapping[str, str] | None = None,
) -> Proposal:
    """Rank all arms of one request. Without any arm that may be chosen the device's is proposed.

    troubles: links that may not be used now, and why.
    """
    ranking = sorted((_rank(cost, links, device_wait_s, policy, troubles or {}) for cost in costs), key=_key)
    allowed = [entry for entry in ranking if not entry.excluded]
    if policy.deadline_s is not None:
        timely = [entry for entry in allowed if entry.predicted_s <= policy.deadline_s]
        allowed = timely or sorted(allowed, key=lambda entry: entry.predicted_s)
    if not allowed:
        return Proposal(DEVICE_ARM, inf, tuple(ranking), _why_none(ranking))
    best = allowed[0]
    return Proposal(best.arm, best.predicted_s, tuple(ranking), _why(best, allowed), _wanted(best, ranking))


def exploration(costs: Sequence[ArmCost], policy: SplitPolicy) -> ArmCost | None:
    """The cheapest allowed way to look at a link: loaded arms first, then least work here, then fewest bytes up.

    Work here would make the request wait that is being answered on the device meanwhile.
    An arm that is not loaded must be loaded and not run: without it a link that only cuts may use stays unknown.
    """
    usable = [cost for cost in costs if cost.arm.link and not forbidden(cost, policy)]
    return min(usable, key=lambda cost: (not cost.loaded, cost.device_s, cost.up_bytes), default=None)


def worth_a_look(costs: Sequence[ArmCost], held: ArmCost, entry: Ranked, policy: SplitPolicy) -> ArmCost | None:
    """The arm that sends least of those that send clearly more than `held` over its link and may still be better.

    Transfers of one size do not tell a link's floor from its rate. If all of their time were floor, more bytes would
    take as long: an arm that would then be better is worth one transfer, after which its time is known.
    """
    hoped = (
        cost
        for cost in costs
        if cost.arm.link == held.arm.link
        and cost.up_bytes >= OTHER_SIZE * held.up_bytes
        and cost.down_bytes <= OTHER_SIZE * held.down_bytes
        and not forbidden(cost, policy)
        and cost.device_s + entry.link_s + cost.server_s < entry.predicted_s * (1.0 - policy.ratio)
    )
    return min(hoped, key=lambda cost: cost.up_bytes, default=None)


def explore_now(silent_requests: int, looked: bool, link: LinkView, policy: SplitPolicy, credit: float = 0.0) -> bool:
    """Whether this request, the `silent_requests`-th in a row that left the link alone, also goes through it.

    A link that nobody has used or `looked` at yet is looked at by the first request, later by one in N; one whose last
    transfer contradicts those before is looked at again at once, so that a recovery is not noticed N requests late.
    credit: looks saved while the link was in use; they are spent soon after it was left, at ever longer distances.
    """
    if policy.explore_one_in <= 0 or silent_requests < 1:
        return False
    if (link.samples == 0 and not looked) or link.in_doubt:
        return True
    soon = silent_requests & (silent_requests - 1) == 0
    return silent_requests % policy.explore_one_in == 0 or (soon and credit >= 1.0)


def link_seconds(cost: ArmCost, links: Mapping[str, LinkView]) -> float:
    """Seconds on the wire both ways; a way down without samples is taken to be as fast as the way up.

    Small frames leave no samples of the rate, only round trips: those are what another small frame takes.
    """
    if cost.arm.link is None:
        return 0.0
    up = links.get(cost.arm.link, UNKNOWN_LINK)
    down = links.get(cost.arm.link + DOWN, UNKNOWN_LINK)
    if up.samples == 0 and up.rtt_s is not None and cost.up_bytes < SMALL_BYTES:
        seconds = up.rtt_s
        if cost.down_bytes < SMALL_BYTES:
            return seconds
    else:
        seconds = max(up.seconds_for(cost.up_bytes), up.rtt_s or 0.0)  # an answer takes a round trip, stalls included
    if cost.down_bytes == 0 or not isfinite(seconds):
        return seconds
    if down.samples > 0 and down.bytes_per_s > 0:
        return seconds + _down_s(cost, down)
    return seconds + cost.down_bytes / up.bytes_per_s if up.bytes_per_s > 0 else inf


def slower_way(cost: ArmCost, links: Mapping[str, LinkView]) -> LinkView:
    """The view of the direction that takes longer, up unless the way down is known."""
    name = cost.arm.link or ""
    up, down = links.get(name, UNKNOWN_LINK), links.get(name + DOWN, UNKNOWN_LINK)
    if down.samples == 0 or down.bytes_per_s <= 0:
        return up
    down_s = _down_s(cost, down)
    return down if up.samples == 0 or down_s > up.seconds_for(cost.up_bytes) else up


def _down_s(cost: ArmCost, down: LinkView) -> float:
    """From the answer's first byte to its last; a small answer comes with its first byte."""
    floor_s = down.floor_s if cost.down_bytes >= SMALL_BYTES else 0.0
    return floor_s + cost.down_bytes / down.bytes_per_s


def still_needed_s(cost: ArmCost, views: Mapping[str, LinkView], began_s: float) -> float | None:
    """Seconds until the answer of a request that began at `began_s`, as far as its transfer has come; the server's part
    included. None where nothing tells: nothing is under way yet, or nobody counts what has moved.
    """
    name = cost.arm.link or ""
    up, down = views.get(name, UNKNOWN_LINK), views.get(name + DOWN, UNKNOWN_LINK)
    coming, going = _of_request(down, began_s), _of_request(up, began_s)
    if coming is not None:
        return max(0.0, down.seconds_for(coming.size_bytes) - coming.seconds)
    if going is None:
        return None
    up_s = up.seconds_for(going.size_bytes)
    back_s = link_seconds(cost, views) - max(up.seconds_for(cost.up_bytes), up.rtt_s or 0.0)
    return max(0.0, up_s - going.seconds) + back_s + cost.server_s


def moved_bytes(cost: ArmCost, views: Mapping[str, LinkView], began_s: float) -> int | None:
    """How much of what a request that began then sends or receives has moved; None where nobody counts."""
    name = cost.arm.link or ""
    counts = [
        running.moved_bytes
        for running in (views.get(name, UNKNOWN_LINK).under_way, views.get(name + DOWN, UNKNOWN_LINK).under_way)
        if running is not None and not running.complete and running.at_s - running.seconds >= began_s
    ]
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def _of_request(view: LinkView, began_s: float) -> TransferSample | None:
    """What moves for a request that began then: part of it is still to come, and how much is known."""
    sample = view.under_way
    if sample is None or sample.moved_bytes is None or sample.moved_bytes >= sample.size_bytes:
        return None
    return sample if sample.at_s - sample.seconds >= began_s else None


def forbidden(cost: ArmCost, policy: SplitPolicy) -> str:
    """Why the policy does not allow this arm; empty if it does. Asked anew before work that begins late."""
    if (cost.sends_input or cost.arm.kind == "cloud") and not policy.raw_input_leaves:
        return "raw input may not leave"
    if cost.arm.kind == "cut" and cost.arm.form not in policy.codecs:
        return f"codec {cost.arm.form} not allowed"
    if cost.error_ratio > policy.max_error_ratio:
        return "error over the maximum"
    return ""


def _rank(
    cost: ArmCost,
    links: Mapping[str, LinkView],
    device_wait_s: float,
    policy: SplitPolicy,
    troubles: Mapping[str, str],
) -> Ranked:
    wait_s = device_wait_s if cost.arm.kind != "cloud" else 0.0
    trouble = troubles.get(cost.arm.link, "") if cost.arm.link is not None else ""
    link_s = inf if trouble else link_seconds(cost, links)
    predicted_s = wait_s + cost.device_s + link_s + cost.server_s
    excluded = forbidden(cost, policy) or trouble
    if not excluded and not isfinite(predicted_s):
        excluded = "link unknown: no transfer seen"
    if not excluded and not cost.loaded:
        excluded = "not loaded"
    return Ranked(cost.arm, predicted_s, _objective(predicted_s, cost, policy.objective), excluded, link_s)


def _objective(predicted_s: float, cost: ArmCost, weights: Mapping[str, float]) -> float:
    if not isfinite(predicted_s):
        return inf
    parts = {"seconds": predicted_s, "joules": cost.joules, "server_seconds": cost.server_s}
    total = sum(weights.get(name, 0.0) * value for name, value in parts.items())
    return total if any(weights.get(name, 0.0) > 0 for name in parts) else predicted_s


def _key(entry: Ranked) -> tuple[bool, float, float, int, str]:
    return (bool(entry.excluded), entry.objective, entry.predicted_s, _ORDER[entry.arm.kind], str(entry.arm))


def _wanted(best: Ranked, ranking: Sequence[Ranked]) -> Arm | None:
    unloaded = [entry for entry in ranking if entry.excluded == "not loaded" and entry.objective < best.objective]
    return min(unloaded, key=lambda entry: entry.objective).arm if unloaded else None


def _why(best: Ranked, allowed: Sequence[Ranked]) -> str:
    others = [entry for entry in allowed if entry.arm != best.arm]
    if not others:
        return f"{best.arm} is the only arm that may be used"
    return f"{best.arm} {best.predicted_s * 1e3:.0f} ms, next {others[0].arm} {others[0].predicted_s * 1e3:.0f} ms"


def _why_none(ranking: Sequence[Ranked]) -> str:
    reasons = sorted({entry.excluded for entry in ranking})
    return "no arm may be used (" + "; ".join(reasons) + "), the device answers" if reasons else "no arm is known"

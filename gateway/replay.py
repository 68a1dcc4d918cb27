"""Recorded requests over dispatch in virtual time: the product's own decisions beside fixed ones and an oracle. Pure.

The server's TTFT of each request is given. The device is a FIFO queue with `slots` places: a request that it wins holds
one for prefill and decoding, one that the server wins frees it at that moment. What a target was asked to prefill is
spent, whether it won or not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop, heappush, heapreplace
from math import inf

from attrs import define, field, frozen

from gateway.context import Constraints
from gateway.dispatch import dispatch
from gateway.dispatch_lengths import LengthHistory
from gateway.dispatch_plans import live_table, within_account
from gateway.dispatch_table import DispatchTable, Regime, spent_ratio
from gateway.dispatch_values import ValueHistory
from gateway.targets import TargetView
from gateway.ttft import SERVER_PRIOR_S, TtftWindow
from protocol.policy import DispatchPolicy

ANYWHERE = Constraints()
PATIENCE_S = 5.0

EAGER_REQUESTS, REFRESH_EVERY = 64, 32
"""Plans are made anew at each of the first requests, and then as often as this."""


@frozen
class Asked:
    """One recorded request."""

    at_s: float
    prompt_tokens: int
    answer_tokens: int


@frozen
class Speed:
    """A device that one model runs on."""

    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    fixed_s: float = 0.0
    slots: int = 2

    def prefill_s(self, tokens: int) -> float:
        """Seconds of prefill to the first token, without a queue."""
        return self.fixed_s + tokens / self.prefill_tokens_per_s


@frozen
class Recording:
    """Requests in order of arrival, and of each the server's TTFT. given_up_s: a failure is noticed after this long."""

    requests: Sequence[Asked]
    ttfts_s: Sequence[float]
    device: Speed
    given_up_s: float = 60.0


@define
class Outcome:
    """Per request, in order of arrival: TTFT and who spoke first; and what both sides were asked to prefill."""

    ttfts_s: list[float] = field(factory=list)
    device_won: list[bool] = field(factory=list)
    device_asked: list[bool] = field(factory=list)
    server_asked: list[bool] = field(factory=list)

    def spent_ratio(self, requests: Sequence[Asked], *, device: bool) -> float:
        """Share of prompt tokens that a side was asked to prefill."""
        asked = self.device_asked if device else self.server_asked
        total = sum(one.prompt_tokens for one in requests)
        spent = sum(one.prompt_tokens for one, was in zip(requests, asked, strict=True) if was)
        return spent / total if total else 0.0


Waits = tuple[float, float]
"""Seconds after arrival at which the device and the server start; infinite: never."""

Decide = Callable[[int, Asked, float], Waits]
"""(number of the request, the request, seconds that the device's queue takes now) -> Waits."""

Observe = Callable[[float, bool], None]
"""(seconds, spoke): what was seen of the server: its TTFT (infinite: it failed), or that it had not spoken by then."""


def replay(recording: Recording, decide: Decide, observe: Observe | None = None) -> Outcome:
    """Every request through `decide`. Observations are told in the order of decisions that they could inform."""
    run = _Run(recording, observe)
    for number, asked in enumerate(recording.requests):
        run.until(asked.at_s)
        device_s, server_s = decide(number, asked, max(0.0, run.free_at_s[0] - asked.at_s))
        run.begin(number, asked, device_s, server_s)
    run.until(inf)
    return run.outcome


@define
class _Run:
    """joins: device starts to come (at, number, request, when the server asks, when it speaks). free_at_s: a heap."""

    recording: Recording
    observe: Observe | None
    free_at_s: list[float] = field(init=False)
    joins: list[tuple[float, int, Asked, float, float]] = field(factory=list)
    seen: list[tuple[float, int, float, bool]] = field(factory=list)
    outcome: Outcome = field(init=False)

    def __attrs_post_init__(self) -> None:
        count = len(self.recording.requests)
        self.free_at_s = [0.0] * self.recording.device.slots
        self.outcome = Outcome([0.0] * count, [False] * count, [False] * count, [False] * count)

    def begin(self, number: int, asked: Asked, device_s: float, server_s: float) -> None:
        """A request was decided; without the device it is over at once."""
        asks_at_s = asked.at_s + server_s
        speaks_at_s = asks_at_s + min(self.recording.ttfts_s[number], self.recording.given_up_s)
        if device_s == inf or speaks_at_s <= asked.at_s + device_s:
            self._server_only(number, asked, asks_at_s, speaks_at_s)
        else:
            heappush(self.joins, (asked.at_s + device_s, number, asked, asks_at_s, speaks_at_s))

    def until(self, now_s: float) -> None:
        """The device takes what joined before `now_s`; then what was seen by then is told."""
        while self.joins and self.joins[0][0] <= now_s:
            self._join(*heappop(self.joins))
        while self.seen and self.seen[0][0] <= now_s:
            _, _, seconds, spoke = heappop(self.seen)
            if self.observe is not None:
                self.observe(seconds, spoke)

    def _server_only(self, number: int, asked: Asked, asks_at_s: float, speaks_at_s: float) -> None:
        outcome = self.outcome
        outcome.ttfts_s[number] = speaks_at_s - asked.at_s
        outcome.server_asked[number] = True
        heappush(self.seen, (speaks_at_s, number, self.recording.ttfts_s[number], True))

    def _join(self, at_s: float, number: int, asked: Asked, asks_at_s: float, speaks_at_s: float) -> None:
        outcome, device = self.outcome, self.recording.device
        outcome.device_asked[number] = True
        first_at_s = max(self.free_at_s[0], at_s) + device.prefill_s(asked.prompt_tokens)
        if speaks_at_s < first_at_s:
            # Cancelled: in the queue it took nothing, in prefill it took until now.
            heapreplace(self.free_at_s, max(self.free_at_s[0], speaks_at_s))
            self._server_only(number, asked, asks_at_s, speaks_at_s)
            return
        heapreplace(self.free_at_s, first_at_s + asked.answer_tokens / device.decode_tokens_per_s)
        outcome.ttfts_s[number] = first_at_s - asked.at_s
        outcome.device_won[number] = True
        if asks_at_s < first_at_s:
            outcome.server_asked[number] = True
            heappush(self.seen, (first_at_s, number, first_at_s - asks_at_s, False))


class Learner:
    """`decide` and `observe` of the product: windows, plans and dispatch as they run live.

    over_ratio: the most by which the expectation of any plan in use exceeded the budget, by what was known then.
    """

    def __init__(self, recording: Recording, regime: Regime, policy: DispatchPolicy, draws: Sequence[float]) -> None:
        self._device = TargetView("device", local=True, prefill_s=1.0 / recording.device.prefill_tokens_per_s)
        self._fixed_s = recording.device.fixed_s
        self._regime = regime
        self._policy = policy
        self._draws = draws
        self._window = TtftWindow(prior_s=SERVER_PRIOR_S)
        self._lengths = LengthHistory()
        self._values = ValueHistory()
        self._server = TargetView("server", local=False)
        self._table: DispatchTable | None = None
        self.over_ratio = -1.0

    def decide(self, number: int, asked: Asked, queue_s: float) -> Waits:
        """See Decide."""
        if self._table is None or number < EAGER_REQUESTS or number % REFRESH_EVERY == 0:
            self._refresh()
        device = TargetView(
            "device", local=True, queue_s=queue_s + self._fixed_s, prefill_s=self._device.prefill_s
        )  # fmt: skip
        table = self._table and within_account(self._table, self._values, self._policy)
        plan = dispatch(
            table, asked.prompt_tokens, (device, self._server), ANYWHERE, self._draws[number], self._policy,
            PATIENCE_S,
        )  # fmt: skip
        waits = dict(plan.starts)
        self._lengths.add(asked.prompt_tokens)
        alone_s, at_server = device.prefill_seconds(asked.prompt_tokens), waits.get("server") == 0.0
        self._values.add(asked.prompt_tokens, alone_s, queue_s, at_server)
        return waits.get("device", inf), waits.get("server", inf)

    def observe(self, seconds: float, spoke: bool) -> None:
        """See Observe."""
        if spoke:
            self._window.add(seconds)
        else:
            self._window.outlasted(seconds)

    def _refresh(self) -> None:
        policy = self._policy
        self._server = TargetView("server", local=False, ttft=self._window.ecdf(), seen=self._window.observed)
        self._table = live_table(self._regime, self._lengths, self._values, self._server, policy)
        if self._table.worth is None:
            over = spent_ratio(self._table, self._lengths.counts(), self._server.ttft) - policy.budget_ratio
        else:
            over = self._values.expected_ratio(self._server.ttft, self._table.worth)
            over -= self._values.spendable_ratio(policy.budget_ratio)
        self.over_ratio = max(self.over_ratio, over)


def learnt(
    recording: Recording, regime: Regime, policy: DispatchPolicy, draws: Sequence[float]
) -> tuple[Outcome, float]:
    """The product's outcome, and the most by which a plan's expected spending exceeded the budget."""
    learner = Learner(recording, regime, policy, draws)
    return replay(recording, learner.decide, learner.observe), learner.over_ratio


def routed(recording: Recording, regime: Regime, budget_ratio: float, draws: Sequence[float]) -> Outcome:
    """Random routing at the same budget: the dear side alone with probability `budget_ratio`, else the other alone."""
    dear, other = ((0.0, inf), (inf, 0.0)) if regime == "device_constrained" else ((inf, 0.0), (0.0, inf))
    return replay(recording, lambda number, asked, queue_s: dear if draws[number] < budget_ratio else other)


def only(recording: Recording, *, device: bool) -> Outcome:
    """One side for everything."""
    return replay(recording, lambda number, asked, queue_s: (0.0, inf) if device else (inf, 0.0))


def oracle_mean_s(recording: Recording, regime: Regime, budget_ratio: float) -> float:
    """A bound on the mean TTFT of any dispatch within the budget: it knows every TTFT, and its device has no queue.

    The dear side is spent where it saves most per token, down to a part of a request.
    """
    total, savings, tokens = 0.0, [], 0
    for asked, ttft_s in zip(recording.requests, recording.ttfts_s, strict=True):
        server_s = min(ttft_s, recording.given_up_s)
        device_s = recording.device.prefill_s(asked.prompt_tokens)
        cheap_s, dear_s = (server_s, device_s) if regime == "device_constrained" else (device_s, server_s)
        total += cheap_s
        tokens += asked.prompt_tokens
        if dear_s < cheap_s:
            savings.append(((cheap_s - dear_s) / max(1, asked.prompt_tokens), cheap_s - dear_s, asked.prompt_tokens))
    left = tokens * budget_ratio
    for _, seconds, size in sorted(savings, reverse=True):
        part = min(1.0, left / size) if size else 1.0
        total -= part * seconds
        left -= part * size
        if left <= 0:
            break
    return total / len(recording.requests)


def least_quantile_s(recording: Recording, ratio: float, regime: Regime, budget_ratio: float) -> float:
    """A bound on a quantile of the TTFT of any dispatch within the budget, by an oracle whose device has no queue.

    All but (1 - ratio) of the requests must be answered in time by the side that is not dear, or be paid for; the
    longest of those that would have to be paid for are given up.
    """
    rows = []
    for asked, ttft_s in zip(recording.requests, recording.ttfts_s, strict=True):
        server_s, device_s = min(ttft_s, recording.given_up_s), recording.device.prefill_s(asked.prompt_tokens)
        cheap_s, dear_s = (server_s, device_s) if regime == "device_constrained" else (device_s, server_s)
        rows.append((cheap_s, dear_s, asked.prompt_tokens))
    given_up = len(rows) - 1 - round(ratio * (len(rows) - 1))
    tokens = budget_ratio * sum(size for _, _, size in rows)

    def possible(bound_s: float) -> bool:
        late = [(dear_s <= bound_s, size) for cheap_s, dear_s, size in rows if cheap_s > bound_s]
        paid = sorted(size for in_time, size in late if in_time)
        left = given_up - (len(late) - len(paid))
        return left >= 0 and sum(paid[: max(0, len(paid) - left)]) <= tokens

    moments = sorted({moment for cheap_s, dear_s, _ in rows for moment in (cheap_s, dear_s)})
    low, high = 0, len(moments) - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if possible(moments[middle]) else (middle + 1, high)
    return moments[low]


def quantile_s(ordered_s: Sequence[float], ratio: float) -> float:
    """Nearest rank in an ascending series."""
    return ordered_s[min(len(ordered_s) - 1, round(ratio * (len(ordered_s) - 1)))]

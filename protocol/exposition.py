"""Events folded into counters, gauges and histograms, rendered in Prometheus' text format 0.0.4.

Every family holds a bounded number of series: labels come from models, arms and peers, which others may grow. What is
over the bound is counted under the label value `other`, so that sums stay right.
"""

from __future__ import annotations

import math
import threading
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from protocol.events import (
    TBT_BOUNDS_S,
    ArmSwitched,
    BudgetAlert,
    Event,
    HandedOver,
    HandoffServed,
    LimitHit,
    LinkStateChanged,
    PolicyJudged,
    QueueSampled,
    RegimeChosen,
    Shadowed,
    SourceLost,
    TensorDone,
    TextDelivered,
    TextDone,
    TransferSample,
    arm_kind,
)

MAX_SERIES = 200
MAX_LABEL_CHARS = 128
MAX_KEYS = 1024
"""Label sets whose sorted form is remembered at once."""

SECONDS_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)

_Labels = tuple[tuple[str, str], ...]
_Kind = Literal["counter", "gauge", "histogram"]

_HELP: dict[str, tuple[_Kind, str]] = {
    "midstream_requests_total": ("counter", "Requests that ended, by way, model and status."),
    "midstream_tensor_arms_total": ("counter", "Tensor requests by the arm that answered."),
    "midstream_hedges_started_total": ("counter", "Tensor requests for which the device began beside the link."),
    "midstream_hedges_won_total": ("counter", "Of these, the ones that the device answered."),
    "midstream_arm_switches_total": ("counter", "Changes of the arm that a model's requests take."),
    "midstream_handovers_total": ("counter", "Streams moved by plan from one side to another."),
    "midstream_source_lost_total": ("counter", "Streams continued elsewhere after their side was lost."),
    "midstream_tokens_total": ("counter", "Generated tokens by the side that made them."),
    "midstream_delivered_tokens_total": ("counter", "Tokens of streamed answers, by delivery mode."),
    "midstream_delayed_tokens_total": ("counter", "Of these, the ones that came after their reader's due time."),
    "midstream_lost_prompt_tokens_total": ("counter", "Prompt tokens read by targets that lost a race, by target."),
    "midstream_dispatch_money": ("gauge", "Money of a model's usual request on either side, as dispatch weighs it."),
    "midstream_dispatch_server_constrained": ("gauge", "1: the budget spares the server; 0: the device."),
    "midstream_prompt_tokens_total": ("counter", "Prompt tokens of finished text requests."),
    "midstream_queue_outcomes_total": ("counter", "Admission decisions of the bounded executors."),
    "midstream_limit_refusals_total": ("counter", "Requests that a tenant's limit refused, by tenant and limit."),
    "midstream_cost_usd_total": (
        "counter",
        "Dollars that paid targets took for finished text requests.",
    ),
    "midstream_cache_hits_total": ("counter", "Text requests that were answered from the cache."),
    "midstream_moved_answers_total": ("counter", "Answers that more than one side made: fallbacks and moves by plan."),
    "midstream_handoffs_served_total": ("counter", "Streams generated here for peers, by status."),
    "midstream_shadow_requests_total": ("counter", "Requests drawn to be asked of the other path too, by outcome."),
    "midstream_budget_spent_ratio": ("gauge", "Share of a tenant's budget that was told as spent last, by window."),
    "midstream_transfer_bytes_total": ("counter", "Bytes moved over links."),
    "midstream_transfer_seconds_total": ("counter", "Seconds that transfers spent on the wire."),
    "midstream_transfers_total": ("counter", "Transfers over links."),
    "midstream_link_changes_total": ("counter", "State changes of links and control channels."),
    "midstream_policy_judged_total": ("counter", "Policy documents by verdict."),
    "midstream_events_total": ("counter", "Events that have no metric of their own."),
    "midstream_tensor_seconds": ("histogram", "Whole tensor requests."),
    "midstream_tensor_stage_seconds": ("histogram", "Stages of tensor requests."),
    "midstream_text_ttft_seconds": ("histogram", "Text requests, until the first token."),
    "midstream_text_seconds": ("histogram", "Whole text requests."),
    "midstream_text_tbt_seconds": ("histogram", "Between tokens of streamed answers, as they came and as they left."),
    "midstream_queue_wait_seconds": ("histogram", "Waiting time in bounded executors."),
    "midstream_queue_service_seconds": ("histogram", "Service time in bounded executors."),
    "midstream_queue_waiting": ("gauge", "Work items that wait in a bounded executor."),
    "midstream_queue_running": ("gauge", "Work items that run in a bounded executor."),
    "midstream_queue_capacity": ("gauge", "Waiting room of a bounded executor, computed from its service time."),
    "midstream_link_up": ("gauge", "1 while a link or control channel is up."),
    "midstream_policy_version": ("gauge", "Version of the last accepted policy."),
}


class Exposition:
    """An Emit that counts. Safe from any thread; holds one short lock, does no I/O."""

    def __init__(self, max_series: int = MAX_SERIES) -> None:
        self._max_series = max_series
        self._lock = threading.Lock()
        self._values: dict[str, dict[_Labels, float]] = {}
        self._histograms: dict[str, dict[_Labels, _Histogram]] = {}
        self._help = dict(_HELP)
        self._keys: dict[tuple[tuple[str, Any], ...], _Labels] = {}
        self._folds: dict[type[Event], Callable[[Any], None]] = {
            TensorDone: self._tensor_done,
            TextDone: self._text_done,
            TextDelivered: self._text_delivered,
            ArmSwitched: self._arm_switched,
            HandedOver: self._handed_over,
            RegimeChosen: self._regime_chosen,
            SourceLost: self._source_lost,
            QueueSampled: self._queue_sampled,
            TransferSample: self._transfer,
            LinkStateChanged: self._link_changed,
            PolicyJudged: self._policy_judged,
            LimitHit: self._limit_hit,
            BudgetAlert: self._budget_alert,
            Shadowed: self._shadowed,
            HandoffServed: self._handoff_served,
        }

    def __call__(self, event: Event) -> None:
        """Fold one event in. An event class without a metric is counted by its name."""
        with self._lock:
            fold = self._folds.get(type(event))
            if fold is None:
                self._count("midstream_events_total", {"event": type(event).__name__})
            else:
                fold(event)

    def set_gauge(self, name: str, value: float, labels: Mapping[str, str] | None = None, help: str = "") -> None:
        """Set a gauge that no event carries (memory, temperature, start-up seconds)."""
        with self._lock:
            self._help.setdefault(name, ("gauge", help))
            self._set(name, value, labels or {})

    def value(self, name: str, **labels: str) -> float:
        """Sum of a counter or gauge over all series that have these labels; 0 when there is none."""
        with self._lock:
            series = self._values.get(name, {})
            return sum(value for key, value in series.items() if set(labels.items()) <= set(key))

    def render(self) -> str:
        """The page of /metrics."""
        with self._lock:
            lines: list[str] = []
            for name in sorted({*self._values, *self._histograms}):
                kind, text = self._help[name]
                lines += [f"# HELP {name} {_escape_help(text)}", f"# TYPE {name} {kind}"]
                for labels, value in sorted(self._values.get(name, {}).items()):
                    lines.append(f"{name}{_braces(labels)} {_number(value)}")
                for labels, histogram in sorted(self._histograms.get(name, {}).items()):
                    lines += histogram.lines(name, labels)
        return "\n".join(lines) + "\n" if lines else ""

    def _tensor_done(self, event: TensorDone) -> None:
        self._count("midstream_requests_total", {"way": "tensor", "model": event.model, "status": event.status})
        arm = arm_kind(event.arm)
        self._count("midstream_tensor_arms_total", {"model": event.model, "arm": event.arm})
        self._observe("midstream_tensor_seconds", event.total_s, {"model": event.model, "arm": arm})
        for stage, seconds in event.stages().items():
            if seconds > 0:
                self._observe("midstream_tensor_stage_seconds", seconds, {"model": event.model, "stage": stage})
        if event.hedged:
            self._count("midstream_hedges_started_total", {"model": event.model})
            self._count("midstream_hedges_won_total", {"model": event.model}, event.winner == "device")

    def _text_done(self, event: TextDone) -> None:
        model = {"model": event.model}
        self._count("midstream_requests_total", {"way": "text", **model, "status": event.status})
        self._count("midstream_prompt_tokens_total", model, event.prompt_tokens)
        for target, tokens in event.sides:
            self._count("midstream_tokens_total", {**model, "target": target}, tokens)
        for target in event.losers:
            self._count("midstream_lost_prompt_tokens_total", {**model, "target": target}, event.prompt_tokens)
        self._count("midstream_cost_usd_total", model, event.usd)
        self._count("midstream_cache_hits_total", model, event.cached)
        self._count("midstream_moved_answers_total", model, event.moved)
        if event.ttft_s is not None:
            self._observe("midstream_text_ttft_seconds", event.ttft_s, model)
        self._observe("midstream_text_seconds", event.total_s, model)

    def _regime_chosen(self, event: RegimeChosen) -> None:
        labels = {"model": event.model, "server": event.server}
        for side, money in (("device", event.device_money), ("server", event.server_money)):
            self._set("midstream_dispatch_money", money, {**labels, "side": side})
        self._set("midstream_dispatch_server_constrained", float(event.regime == "server_constrained"), labels)

    def _text_delivered(self, event: TextDelivered) -> None:
        labels = {"model": event.model, "mode": event.mode}
        self._count("midstream_delivered_tokens_total", labels, event.tokens)
        self._count("midstream_delayed_tokens_total", labels, event.delayed_tokens)
        series = self._histograms.setdefault("midstream_text_tbt_seconds", {})
        for at, gaps in (("raw", event.raw), ("paced", event.paced)):
            key = self._key(series, {**labels, "at": at})
            series.setdefault(key, _Histogram(TBT_BOUNDS_S)).add_all(gaps.counts, gaps.sum_s)

    def _arm_switched(self, event: ArmSwitched) -> None:
        labels = {"model": event.model, "source": event.source, "target": event.target}
        self._count("midstream_arm_switches_total", labels)

    def _handed_over(self, event: HandedOver) -> None:
        self._count("midstream_handovers_total", {"source": event.source, "target": event.target})

    def _source_lost(self, event: SourceLost) -> None:
        self._count("midstream_source_lost_total", {"source": event.source, "target": event.target})

    def _queue_sampled(self, event: QueueSampled) -> None:
        queue = {"queue": event.name}
        self._count("midstream_queue_outcomes_total", {**queue, "outcome": event.outcome})
        self._set("midstream_queue_waiting", event.waiting, queue)
        self._set("midstream_queue_running", event.running, queue)
        self._set("midstream_queue_capacity", event.capacity, queue)
        if event.outcome in ("done", "ran_here"):
            self._observe("midstream_queue_wait_seconds", event.wait_s, queue)
            self._observe("midstream_queue_service_seconds", event.service_s, queue)

    def _transfer(self, event: TransferSample) -> None:
        labels = {"link": event.link, "direction": event.direction}
        self._count("midstream_transfers_total", {**labels, "complete": str(event.complete).lower()})
        self._count("midstream_transfer_bytes_total", labels, event.size_bytes)
        self._count("midstream_transfer_seconds_total", labels, event.seconds)

    def _link_changed(self, event: LinkStateChanged) -> None:
        self._count("midstream_link_changes_total", {"link": event.link, "state": event.state})
        self._set("midstream_link_up", event.state == "up", {"link": event.link})

    def _policy_judged(self, event: PolicyJudged) -> None:
        labels = {"accepted": str(event.accepted).lower(), "code": event.code}
        self._count("midstream_policy_judged_total", labels)
        if event.accepted:
            self._set("midstream_policy_version", event.version, {})

    def _limit_hit(self, event: LimitHit) -> None:
        self._count("midstream_limit_refusals_total", {"tenant": event.tenant, "limit": event.dimension})

    def _handoff_served(self, event: HandoffServed) -> None:
        self._count("midstream_handoffs_served_total", {"model": event.model, "status": event.status})

    def _shadowed(self, event: Shadowed) -> None:
        self._count("midstream_shadow_requests_total", {"model": event.model, "outcome": event.outcome})

    def _budget_alert(self, event: BudgetAlert) -> None:
        labels = {"tenant": event.tenant, "window": event.window}
        self._set(
            "midstream_budget_spent_ratio", event.spent_usd / event.budget_usd if event.budget_usd else 1.0, labels
        )

    def _count(self, name: str, labels: Mapping[str, str], amount: float = 1.0) -> None:
        series = self._values.setdefault(name, {})
        key = self._key(series, labels)
        if amount >= 0:  # a counter never goes back; NaN fails this too
            series[key] = series.get(key, 0.0) + amount

    def _set(self, name: str, value: float, labels: Mapping[str, str]) -> None:
        series = self._values.setdefault(name, {})
        series[self._key(series, labels)] = float(value)

    def _observe(self, name: str, seconds: float, labels: Mapping[str, str]) -> None:
        series = self._histograms.setdefault(name, {})
        key = self._key(series, labels)
        if key not in series:
            series[key] = _Histogram(SECONDS_BUCKETS)
        series[key].add(seconds)

    def _key(self, series: Mapping[_Labels, Any], labels: Mapping[str, str]) -> _Labels:
        given = tuple(labels.items())
        key = self._keys.get(given)
        if key is None:
            key = tuple(sorted((name, str(value)[:MAX_LABEL_CHARS]) for name, value in given))
            if len(self._keys) >= MAX_KEYS:
                self._keys.clear()
            self._keys[given] = key
        if key in series or len(series) < self._max_series:
            return key
        return tuple((name, "other") for name, _ in key)


class _Histogram:
    """Cumulative buckets, sum and count."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def add(self, value: float) -> None:
        if not math.isfinite(value):
            return
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def add_all(self, counts: Sequence[int], sum_s: float) -> None:
        """Values that were counted in the same buckets elsewhere."""
        self._counts = [mine + more for mine, more in zip(self._counts, counts, strict=True)]
        self._sum += sum_s

    def lines(self, name: str, labels: _Labels) -> list[str]:
        found: list[str] = []
        total = 0
        for bound, count in zip((*self._bounds, math.inf), self._counts, strict=True):
            total += count
            found.append(f"{name}_bucket{_braces((*labels, ('le', _number(bound))))} {total}")
        return [*found, f"{name}_sum{_braces(labels)} {_number(self._sum)}", f"{name}_count{_braces(labels)} {total}"]


def _braces(labels: _Labels) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{_escape(value)}"' for name, value in labels) + "}"


def _escape(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _escape_help(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n")


def _number(value: float) -> str:
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    if math.isnan(value):
        return "NaN"
    return str(int(value)) if value == int(value) and abs(value) < 1e15 else repr(float(value))

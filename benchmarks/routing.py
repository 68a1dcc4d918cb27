"""Routing: decisions a second, the share of each level, what the classifier and the rules are worth.

Prompts of Azure's lengths, all different, go through the router with all three levels on and nothing remembered from
one to the next: rules of `docs/routing.example.yaml`, complexity, and a threshold that a half-spent budget moves. Then
`POST /v1/route` over sockets. Accuracy and coverage are those of the test half of our labelled prompts.

    python -m benchmarks.routing --json routing.json [--traces DIR] [--quick]
"""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from attrs import frozen

from benchmarks.report import arguments, percentile, publish, spread
from benchmarks.routing_http import POLICY, ask, message
from benchmarks.routing_load import body, requests
from benchmarks.routing_prompts import Labelled, halves, labelled
from cloud_stub.publishing import compile_policy
from gateway.context import LOCAL, Caller
from gateway.intents import default_model
from gateway.ports import Findings, Routed, Signals
from gateway.privacy import PrivacyGuard
from gateway.prompt_features import features
from gateway.routing import PolicyRouter
from gateway.targets import TargetView
from gateway.ttft import ecdf
from links.event_loop import settle
from protocol.chat import ChatRequest
from protocol.policy import Policy
from protocol.text import Message

CONNECTIONS = 2

GIVEN = b"""\
route:
  rules:
    - when: { intent: [summarize, intent_classify, extract_entity], estimated_complexity: low }
      target: edge
    - when: { intent: [code_gen, multi_hop_reasoning, math] }
      target: cloud
  fallback: { enable: true, confidence_threshold: 0.6, upgrade_target: cloud }
"""
"""The smallest routing file of the documentation, whose rules cover six of the twelve intents."""


class Shelf:
    """One model on each side, both healthy; 40 % of the month's budget left."""

    def __init__(self) -> None:
        seen = ecdf([0.2, 0.4, 0.5, 0.9])
        self._views = {
            "small": (TargetView("device", True, ttft=seen, seen=4, prefill_s=1e-3),),
            "large": (TargetView("cloud", False, ttft=seen, seen=4),),
        }
        self.asked = 0

    def models(self) -> Mapping[str, tuple[str, ...]]:
        """Names only."""
        return {"small": ("device",), "large": ("cloud",)}

    def views(self, model: str) -> Sequence[TargetView]:
        """As they were made."""
        return self._views[model]

    def signals(self, caller: Caller) -> Signals:
        """A budget that moves the threshold for every request that gets so far; `asked` counts them."""
        self.asked += 1
        return Signals(month_left_ratio=0.4)


@frozen
class Pass:
    """All requests once. Seconds by the wall and of this process's own CPU time. dynamic: level 3 was asked."""

    wall_s: float
    cpu_s: float
    times_s: Sequence[float]
    levels: Counter[str]
    dynamic: int


def once(router: PolicyRouter, chats: Sequence[ChatRequest], policy: Policy) -> Pass:
    """One pass over all requests."""
    shelf, findings, clock = Shelf(), Findings(), time.perf_counter
    levels: Counter[str] = Counter()
    times_s: list[float] = []
    gc.collect()
    begun_s, begun_cpu_s = clock(), time.process_time()
    for chat in chats:
        one_s = clock()
        routed = router.route(chat, LOCAL, findings, shelf, policy, 0.5)
        times_s.append(clock() - one_s)
        levels[routed.level] += 1
    return Pass(clock() - begun_s, time.process_time() - begun_cpu_s, times_s, levels, shelf.asked)


def inspected_us(chats: Sequence[ChatRequest], policy: Policy) -> list[float]:
    """What looking for private values takes, in microseconds of CPU per request; beside the decision, not in it."""
    guard = PrivacyGuard()
    found = []
    for chat in chats:
        begun_s = time.process_time()
        guard.inspect(chat, LOCAL, policy)
        found.append(1e6 * (time.process_time() - begun_s))
    return found


def accuracy(test: Sequence[Labelled]) -> tuple[float, float, float]:
    """(share right, share above the threshold, share right of those)."""
    model = default_model()
    found = [(model.classify(features(prompt.text)), prompt.intent) for prompt in test]
    kept = [(intent, wanted) for intent, wanted in found if intent.probability >= model.threshold]
    right = sum(intent.name == wanted for intent, wanted in found)
    return right / len(found), len(kept) / len(found), sum(i.name == w for i, w in kept) / max(1, len(kept))


def coverage(test: Sequence[Labelled], policy: Policy) -> float:
    """Share of the prompts that a rule decides."""
    router, shelf = PolicyRouter(), Shelf()

    def routed(prompt: Labelled) -> Routed:
        chat = ChatRequest("auto", (Message("user", prompt.text),))
        return router.route(chat, LOCAL, Findings(), shelf, policy, 0.5)

    return sum(routed(prompt).level == "rules" for prompt in test) / len(test)


def measure(traces: Path | None, count: int, passes: int, seconds: float) -> tuple[dict[str, object], list[str]]:
    """All keys, and what a reader should know."""
    policy = compile_policy(POLICY.read_bytes(), "yaml")
    chats = requests(traces, count)
    router = PolicyRouter()
    once(router, chats[:200], policy)
    settle()  # as an agent and a coordinator do when they have begun
    done = [once(router, chats, policy) for _ in range(passes)]
    rates = [count / one.wall_s for one in done]
    cpu_rates = [count / one.cpu_s for one in done]
    levels = done[0].levels
    looked_us = inspected_us(chats[: min(count, 2000)], policy)
    _, test = halves(labelled())
    right, kept, right_of_kept = accuracy(test)
    served = ask([message(body(chat)) for chat in chats[:2000]], CONNECTIONS, seconds)
    keys: dict[str, object] = {
        "prompts": count,
        "decisions_per_s": statistics.median(rates),
        "decisions_per_cpu_s": statistics.median(cpu_rates),
        "p50_us": 1e6 * statistics.median(percentile(one.times_s, 0.5) for one in done),
        "p99_us": 1e6 * statistics.median(percentile(one.times_s, 0.99) for one in done),
        "share_rules": levels["rules"] / count,
        "share_heuristic": levels["heuristic"] / count,
        "share_dynamic": levels["dynamic"] / count,
        "reached_rules": 1.0,
        "reached_heuristic": 1.0 - levels["rules"] / count,
        # Others are hard, or so far from the threshold that nothing could move it there.
        "reached_dynamic": done[0].dynamic / count,
        "inspect_p50_us": percentile(looked_us, 0.5),
        "inspect_p99_us": percentile(looked_us, 0.99),
        "http_rps": served.requests_per_s,
        "http_p50_ms": served.p50_ms,
        "http_p99_ms": served.p99_ms,
        "http_right": served.right,
        "http_server_cpu_ms": served.server_cpu_ms,
        "test_prompts": len(test),
        "intent_accuracy": right,
        "intent_kept_ratio": kept,
        "intent_kept_accuracy": right_of_kept,
        "rules_coverage": coverage(test, policy),
        "rules_coverage_smallest_file": coverage(test, compile_policy(GIVEN, "yaml")),
        "encoder": default_model().id,
    }
    notes = [
        f"decisions per second over {passes} passes: {spread(rates)}; per second of CPU: {spread(cpu_rates)}",
        f"load average of the machine: {os.getloadavg()[0]:.1f}",
        "lengths: Azure's" if traces is not None else "lengths: log-normal like Azure's",
        f"/v1/route with {CONNECTIONS} connections, each one request at a time; private values are looked for there",
    ]
    return keys, notes


def main() -> None:
    """Command line."""
    parser = arguments("Routing decisions: speed, levels, accuracy.")
    parser.add_argument("--traces", type=Path, help="folder with azure2023/; lengths are drawn otherwise")
    options = parser.parse_args()
    keys, notes = measure(options.traces, 5000, 3 if options.quick else 9, 3.0 if options.quick else 15.0)
    publish("routing", keys, options.json, notes)


if __name__ == "__main__":
    main()

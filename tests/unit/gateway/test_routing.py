"""Routing in three levels: rules, complexity, what moves the threshold, and what routing keeps to."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from gateway import complexity, intents
from gateway.context import Caller
from gateway.dynamic_routing import OUT_OF_REACH, budget_lift, reach_of, threshold
from gateway.ports import Findings, Routed, Signals
from gateway.prompt_features import HEAD, TAIL, features
from gateway.prompt_reader import HARD_HEAD, HARD_TAIL, PromptReader
from gateway.route_plugins import Asked, Plugins, Suggestion, installed
from gateway.routing import PolicyRouter, believed_from
from gateway.targets import TargetView
from gateway.ttft import ecdf
from protocol.chat import ChatRequest
from protocol.errors import ConfigError, NotAllowed, NotFound
from protocol.policy import Policy, PrivacyPolicy, RoutingPolicy
from protocol.policy_routing import (
    BudgetLift,
    DynamicRouting,
    IntentRouting,
    RouteFallback,
    RouteRule,
    RouteWhen,
)
from protocol.text import Message

ARMED = RouteFallback(enable=True)
RULES = (
    RouteRule("edge", RouteWhen(("summarize", "intent_classify", "extract_entity"), ("low",))),
    RouteRule("cloud", RouteWhen(("code_gen", "multi_hop_reasoning", "math"))),
)
DEVICE, CLOUD = TargetView("device", True), TargetView("cloud", False)
ROUTER = PolicyRouter()
READER = PromptReader(intents.default_model())


class Shelf:
    """An offer: views by model, and signals."""

    def __init__(self, by_model: Mapping[str, Sequence[TargetView]], signals: Signals | None = None) -> None:
        self._by_model = by_model
        self._signals = signals or Signals()

    def models(self) -> dict[str, tuple[str, ...]]:
        return {model: tuple(view.name for view in views) for model, views in self._by_model.items()}

    def views(self, model: str) -> Sequence[TargetView]:
        return self._by_model.get(model, ())

    def signals(self, caller: Caller) -> Signals:
        return self._signals


BOTH = Shelf({"small": (DEVICE,), "large": (CLOUD,)})
SUMMARIZE = "Summarize the following text in one sentence: we met on Monday."
HARD = "What is the time complexity of this? for i in range(n): s += i"


def route(
    text: str,
    routing: RoutingPolicy | None = None,
    offer: Shelf = BOTH,
    caller: Caller | None = None,
    findings: Findings | None = None,
    model: str = "auto",
    router: PolicyRouter = ROUTER,
) -> Routed:
    chat = ChatRequest(model, (Message("user", text),))
    policy = Policy(routing=routing or RoutingPolicy(rules=RULES, fallback=ARMED))
    return router.route(chat, caller or Caller(), findings or Findings(), offer, policy, 0.5)


def test_a_named_model_stays() -> None:
    routed = route(SUMMARIZE, model="large")
    assert (routed.model, routed.level, routed.start) == ("large", "named", None)
    with pytest.raises(NotAllowed):
        route(SUMMARIZE, model="large", caller=Caller(models=frozenset({"small"})))


@pytest.mark.parametrize(
    ("text", "side"),
    [
        (SUMMARIZE, "device"),
        ("Extract all the person names from this email as JSON.", "device"),
        ("帮我总结一下这段话", "device"),
        ("Write a Python function that sorts a list", "cloud"),
        ("用Java实现一个二叉搜索树", "cloud"),
        ("Solve the equation 3x + 5 = 20", "cloud"),
    ],
)
def test_the_first_rule_that_matches_decides(text: str, side: str) -> None:
    routed = route(text)
    assert (routed.start, routed.level) == (side, "rules")
    assert routed.model == ("small" if side == "device" else "large")
    assert routed.other_model == ("large" if side == "device" else "small")


def test_a_route_is_a_preference_and_a_strict_one_a_line() -> None:
    assert route(SUMMARIZE).constraints.allows("cloud", False)
    strict = RouteRule("cloud", RouteWhen(("math",)), strict=True)
    routed = route("Solve 3x + 5 = 20", RoutingPolicy(rules=(strict,)))
    assert not routed.constraints.allows("device", True) and routed.other_model is None
    # A strict route to the edge would leave its fallback nowhere to go, so it is no rule.
    edge = RoutingPolicy(rules=(evolve(RULES[0], strict=True),), fallback=ARMED)
    assert route(SUMMARIZE, edge).level == "heuristic"


def test_what_the_client_says_of_its_intent_counts_more_than_the_classifier() -> None:
    assert route("hello", caller=Caller(intent="math")).start == "cloud"
    assert route("Solve 3x = 9", caller=Caller(intent="summarize")).start == "device"


@pytest.mark.parametrize(
    ("when", "caller", "matches"),
    [
        (RouteWhen(labels={"team": "a"}), Caller(labels={"team": "a"}), True),
        (RouteWhen(labels={"team": "a"}), Caller(labels={"team": "b"}), False),
        (RouteWhen(tenants=("t",)), Caller(tenant="t"), True),
        (RouteWhen(tenants=("t",)), Caller(tenant="u"), False),
        (RouteWhen(min_prompt_tokens=100), Caller(), False),
        (RouteWhen(max_prompt_tokens=100), Caller(), True),
        (RouteWhen(tools=True), Caller(), False),
        (RouteWhen(language="zh"), Caller(), False),
        (RouteWhen(language="en"), Caller(), True),
    ],
)
def test_other_conditions_of_a_rule(when: RouteWhen, caller: Caller, matches: bool) -> None:
    routing = RoutingPolicy(rules=(RouteRule("cloud", when),), fallback=ARMED)
    assert (route("hello there", routing, caller=caller).level == "rules") is matches


@pytest.mark.parametrize("text", [HARD, "这段代码的时间复杂度是多少？", "Prove that n! grows faster than 2^n"])
def test_short_but_hard_prompts_are_never_edge_only(text: str) -> None:
    """Neither a rule, nor a lifted threshold, nor a client's label sends them to the device alone."""
    always = RoutingPolicy(rules=(RouteRule("edge"),), fallback=ARMED)
    broke = Shelf({"small": (DEVICE,), "large": (CLOUD,)}, Signals(month_left_ratio=0.0))
    for routed in (route(text, always), route(text, offer=broke), route(text, caller=Caller(intent="summarize"))):
        assert routed.start == "cloud" and routed.hard
    resting = Shelf({"small": (DEVICE,), "large": (evolve(CLOUD, up=False),)})
    assert route(text, offer=resting).hard


@pytest.mark.parametrize("hard", ["prove it", "is it NP-hard", "give a Lower-Bound", "给出证明"])
@pytest.mark.parametrize("before", [0, 40, 60, 66, 70, 74, 76, 100])
def test_a_hard_mark_counts_in_more_of_a_long_prompt_than_the_classifier_reads(hard: str, before: int) -> None:
    assert route("a " * (before // 2) + hard + " south" * 80).hard


PIECES = (
    *complexity.MARKS["hard"].split("|"),
    *("Np-Hard", "improve", "of", "sums", "so ", " it", "天气", "证", "é", "-", "_"),
)


@given(st.lists(st.sampled_from(PIECES), max_size=40), st.sampled_from(["", " ", " a ", "\n"]), st.integers(0, 120))
def test_a_hard_mark_at_either_end_is_never_missed(pieces: list[str], between: str, gap: int) -> None:
    half = len(pieces) // 2
    text = between.join(pieces[:half]) + "x " * gap + between.join(pieces[half:])
    ends = text if len(text) <= HARD_HEAD + HARD_TAIL else f"{text[:HARD_HEAD]} {text[-HARD_TAIL:]}"
    seen = READER.read(text)
    if len(text) > HEAD + TAIL and complexity.says_hard(ends):
        assert seen.marks[complexity.HARD]


def test_a_hard_word_within_another_one_is_none() -> None:
    assert not route("please improve and approve " * 20).hard


def test_requests_with_tools_go_to_the_cloud_unless_a_rule_or_policy_says_otherwise() -> None:
    chat = ChatRequest("auto", (Message("user", SUMMARIZE),), tools=({"type": "function", "function": {"name": "f"}},))

    def start(routing: RoutingPolicy, offer: Shelf = BOTH) -> str | None:
        return ROUTER.route(chat, Caller(), Findings(), offer, evolve(Policy(), routing=routing), 0.5).start

    assert start(RoutingPolicy()) == "cloud"
    assert start(RoutingPolicy(tools_in_cloud=False)) == "device"
    assert start(RoutingPolicy(rules=(RouteRule("edge", RouteWhen(tools=True)),), fallback=ARMED)) == "device"
    resting = Shelf({"small": (DEVICE,), "large": (evolve(CLOUD, up=False),)})
    assert start(RoutingPolicy(), resting) == "device"


def test_an_edge_rule_without_an_armed_fallback_is_no_rule() -> None:
    text = "Extract all the person names from this email as JSON."
    assert route(text, RoutingPolicy(rules=RULES)).level == "heuristic"
    assert route(text, RoutingPolicy(rules=RULES, fallback=ARMED)).level == "rules"


def test_forty_percent_of_the_months_budget_lift_the_threshold_to_085() -> None:
    found = threshold(0.7, DynamicRouting(), Signals(month_left_ratio=0.4), [DEVICE], [CLOUD], 100)
    assert found.value == pytest.approx(0.85)
    assert "40%" in found.reasons[0] and "month" in found.reasons[0]
    # The same through the router: 0.8 is for the cloud with a full budget, and for the device with 40 % of it.
    text = "why compare and design a python function"
    routing = RoutingPolicy(cloud_threshold=0.7)
    full, spent = route(text, routing), route(text, routing, Shelf(BOTH._by_model, Signals(month_left_ratio=0.4)))
    assert full.complexity is not None and 0.7 <= full.complexity < 0.85
    assert (full.start, full.level) == ("cloud", "heuristic")
    assert (spent.start, spent.level) == ("device", "dynamic")


@given(st.floats(0, 1), st.floats(0, 1))
def test_less_budget_never_lowers_the_threshold(one: float, other: float) -> None:
    points = DynamicRouting().budget_lifts
    less, more = sorted((one, other))
    assert budget_lift(points, less) >= budget_lift(points, more) - 1e-12
    assert 0.0 <= budget_lift(points, one) <= 0.3


@pytest.mark.parametrize(
    ("signals", "device", "cloud", "policy", "expected"),
    [
        (Signals(day_left_ratio=0.4, month_left_ratio=1.0), DEVICE, CLOUD, DynamicRouting(), 0.85),
        (Signals(day_left_ratio=0.7), DEVICE, CLOUD, DynamicRouting(), 0.775),
        (Signals(battery_ratio=0.1), DEVICE, CLOUD, DynamicRouting(), 0.6),
        (Signals(battery_ratio=0.9), DEVICE, CLOUD, DynamicRouting(), 0.7),
        (Signals(hot=True), DEVICE, CLOUD, DynamicRouting(), 0.6),
        (Signals(), evolve(DEVICE, queue_s=9.0), CLOUD, DynamicRouting(), 0.6),
        (Signals(), DEVICE, evolve(CLOUD, seen=8, ttft=ecdf([9.0] * 8)), DynamicRouting(), 0.8),
        (Signals(), DEVICE, evolve(CLOUD, seen=8, ttft=ecdf([0.1] * 4 + [float("inf")] * 4)), DynamicRouting(), 0.9),
        (Signals(), DEVICE, evolve(CLOUD, up=False), DynamicRouting(), OUT_OF_REACH),
        (Signals(), evolve(DEVICE, up=False), CLOUD, DynamicRouting(), -OUT_OF_REACH),
        (Signals(), evolve(DEVICE, prefill_s=0.1), CLOUD, DynamicRouting(max_ttft_s=2.0), 0.55),
        (Signals(), DEVICE, evolve(CLOUD, ttft=ecdf([9.0])), DynamicRouting(max_ttft_s=2.0), 0.85),
        (Signals(hot=True), DEVICE, CLOUD, DynamicRouting(enable=False), 0.7),
    ],
)
def test_what_moves_the_threshold(
    signals: Signals, device: TargetView, cloud: TargetView, policy: DynamicRouting, expected: float
) -> None:
    assert threshold(0.7, policy, signals, [device], [cloud], 100).value == pytest.approx(expected)


@given(
    st.none() | st.floats(0, 1),
    st.none() | st.floats(0, 1),
    st.booleans(),
    st.floats(0, 60),
    st.lists(st.sampled_from([0.1, 9.0, float("inf")]), max_size=8),
    st.none() | st.floats(0.1, 60),
    st.floats(-1, 1),
    st.floats(-0.5, 0.5),
)
def test_nothing_moves_the_threshold_out_of_its_reach(
    left: float | None,
    battery: float | None,
    hot: bool,
    queue_s: float,
    ttft_s: list[float],
    most_s: float | None,
    lift: float,
    drop: float,
) -> None:
    lifts = (BudgetLift(0.9, lift), BudgetLift(0.1, -lift / 2))
    policy = DynamicRouting(budget_lifts=lifts, max_ttft_s=most_s, queue_drop=drop, slow_lift=-drop, latency_shift=lift)
    signals = Signals(month_left_ratio=left, battery_ratio=battery, hot=hot)
    device, cloud = evolve(DEVICE, queue_s=queue_s), evolve(CLOUD, seen=len(ttft_s), ttft=ecdf(ttft_s))
    reach = reach_of(0.7, policy)
    assert reach.least <= threshold(0.7, policy, signals, [device], [cloud], 100).value < reach.most


def test_the_state_of_the_house_is_looked_at_only_where_it_can_make_a_difference() -> None:
    class Watched(Shelf):
        asked = 0

        def signals(self, caller: Caller) -> Signals:
            self.asked += 1
            return super().signals(caller)

    both: dict[str, Sequence[TargetView]] = {"small": (DEVICE,), "large": (CLOUD,)}
    near = "why compare and design a python function"
    for text, by_model, start in (
        ("hello", both, "device"),
        (near, both, "device"),
        (HARD, both, "cloud"),
        ("hello", {**both, "small": (evolve(DEVICE, up=False),)}, "cloud"),
    ):
        offer = Watched(by_model, Signals(month_left_ratio=0.4))
        assert route(text, RoutingPolicy(), offer).start == start
        assert bool(offer.asked) is (text == near or by_model is not both)


def test_privacy_and_the_policys_targets_come_first() -> None:
    routed = route(HARD, findings=Findings(True, "a label keeps it here"))
    assert (routed.start, routed.model) == ("device", "small")
    assert not routed.constraints.allows("cloud", False)
    assert route(SUMMARIZE, RoutingPolicy(targets=("cloud",))).start == "cloud"
    policy = Policy(privacy=PrivacyPolicy(local_only=True))
    chat = ChatRequest("auto", (Message("user", "Solve x = 1"),))
    assert ROUTER.route(chat, Caller(), Findings(), BOTH, policy, 0.1).start == "device"


def test_the_policys_models_are_what_auto_means() -> None:
    shelf = Shelf({"a": (DEVICE, CLOUD), "b": (DEVICE,), "c": (CLOUD,)})
    routing = RoutingPolicy(rules=RULES, fallback=ARMED, models={"edge": "b", "cloud": "c"})
    assert route(SUMMARIZE, routing, shelf).model == "b"
    assert route("Solve 3x + 5 = 20", routing, shelf).model == "c"
    assert route(SUMMARIZE, routing, shelf, caller=Caller(models=frozenset({"a", "c"}))).model in ("a", "b")


def test_a_key_gets_only_models_that_it_may_name() -> None:
    assert route("Solve 3x + 5 = 20", caller=Caller(models=frozenset({"small"}))).model == "small"
    with pytest.raises(NotFound):
        route("hello", caller=Caller(models=frozenset({"none"})))


def test_a_side_that_cannot_answer_now_is_passed_over() -> None:
    resting = Shelf({"small": (DEVICE,), "large": (evolve(CLOUD, up=False),)})
    assert route("Solve 3x + 5 = 20", offer=resting).start == "device"
    assert route("hello", offer=Shelf({"large": (CLOUD,)})).start == "cloud"
    with pytest.raises(NotFound):
        route("hello", offer=Shelf({}))


def test_vectors_are_made_here_where_this_machine_can() -> None:
    chat = ChatRequest("auto", "why compare and design a python function", endpoint="embedding")
    policy = Policy(routing=RoutingPolicy(cloud_threshold=0.35))
    assert ROUTER.route(chat, Caller(), Findings(), BOTH, policy, 0.5).start == "device"
    far = Shelf({"large": (CLOUD,)})
    assert ROUTER.route(chat, Caller(), Findings(), far, policy, 0.5).start == "cloud"


def test_a_rule_may_name_a_target_and_a_model() -> None:
    shelf = Shelf({"small": (DEVICE,), "large": (CLOUD,), "big": (TargetView("cloud:acme", False),)})
    rule = RouteRule("cloud:acme", RouteWhen(("math",)), model="big")
    assert route("Solve 3x + 5 = 20", RoutingPolicy(rules=(rule,)), shelf).model == "big"


def test_thresholds_hold_for_the_encoder_that_they_were_chosen_for() -> None:
    """R1: a threshold of another classifier says nothing, so the classifier's own counts."""
    model = intents.default_model()
    assert believed_from(IntentRouting(0.99, model.id), model) == 0.99
    assert believed_from(IntentRouting(0.99, "words-of-last-year"), model) == model.threshold
    other = intents.read(intents.write(model.names, {"word": [1] * len(model.names)}, 1.0, 0.4))
    assert other.id != model.id
    text = "Summarize this"
    strict = RoutingPolicy(rules=RULES, fallback=ARMED, intent=IntentRouting(1.0, model.id))
    assert route(text, strict).intent is None
    assert route(text, evolve(strict, intent=IntentRouting(1.0, other.id))).intent == "summarize"


def test_a_broken_model_file_says_so() -> None:
    for data in (b"", intents.MAGIC + b"{}\n", intents.MODEL_FILE.read_bytes()[:-3]):
        with pytest.raises(ConfigError):
            intents.read(data)


@given(st.text(max_size=2000))
def test_any_text_has_a_complexity_and_an_intent(text: str) -> None:
    facts = ROUTER.facts(ChatRequest("auto", (Message("user", text),)), Caller(), RoutingPolicy())
    assert 0.0 <= facts.complexity <= 1.0
    assert 0.0 < intents.default_model().classify(features(text)).probability <= 1.0


def plugged(plugin: Callable[[Asked], object]) -> PolicyRouter:
    return PolicyRouter(plugins=Plugins({"mine": plugin}.get))


PLUGGED = RoutingPolicy(rules=RULES, fallback=ARMED, plugins=("mine", "absent"), plugin_deadline_s=0.5)


def test_a_plugin_decides_before_the_rules() -> None:
    router = plugged(lambda asked: Suggestion("cloud", reason=f"intent {asked.facts.intent}"))
    try:
        routed = route(SUMMARIZE, PLUGGED, router=router)
        assert (routed.start, routed.level) == ("cloud", "plugin")
        assert routed.reason == "plugin mine: intent summarize"
    finally:
        router.close()


def _raises(asked: Asked) -> object:
    raise RuntimeError("broken")


@pytest.mark.parametrize("plugin", [_raises, lambda asked: "edge", lambda asked: None])
def test_a_plugin_that_fails_leaves_the_decision_to_the_rules(plugin: Callable[[Asked], object]) -> None:
    router = plugged(plugin)
    try:
        assert route(SUMMARIZE, PLUGGED, router=router).level == "rules"
    finally:
        router.close()


def test_a_plugin_that_hangs_costs_one_deadline() -> None:
    asked: list[Asked] = []
    go_on = threading.Event()

    def hangs(one: Asked) -> None:
        asked.append(one)
        go_on.wait(20)

    router = plugged(hangs)
    try:
        for _ in range(5):
            assert route(SUMMARIZE, evolve(PLUGGED, plugin_deadline_s=0.01), router=router).level == "rules"
        assert len(asked) == 1
    finally:
        go_on.set()
        router.close()


def test_plugins_are_entry_points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    described = tmp_path / "our_routing-1.0.dist-info"
    described.mkdir()
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: our-routing\nVersion: 1.0\n")
    (described / "entry_points.txt").write_text(
        "[midstream.routers]\nby_project = our_routing:suggest\nbroken = our_routing:nothing\n"
    )
    (tmp_path / "our_routing.py").write_text(
        "from gateway.route_plugins import Suggestion\n\n\ndef suggest(asked):\n    return Suggestion('cloud')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert installed("broken") is None and installed("absent") is None
    router = PolicyRouter()
    try:
        routed = route(SUMMARIZE, evolve(PLUGGED, plugins=("broken", "by_project")), router=router)
        assert (routed.start, routed.level) == ("cloud", "plugin")
    finally:
        router.close()

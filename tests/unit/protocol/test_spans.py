"""Events to spans: one trace id, times in order, moves as spans of their own, and nothing of a trace nobody records."""

from __future__ import annotations

import itertools
import os

from attrs import evolve

from protocol.events import Event, HandedOver, HandoffServed, RouteTold, SourceLost, TensorDone, TextDone
from protocol.spans import MAX_MOVES, MAX_WAITING, Span, SpanFold
from protocol.trace import TraceContext, entered

ROOT = entered("", bytes(range(24)))
DONE = TextDone(
    at_s=10.0, request_id="r", model="m", status="ok", prompt_tokens=5, completion_tokens=20, ttft_s=0.5, total_s=3.0,
    sides=(("device", 8), ("cloud", 12)), reason="why", level="rules", decided_s=0.25, usd=0.01, trace=ROOT,
)  # fmt: skip
MOVE = HandedOver(at_s=8.0, request_id="r", source="device", target="cloud", index=8, local=False, reason="faster")


def folded(*events: Event) -> list[Span]:
    spans: list[Span] = []
    fold = SpanFold(spans.append, os.urandom)
    for event in events:
        fold(event)
    return spans


def test_decision_upgrade_and_stream_are_one_trace() -> None:
    lost = SourceLost(at_s=9.0, request_id="r", source="cloud", target="device", index=12)
    spans = folded(MOVE, lost, DONE)
    assert [span.name for span in spans] == [
        "text request", "decide", "first token", "stream", "handover", "fallback",
    ]  # fmt: skip
    assert {span.context.trace_id for span in spans} == {ROOT.trace_id}
    assert {span.context.parent_id for span in spans[1:]} == {ROOT.span_id}
    assert len({span.context.span_id for span in spans}) == len(spans)
    times = {span.name: (span.begins_s, span.ends_s) for span in spans}
    assert times["text request"] == (6.75, 10.0)
    assert times["decide"] == (6.75, 7.0)
    assert times["first token"] == (7.0, 7.5)
    assert times["stream"] == (7.5, 10.0)
    assert times["handover"] == (8.0, 10.0)
    assert spans[1].attributes["midstream.level"] == "rules"


def test_a_peers_stream_is_under_the_request_of_the_device() -> None:
    served = HandoffServed(
        at_s=4.0, traceparent=ROOT.header, model="m", status="ok", prompt_tokens=5, first=8, tokens=12, total_s=2.0
    )
    (span,) = folded(served)
    assert (span.context.trace_id, span.context.parent_id, span.name) == (ROOT.trace_id, ROOT.span_id, "handoff")
    assert not folded(evolve(served, traceparent=""), evolve(served, traceparent="nonsense"))


def test_failures_are_errors_and_clients_that_leave_are_none() -> None:
    assert [folded(evolve(DONE, status=status))[0].error for status in ("ok", "cancelled", "stream_truncated")] == [
        "", "", "stream_truncated",
    ]  # fmt: skip


TENSOR = TensorDone(
    at_s=10.0, request_id="t", model="m", arm="cloud", status="ok", total_s=1.0, send_s=0.25, server_s=0.5,
    receive_s=0.125, trace=ROOT,
)  # fmt: skip
TOLD = RouteTold(at_s=5.0, model="m", target="device", level="rules", reason="why", total_s=0.5, trace=ROOT)


def test_a_tensor_request_is_a_span_with_its_stages_one_after_the_other() -> None:
    spans = folded(TENSOR)
    assert [(span.name, span.begins_s, span.ends_s) for span in spans] == [
        ("tensor request", 9.0, 10.0), ("send", 9.0, 9.25), ("server", 9.25, 9.75), ("receive", 9.75, 9.875),
    ]  # fmt: skip
    assert spans[0].context == ROOT and {span.context.parent_id for span in spans[1:]} == {ROOT.span_id}
    assert spans[0].attributes["midstream.arm"] == "cloud" and not spans[0].error
    failed = folded(evolve(TENSOR, status="engine_error", total_s=0.25))
    assert failed[0].error == "engine_error" and max(span.ends_s for span in failed) == 10.0
    assert folded(evolve(TENSOR, trace=None)) == []


def test_a_question_for_the_route_is_a_span() -> None:
    (span,) = folded(TOLD)
    assert (span.name, span.begins_s, span.ends_s, span.context) == ("route request", 4.5, 5.0, ROOT)
    assert span.attributes["midstream.targets"] == "device"


def test_a_trace_that_nobody_records_makes_no_spans() -> None:
    assert not folded(evolve(DONE, trace=TraceContext(ROOT.trace_id, ROOT.span_id, sampled=False)))
    assert not folded(evolve(DONE, trace=None))


def test_moves_that_wait_are_bounded() -> None:
    spans: list[Span] = []
    fold = SpanFold(spans.append, os.urandom)
    for number in range(3 * MAX_WAITING):
        fold(evolve(MOVE, request_id=f"r{number}"))
    for _ in range(2 * MAX_MOVES):
        fold(evolve(MOVE, request_id="r"))
    fold(evolve(DONE, request_id="r0"))
    assert "handover" not in [span.name for span in spans], "the oldest are forgotten"
    fold(DONE)
    assert sum(span.name == "handover" for span in spans) == MAX_MOVES


def test_an_answer_without_a_first_token_has_no_stream() -> None:
    names = [span.name for span in folded(evolve(DONE, ttft_s=None))]
    assert names == ["text request", "decide"]
    assert all(span.begins_s <= span.ends_s for span in itertools.chain(folded(evolve(DONE, ttft_s=9.0))))

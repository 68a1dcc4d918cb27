"""One trace over every text door, the handoff and providers; both houses' spans at a collector."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from attrs import define, field
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span as OtlpSpan

from benchmarks.fake_upstream import serve_upstream
from benchmarks.limited_gateway import GatewaySetup, providers
from cloud_stub.admin_client import AdminClient
from engines.fakes_text import FakeTextEngine
from engines.peer import PeerEngine
from engines.peer_host import serve_stream
from engines.port import TensorAnswer
from engines.remote_twin import RemoteTwin
from gateway.targets import Target
from links.http import HttpLink
from links.http_server import serve
from links.otlp import OtlpSpans, collector_url
from links.port import FrameRoute, FrameStream, Request, Response, Route
from protocol.clock import wall_now
from protocol.errors import ConfigError
from protocol.events import Emit, HandedOver, RecordingEmit, RouteTold, TensorDone
from protocol.fanout import Fanout
from protocol.oip import InferRequest, encode_request
from protocol.policy import DispatchPolicy, MigrationPolicy, Policy
from protocol.spans import SpanFold
from protocol.tensor_frames import TENSOR_FRAMES
from protocol.tensors import Tensor
from protocol.trace import parsed
from split_models.frames_front import FramesFront
from split_models.front import Front
from split_models.service import Service, Shown
from tests.route.coordinator_house import running
from tests.route.text_house import house
from tests.unit.agent.houses import RunningHouse, config_for
from tests.unit.split_models.parts import Inline, Scripted, floats

TRACE, ABOVE = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
CAME = {"traceparent": f"00-{TRACE}-{ABOVE}-01", "content-type": "application/json"}
ANSWER_TOKENS = 600
"""So many that the answer is not over before it was moved."""
TURN = [{"role": "user", "content": "n=a tell me of the river"}]


@define
class Collector:
    """What an OpenTelemetry collector was sent, by service."""

    url: str = ""
    spans: dict[str, list[OtlpSpan]] = field(factory=lambda: defaultdict(list))

    async def take(self, request: Request) -> Response:
        for resource in ExportTraceServiceRequest.FromString(request.body).resource_spans:
            facts = {one.key: one.value.string_value for one in resource.resource.attributes}
            for scope in resource.scope_spans:
                self.spans[facts["service.name"]] += scope.spans
        return Response(200, {"content-type": "application/x-protobuf"}, b"")

    def of(self, service: str, name: str, trace: str = TRACE) -> OtlpSpan:
        (found,) = [span for span in self.spans[service] if span.name == name and span.trace_id.hex() == trace]
        return found


@asynccontextmanager
async def collector() -> AsyncIterator[Collector]:
    found = Collector()
    server = await serve([Route("POST", "/v1/traces", found.take)])
    found.url = f"http://127.0.0.1:{server.port}"
    try:
        yield found
    finally:
        await server.close()


@asynccontextmanager
async def exporting(to: Collector, service: str) -> AsyncIterator[Emit]:
    """As a house composes it."""
    spans = OtlpSpans(to.url, service, "one", time.monotonic, wall_now)
    try:
        yield SpanFold(spans, os.urandom)
    finally:
        await asyncio.to_thread(spans.close)


async def test_one_trace_id_over_a_real_handoff_in_mid_stream() -> None:
    moves = MigrationPolicy(min_tokens=8, min_remaining_tokens=1, consume_tokens_per_s=0.001, stall_s=0.5)
    policy = Policy(dispatch=DispatchPolicy(start="device"), migration=moves)
    far = FakeTextEngine(name="far", answer_tokens=ANSWER_TOKENS)

    async def held(seconds: float) -> None:
        """What a token takes; behind the first ones until the coordinator was asked, however busy the machine is."""
        await asyncio.sleep(seconds)
        async with asyncio.timeout(30.0):
            while here.generated_count >= 12 and not far.prepared:
                await asyncio.sleep(0.01)

    here = FakeTextEngine(name="here", tokens_per_s=100.0, answer_tokens=ANSWER_TOKENS, sleep=held)
    async with collector() as got:
        async with exporting(got, "coordinator") as cloud_spans, exporting(got, "agent") as device_spans:

            async def handle(request: Request, stream: FrameStream) -> None:
                await serve_stream(lambda _: far, stream, emit=cloud_spans)

            server = await serve([], [FrameRoute("/handoff", handle)])
            link = HttpLink("cloud", f"http://127.0.0.1:{server.port}")
            peer = PeerEngine(lambda: link.open("/handoff"), name="cloud", vocabulary="fake-vocabulary")
            targets = [
                Target("device", True, here, frozenset({"fake"})),
                Target("cloud", False, peer, frozenset({"fake"}), tokens_per_s=1e9),
            ]
            kept = RecordingEmit()
            async with house(targets, policy=policy, listener=Fanout([kept, device_spans])) as served:
                front = HttpLink("front", served.base_url)
                body = {"model": "fake", "messages": TURN, "max_tokens": ANSWER_TOKENS}
                reply = await front.exchange("/v1/chat/completions", CAME, json.dumps(body).encode(), 60.0)
                await front.close()
            await peer.close()
            await link.close()
            await server.close()
        assert any(isinstance(event, HandedOver) for event in kept.events)
        assert reply.headers["x-midstream-trace-id"] == TRACE
        ids = {span.trace_id.hex() for spans in got.spans.values() for span in spans}
        assert ids == {TRACE}
        root = got.of("agent", "text request")
        assert root.parent_span_id.hex() == ABOVE
        for name in ("decide", "first token", "stream", "handover"):
            assert got.of("agent", name).parent_span_id == root.span_id
        handoff = got.of("coordinator", "handoff")
        assert handoff.parent_span_id == root.span_id
        tokens = {one.key: one.value.int_value for one in handoff.attributes}["gen_ai.usage.output_tokens"]
        assert 0 < tokens < ANSWER_TOKENS, "the coordinator made the rest of it"
        assert root.start_time_unix_nano <= handoff.start_time_unix_nano < handoff.end_time_unix_nano
        assert abs(root.end_time_unix_nano / 1e9 - time.time()) < 60.0


async def test_a_question_for_the_route_is_in_the_trace() -> None:
    async with house([Target("device", True, FakeTextEngine(), frozenset({"m"}))]) as served:
        link = HttpLink("front", served.base_url)
        body = json.dumps({"model": "m", "messages": TURN}).encode()
        named, made = [await link.exchange("/v1/route", headers, body, 10.0) for headers in (CAME, {})]
        await link.close()
    assert named.headers["x-midstream-trace-id"] == TRACE
    told = [event.trace for event in served.emit.events if isinstance(event, RouteTold)]
    assert [span.trace_id for span in told] == [TRACE, made.headers["x-midstream-trace-id"]]
    assert [span.parent_id for span in told] == [ABOVE, ""]


class Relay(Scripted):
    """A device that has no model and asks the server each time."""

    def __init__(self, twin: RemoteTwin) -> None:
        super().__init__({})
        self._twin = twin

    async def infer(
        self,
        model: str,
        inputs: Sequence[Tensor],
        deadline_s: float,
        *,
        load: bool = True,
        left: Callable[[float], None] | None = None,
    ) -> TensorAnswer:
        return await self._twin.infer(model, inputs, deadline_s)


@pytest.mark.parametrize("frames", [False, True], ids=["oip", "frames"])
async def test_one_trace_over_both_tensor_doors(frames: bool) -> None:
    """The device's door, the way to the server by exchanges or frames, and the server's door."""
    got, there = RecordingEmit(), RecordingEmit()
    answers = Scripted({"m": floats("y", 1, 2)})
    known = {"m": Shown("m", "onnx_onnxv1")}
    far = Service(answers, Inline(), time.monotonic, lambda: known, side="server", emit=there)
    front = Front(far, extensions=(TENSOR_FRAMES,) if frames else ())
    server = await serve(front.routes, [FramesFront(far).route] if frames else [])
    link = HttpLink("cloud", f"http://127.0.0.1:{server.port}")
    twin = RemoteTwin(link)
    door = Front(Service(Relay(twin), Inline(), time.monotonic, lambda: known, emit=got))
    try:
        async with asyncio.timeout(5.0):
            while frames and not twin.pipelined:
                await twin.infer("m", (floats("x", 1, 2),), 5.0)
                await asyncio.sleep(0.01)
        headers, body = encode_request(InferRequest("m", (floats("x", 1, 2),), binary=True))
        route = next(route for route in door.routes if route.path == "/v2/models/{model}/infer")
        for came in (CAME, {}):
            request = Request("POST", "/v2/models/m/infer", {**headers, **came}, {"model": "m"}, body=body)
            reply = await route.handle(request)
            assert reply.status == 200, reply.body
            here, beyond = (log.events[-1] for log in (got, there))
            assert isinstance(here, TensorDone) and isinstance(beyond, TensorDone)
            assert here.trace is not None and beyond.trace is not None
            assert here.trace.trace_id == beyond.trace.trace_id == reply.headers["x-midstream-trace-id"]
            assert beyond.trace.parent_id == here.trace.span_id != beyond.trace.span_id
            assert not came or (here.trace.trace_id, here.trace.parent_id) == (TRACE, ABOVE)
    finally:
        await twin.close()
        await link.close()
        await server.close()


DOORS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"model": "m", "messages": TURN}),
    ("/v1/chat/completions", {"model": "m", "messages": TURN, "stream": True}),
    ("/v1/completions", {"model": "m", "prompt": "tell"}),
    ("/v1/embeddings", {"model": "m", "input": "tell"}),
    ("/v1/messages", {"model": "m", "messages": TURN, "max_tokens": 16}),
    ("/api/chat", {"model": "m", "messages": TURN}),
    ("/api/generate", {"model": "m", "prompt": "tell", "stream": False}),
    ("/api/embed", {"model": "m", "input": "tell"}),
]


@pytest.mark.parametrize(("path", "body"), DOORS)
async def test_every_door_takes_a_trace_and_makes_one_where_there_is_none(path: str, body: dict[str, Any]) -> None:
    engine = FakeTextEngine()
    async with house([Target("device", True, engine, frozenset({"m"}))]) as served:
        link = HttpLink("front", served.base_url)
        try:
            found = []
            for headers in (CAME, {"traceparent": "nonsense"}, {}):
                reply = await link.exchange(path, headers, json.dumps(body).encode(), 10.0)
                assert reply.status == 200, reply.body
                found.append(reply.headers["x-midstream-trace-id"])
        finally:
            await link.close()
    assert found[0] == TRACE
    assert len(set(found)) == 3 and all(len(one) == 32 for one in found)
    assert [one.trace.trace_id for one in served.done() if one.trace is not None] == found
    for request, trace_id in zip(engine.prepared, found, strict=False):
        carried = parsed(request.traceparent)
        assert carried is not None and carried.trace_id == trace_id and carried.span_id != ABOVE


@pytest.mark.parametrize("stream", [False, True])
async def test_a_provider_is_asked_in_the_trace(tmp_path: Path, stream: bool) -> None:
    port, ledger, stop = await serve_upstream()
    upstream = providers(GatewaySetup(str(tmp_path), port))
    try:
        async with house(list(upstream.targets())) as served:
            link = HttpLink("front", served.base_url)
            body = {"model": "m", "messages": TURN, "stream": stream}
            reply = await link.exchange("/v1/chat/completions", CAME, json.dumps(body).encode(), 10.0)
            await link.close()
    finally:
        await upstream.close()
        stop()
    assert reply.headers["x-midstream-trace-id"] == TRACE
    carried = parsed(ledger.by_name["a"].traceparent)
    assert carried is not None and carried.trace_id == TRACE and carried.span_id != ABOVE


async def test_a_collector_that_is_gone_costs_no_request(free_port: Callable[[], int]) -> None:
    lost = Collector(f"http://127.0.0.1:{free_port()}")
    targets = [Target("device", True, FakeTextEngine(), frozenset({"m"}))]
    async with exporting(lost, "agent") as spans, house(targets, listener=spans) as served:
        link = HttpLink("front", served.base_url)
        ask = json.dumps({"model": "m", "messages": TURN}).encode()
        assert [(await link.exchange("/v1/chat/completions", CAME, ask, 10.0)).status for _ in range(3)] == [200] * 3
        await link.close()


@pytest.mark.parametrize("endpoint", ["host:4318", "ftp://host", "http://user:secret@host"])
def test_an_address_that_is_none_is_told(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="otel_endpoint") as caught:
        collector_url(endpoint)
    assert "secret" not in str(caught.value.next_step)


def test_the_usual_path_is_added_where_none_is_named() -> None:
    assert collector_url("http://host:4318/") == "http://host:4318/v1/traces"
    assert collector_url("https://host/otlp/v1/traces") == "https://host/otlp/v1/traces"


@pytest.mark.slow
async def test_agent_and_coordinator_are_one_trace(tmp_path: Path, model_file: Callable[[str], Path]) -> None:
    """Both houses as they are started, a real model on both sides, an answer that moves to the cloud."""
    name = "smollm2-135m"
    models_dir = model_file(name).parent.parent
    async with collector() as got:
        async with running(
            tmp_path, models_dir=models_dir, models=(name,), cut=False, text_engine="llama_server", text_threads=1,
            otel_endpoint=got.url,
        ) as coordinator:  # fmt: skip
            config = config_for(
                tmp_path / "agent", join_token=coordinator.house.join_string(), models_dir=str(models_dir),
                text_model=name, text_threads=1, slowdown=8.0, otel_endpoint=got.url,
            )  # fmt: skip
            async with RunningHouse(config) as agent:
                await agent.until_state("connected")
                policy = b"[migration]\nmin_tokens = 4\nmin_remaining_tokens = 1\nconsume_tokens_per_s = 0.01\n"
                await AdminClient(coordinator.house.config.state_dir).ask("POST", "/policy", policy, {"form": "toml"})
                await agent.until(lambda: agent.house.holder.current().migration.min_tokens == 4)
                await agent.until(lambda: name in agent.house.texts.cloud_models and name in agent.house.texts.models)
                await coordinator.house.text.warm()
                trace = await trace_of_a_moved_answer(agent, name)
        root = got.of("midstream-agent", "text request", trace)
        assert root.parent_span_id.hex() == ABOVE
        assert got.of("midstream-agent", "handover", trace).parent_span_id == root.span_id
        assert got.of("midstream-coordinator", "handoff", trace).parent_span_id == root.span_id


async def trace_of_a_moved_answer(agent: RunningHouse, model: str) -> str:
    """Ask until an answer began here and ended in the cloud: one may be over before the other side has read it."""
    body = {"model": model, "messages": [{"role": "user", "content": "Count to fifty."}], "max_tokens": 160}
    targets = []
    for turn in range(5):
        trace = f"{TRACE[:-1]}{turn}"
        came = {**CAME, "traceparent": f"00-{trace}-{ABOVE}-01"}
        reply = await agent.link.exchange("/v1/chat/completions", came, json.dumps(body).encode(), 90.0)
        assert reply.status == 200, reply.body
        targets.append(reply.headers["x-midstream-target"])
        if targets[-1] == "device,cloud":
            return trace
    raise AssertionError(f"no answer moved to the cloud: {targets}")

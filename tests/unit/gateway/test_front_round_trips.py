"""Front doors against the upstream codecs of the same APIs: what one side writes, the other reads as it was meant."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.fakes_text import FakeTextEngine
from gateway.answer import Answer
from gateway.pipeline import TextWay
from gateway.settings import GatewayPorts, GatewaySettings
from gateway.targets import Target
from gateway.wire import Wire
from gateway.wire_anthropic import AnthropicWire
from gateway.wire_ollama import OllamaWire
from gateway.wire_openai import OpenAIWire
from protocol import anthropic_parse, ollama_parse, openai_parse
from protocol.chat import ChatRequest, tool_call, tool_definition
from protocol.openai_wire import head_for
from protocol.policy import Policy
from protocol.provider_kinds import codec_of
from protocol.text import CallDelta, ImagePart, Message, Sampling, TextPart, TextRequest
from protocol.upstream import UpstreamDelta

PNG = b"\x89PNG\r\n\x1a\n"
said = st.text('ab é\n"\\<>{}[]', min_size=1, max_size=20).filter(lambda text: text.strip())
schemas = st.sampled_from([{"type": "object", "properties": {"x": {"type": "string"}}}, {"type": "object"}])
arguments = st.dictionaries(st.sampled_from(["x", "y"]), said | st.integers(-5, 5) | st.none(), max_size=2)


@st.composite
def talks(draw: st.DrawFn) -> tuple[Message, ...]:
    """System first, then user turns with or without a picture, calls with their results, a user turn at the end."""
    turns = [Message("system", draw(said))] if draw(st.booleans()) else []
    number = 0
    for _ in range(draw(st.integers(0, 2))):
        turns.append(draw(users()))
        if draw(st.booleans()):
            calls = draw(st.lists(arguments, min_size=1, max_size=2))
            ids = [f"call_{number + place + 1}" for place in range(len(calls))]
            number += len(calls)
            made = tuple(
                tool_call(i, f"f{i}", json.dumps(a, ensure_ascii=False)) for i, a in zip(ids, calls, strict=True)
            )
            turns.append(Message("assistant", draw(said | st.just("")), tool_calls=made))
            turns += [Message("tool", draw(said), tool_call_id=i) for i in ids]
            turns.append(Message("assistant", draw(said)))
        else:
            turns.append(Message("assistant", draw(said)))
    return (*turns, draw(users()))


@st.composite
def users(draw: st.DrawFn) -> Message:
    text = draw(said)
    if not draw(st.booleans()):
        return Message("user", text)
    return Message("user", text, parts=(TextPart(text), ImagePart("image/png", PNG + draw(st.binary(max_size=4)))))


requests = st.builds(
    TextRequest,
    model=st.just("m"),
    prompt=talks(),
    sampling=st.builds(
        Sampling,
        temperature=st.sampled_from([0.0, 0.5, 1.0]),
        top_p=st.sampled_from([0.5, 1.0]),
        max_tokens=st.integers(1, 99),
    ),
    tools=st.lists(st.sampled_from(["f1", "f2"]), max_size=2, unique=True).flatmap(
        lambda names: st.tuples(*(st.builds(tool_definition, st.just(n), st.just("d"), schemas) for n in names))
    ),
)
stops = st.lists(said, max_size=2).map(tuple)

PARSE: dict[str, Callable[[bytes], ChatRequest]] = {
    "openai": openai_parse.parse_chat,
    "anthropic": anthropic_parse.parse_messages,
    "ollama": ollama_parse.parse_chat,
}


@pytest.mark.parametrize("kind", PARSE)
@settings(max_examples=30)
@given(requests, stops, st.booleans(), st.data())
def test_a_request_that_our_client_writes_is_read_as_it_was(
    kind: str, request: TextRequest, stop: tuple[str, ...], stream: bool, data: st.DataObject
) -> None:
    if kind != "ollama" and request.tools:
        choice = data.draw(st.sampled_from(["auto", "required", f"function:{request.tools[0]['function']['name']}"]))
        request = evolve(request, tool_choice=choice)
    if kind == "openai":
        seed = data.draw(st.none() | st.integers(0, 9))
        request = evolve(request, sampling=evolve(request.sampling, seed=seed), response_format={"type": "json_object"})
    read = PARSE[kind](codec_of(kind).call("m", request, stream=stream, stop=stop).body)
    assert (read.stream, read.stop) == (stream, stop)
    assert plain(read.text_request()) == plain(request)


def plain(request: TextRequest) -> Any:
    """Arguments as objects: Anthropic and Ollama carry them so."""
    turns = [turn for turn in request.prompt if isinstance(turn, Message)]
    calls = [
        [(c["id"], c["function"]["name"], json.loads(c["function"]["arguments"])) for c in t.tool_calls] for t in turns
    ]
    rest = [evolve(turn, tool_calls=(), content=turn.content) for turn in turns]
    return evolve(request, prompt=tuple(rest)), calls


WIRES: dict[str, Callable[[Answer], Wire]] = {
    "openai": lambda answer: OpenAIWire(lambda: head_for(answer.request, "id", 1)),
    "anthropic": lambda answer: AnthropicWire("msg_1"),
    "ollama": lambda answer: OllamaWire("m", chat=True, now=lambda: "2026-01-01T00:00:00Z", clock=lambda: 0.0),
}


def joined(deltas: Sequence[UpstreamDelta]) -> dict[str, Any]:
    calls: dict[int, CallDelta] = {}
    for delta in deltas:
        for call in delta.calls:
            known = calls.get(call.index, CallDelta(call.index))
            calls[call.index] = CallDelta(
                call.index, known.id or call.id, known.name or call.name, known.arguments + call.arguments
            )
    return {
        "text": "".join(delta.text for delta in deltas),
        "calls": [(call.name, json.loads(call.arguments or "{}")) for call in calls.values()],
        "finish": [delta.finish for delta in deltas if delta.finish],
        "usage": [delta.usage for delta in deltas if delta.usage][-1],
    }


@pytest.mark.parametrize("kind", WIRES)
@settings(max_examples=20)
@given(
    texts=st.lists(said, max_size=4),
    calls=st.lists(arguments, max_size=2),
    cut=st.integers(1, 40),
)
async def test_an_answer_that_a_front_door_writes_is_read_by_our_client_as_it_was(
    kind: str, texts: list[str], calls: list[dict[str, Any]], cut: int
) -> None:
    says: list[bytes | CallDelta] = [text.encode() for text in texts]
    for number, given_arguments in enumerate(calls):
        raw = json.dumps(given_arguments)
        says += [
            CallDelta(number, f"c{number}", "f"),
            CallDelta(number, arguments=raw[:3]),
            CallDelta(number, arguments=raw[3:]),
        ]
    request = ChatRequest(
        "m",
        (Message("user", "hi"),),
        Sampling(max_tokens=200),
        include_usage=True,
        tools=(tool_definition("f", "", None),),
    )
    streams = [await _written(kind, says, request, whole) for whole in (False, True)]
    codec = codec_of(kind)
    reader = codec.reader(request.text_request())
    deltas = [d for at in range(0, len(streams[0]), cut) for d in reader.feed(streams[0][at : at + cut])]
    for found in (joined(deltas), joined([codec.whole(streams[1])])):
        assert found["text"] == "".join(texts)
        assert found["calls"] == [("f", one) for one in calls]
        assert found["finish"] == ["tool_calls" if calls else "stop"]
        assert found["usage"].completion_tokens == len(says)
    assert reader.ended


async def _written(kind: str, says: list[bytes | CallDelta], request: ChatRequest, whole: bool) -> bytes:
    engine = FakeTextEngine(says=says, tools=True)
    way = TextWay(GatewaySettings(), GatewayPorts(lambda: [Target("device", True, engine, frozenset({"m"}))], Policy))
    answer = await way.answer(request)
    wire = WIRES[kind](answer)
    pieces, out = [], b""
    async for piece in answer.pieces():
        out += (b"" if pieces else wire.begin(answer)) + wire.piece(answer, piece)
        pieces.append(piece)
    out += (b"" if pieces else wire.begin(answer)) + wire.end(answer)
    await answer.aclose()
    await way.stop()
    return wire.whole(answer, pieces) if whole else out

"""Bytes given on: what changes in them and what never does; one flight for identical requests."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.fakes_text import FakeTextEngine
from engines.upstream import UpstreamEngine
from gateway.flights import Flights
from gateway.relay_events import RelayEvents, renamed
from gateway.relay_plan import RelayPorts, relay_of
from gateway.targets import Target, TargetBoard
from links.memory import MemoryLink
from protocol.errors import Full, ProtocolError
from protocol.openai_wire import dump
from protocol.provider_kinds import codec_of
from protocol.text import Message, TextRequest, Usage

ASK = TextRequest("m", (Message("user", "hi"),))


def events_of(kind: str = "openai", asked_usage: bool = False) -> RelayEvents:
    return RelayEvents(codec_of(kind), ASK, "here", asked_usage)


def chunk(text: str = "", finish: str | None = None, **more: Any) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": finish}
    return b"data: " + dump({"id": "c", "model": "there", "choices": [choice], **more}) + b"\n\n"


USAGE = b'data: {"id":"c","model":"there","choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2}}\n\n'
DONE = b"data: [DONE]\n\n"


def test_only_the_models_name_and_unasked_usage_change() -> None:
    stream = (
        b": hello\n\n" + chunk("a", usage=None) + chunk("b", usage=None) + chunk("", "stop", usage=None) + USAGE + DONE
    )
    plain, asking = events_of(), events_of(asked_usage=True)
    assert b"".join(plain.feed(stream)) == (
        b": hello\n\n" + chunk("a") + chunk("b") + chunk("", "stop") + DONE
    ).replace(b'"there"', b'"here"')
    assert b"".join(asking.feed(stream)) == stream.replace(b'"there"', b'"here"')
    assert (plain.finish, plain.usage, plain.ended, plain.texts) == ("stop", Usage(3, 2), True, ["a", "b"])


def test_usage_inside_the_last_chunk_is_taken_out_too() -> None:
    last = chunk("", "stop", usage={"prompt_tokens": 3, "completion_tokens": 2})
    (shown,) = events_of("deepseek").feed(last)
    document = json.loads(shown[6:])
    assert "usage" not in document and document["choices"][0]["finish_reason"] == "stop"


def test_a_text_that_looks_like_a_field_is_left_alone() -> None:
    text = 'say "model":"there" and "usage":null'
    shown = b"".join(events_of().feed(chunk(text)))
    assert json.loads(shown[6:])["choices"][0]["delta"]["content"] == text
    assert renamed(b'{"model": "t\\"2", "x": 1}', b'"here"') == b'{"model":"here", "x": 1}'


@given(st.lists(st.text(min_size=1, max_size=9), min_size=1, max_size=5), st.integers(1, 60), st.booleans())
def test_however_the_network_cuts_whole_events_come_out(texts: list[str], step: int, returns: bool) -> None:
    stream = b"".join(chunk(text) for text in texts) + chunk("", "stop") + DONE
    wire = stream.replace(b"\n\n", b"\r\n\r\n") if returns else stream
    events = events_of()
    parts = [part for at in range(0, len(wire), step) for part in events.feed(wire[at : at + step])]
    assert b"".join(parts) == stream.replace(b'"there"', b'"here"')
    assert all(part.endswith(b"\n\n") for part in parts)
    assert events.texts == texts and events.finish == "stop" and events.ended


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        (b'data: {"choices":[{"delta":{"content":\n\n', ProtocolError),
        (b'data: {"error":{"type":"overloaded_error","message":"busy"}}\n\n', Full),
    ],
)
def test_an_event_that_is_an_error_never_goes_out(bad: bytes, error: type[Exception]) -> None:
    """S1 BerriAI/litellm#40404, S4 #6957."""
    events, shown = events_of(), []
    with pytest.raises(error):
        shown += list(events.feed(chunk("a")))
        for part in events.feed(bad + chunk("b")):
            shown.append(part)
    assert len(shown) == 1 and events.spoke


def test_anthropics_and_ollamas_forms_pass_too() -> None:
    start = {"type": "message_start", "message": {"model": "there", "usage": {"input_tokens": 3, "output_tokens": 1}}}
    delta = {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "a"}}
    end = {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 2}}
    stream = b"".join(
        b"event: " + str(e["type"]).encode() + b"\ndata: " + dump(e) + b"\n\n"
        for e in (start, delta, end, {"type": "message_stop"})
    )
    events = events_of("anthropic")
    assert b"".join(events.feed(stream)) == stream.replace(b'"there"', b'"here"')
    assert (events.finish, events.usage, events.ended) == ("stop", Usage(3, 2), True)
    lines = b'{"model":"there","message":{"content":"a"},"done":false}\n'
    lines += b'{"model":"there","done":true,"done_reason":"stop"}\n'
    events = events_of("ollama")
    assert b"".join(events.feed(lines)) == lines.replace(b'"there"', b'"here"')
    assert events.ended and events.texts == ["a"]


def provider(kind: str) -> Target:
    engine = UpstreamEngine(MemoryLink("p", []), "there", codec=codec_of(kind))
    return Target(f"cloud:{kind}", False, engine, frozenset({"m"}), relay=engine)


def test_when_bytes_may_pass() -> None:
    openai, other, deepseek, claude = (
        provider("openai"),
        provider("openai"),
        provider("deepseek"),
        provider("anthropic"),
    )
    device = Target("device", True, FakeTextEngine(), frozenset({"m"}))
    ports = RelayPorts(TargetBoard(), Flights(), lambda running: lambda: None)

    def found(stream: bool, *targets: Target) -> str | None:
        relay = relay_of(ASK, stream, targets, targets, ports)
        return relay.dialect if relay is not None else None

    assert found(True, openai) == found(True, deepseek) == found(True, openai, other) == "openai"
    assert found(False, openai, deepseek) == "openai"
    assert found(True, openai, deepseek) is None, "the second one could go on with a broken stream"
    assert found(False, openai, claude) is None and found(True, claude) == "anthropic"
    assert found(False, openai, device) is None and found(False) is None


async def test_identical_requests_share_a_flight_that_lasts_while_somebody_waits() -> None:
    flights: Flights[int] = Flights()
    made, cancelled, ready = 0, 0, asyncio.Event()

    async def make() -> int:
        nonlocal made, cancelled
        made += 1
        try:
            await ready.wait()
        except asyncio.CancelledError:
            cancelled += 1
            raise
        return made

    first, second, other = (asyncio.create_task(flights.share(key, make)) for key in ("a", "a", "b"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    first.cancel()
    other.cancel()
    await asyncio.sleep(0.01)
    assert (made, cancelled) == (2, 1), "only the flight that nobody waits for is cancelled"
    ready.set()
    assert await second == (2, True) or await second == (1, True)
    assert (await flights.share("a", make))[1] is False, "nothing is kept"


async def test_an_error_goes_to_all_who_wait() -> None:
    flights: Flights[int] = Flights()

    async def fail() -> int:
        await asyncio.sleep(0.01)
        raise ProtocolError("no")

    found = await asyncio.gather(*(flights.share("a", fail) for _ in range(3)), return_exceptions=True)
    assert all(isinstance(one, ProtocolError) for one in found)

"""Relayed streams whose client is slow or leaves, and what the board is told of a provider that dies."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

from engines.provider_link import Phases, ProviderLink
from engines.retrying import RetryRules
from engines.upstream import UpstreamEngine
from gateway.context import Caller
from gateway.front import Front
from gateway.pipeline import TextWay
from gateway.ports import NoConversations
from gateway.settings import GatewayPorts, GatewaySettings
from gateway.targets import Target
from links.memory import MemoryLink
from links.port import Request, Response, Route
from protocol.chat import ChatRequest
from protocol.clock import wall_now
from protocol.errors import LinkClosed
from protocol.openai_wire import dump
from protocol.policy import DispatchPolicy, Policy
from protocol.provider_kinds import codec_of
from protocol.text import FinishReason, Message

PATH = "/v1/chat/completions"
SLOW_S = 0.15
"""A client takes so long for each part."""

PINGING = GatewaySettings(hold_headers_s=0.02, ping_every_s=0.02, drain_s=0.0)


def says(text: str, finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": finish}
    return b"data: " + dump({"id": "c", "model": "there", "choices": [choice]}) + b"\n\n"


WELL = (says("a"), says("b", "stop"), b"data: [DONE]\n\n")


def provider(name: str, *script: bytes | float | Exception, first_byte_s: float = 60.0) -> Target:
    """Sends bytes, waits seconds, or fails, in this order."""

    async def parts() -> AsyncIterator[bytes]:
        for step in script:
            if isinstance(step, Exception):
                raise step
            if isinstance(step, float):
                await asyncio.sleep(step)
            else:
                yield step

    async def handle(request: Request) -> Response:
        return Response(200, {"content-type": "text/event-stream"}, parts())

    codec = codec_of("openai")
    link = ProviderLink(
        MemoryLink(name, [Route("POST", PATH, handle)]),
        codec.authorize,
        None,
        Phases(first_byte_s=first_byte_s),
        RetryRules(attempts=1),
    )
    engine = UpstreamEngine(link, "there", codec=codec)
    return Target(f"cloud:{name}", False, engine, frozenset({"m"}), relay=engine)


class Slow(NoConversations):
    """Keeps an answer in several turns of the loop."""

    def __init__(self) -> None:
        self.kept = 0

    async def closed(
        self,
        caller: Caller,
        chat: ChatRequest,
        answer: Message,
        finish: FinishReason | None,
        target: str,
        stays: str = "",
    ) -> None:
        for _ in range(10):
            await asyncio.sleep(0.001)
        self.kept += 1


def way_to(*targets: Target, settings: GatewaySettings = PINGING, **more: Any) -> TextWay:
    policy = Policy(dispatch=DispatchPolicy(start="cloud"))
    return TextWay(settings, GatewayPorts(targets=lambda: targets, policy=lambda: policy, **more))


async def asked(way: TextWay) -> Response:
    route = next(route for route in Front(way, wall_now).routes() if route.path == PATH)
    ask = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True, "max_tokens": 9}
    return await route.handle(
        Request("POST", PATH, {"content-type": "application/json"}, body=json.dumps(ask).encode())
    )


async def read(way: TextWay, slow_s: float = 0.0) -> list[bytes]:
    """As a server's handler does for a client that takes `slow_s` for each part."""
    body, parts = (await asked(way)).body, []
    assert not isinstance(body, bytes)
    async for part in body:
        parts.append(part)
        await asyncio.sleep(slow_s)
    await body.aclose()  # type: ignore[attr-defined]
    return parts


async def test_a_provider_that_dies_after_its_first_word_is_left_alone() -> None:
    dies = provider("p", says("a"), LinkClosed("it died"))
    way = way_to(dies)
    parts = await read(way)
    assert b'"a"' in parts[0] and b'"error"' in parts[-1]
    view = way.board.view(dies, "m", time.monotonic())
    assert not view.up and view.seen == 1 and view.failed_ratio == 0.0, "it spoke, and it is down"


async def test_a_provider_that_never_speaks_counts_as_failed() -> None:
    dies = provider("p", LinkClosed("it died"))
    way = way_to(dies, provider("q", *WELL))
    parts = await read(way)
    assert b'"b"' in parts[1]
    view = way.board.view(dies, "m", time.monotonic())
    assert not view.up and view.seen == 1 and view.failed_ratio > 0


async def test_what_a_provider_sends_before_it_dies_without_a_word_is_never_given_on() -> None:
    way = way_to(provider("p", says(""), LinkClosed("it died")), provider("q", *WELL))
    assert b"".join(await read(way)) == b"".join(WELL).replace(b'"there"', b'"m"')


async def test_a_first_byte_that_is_too_late_while_a_ping_leaves_goes_to_the_next_provider() -> None:
    way = way_to(provider("p", 30.0, first_byte_s=0.1), provider("q", *WELL))
    parts = await asyncio.create_task(read(way, SLOW_S))
    assert parts[0].startswith(b": ping") and b"".join(parts[-3:]) == b"".join(WELL).replace(b'"there"', b'"m"')


async def test_a_house_that_stops_while_a_ping_leaves_tells_its_client() -> None:
    way = way_to(provider("p", 30.0))
    reading = asyncio.create_task(read(way, SLOW_S))
    await asyncio.sleep(SLOW_S / 2)
    await way.stop()
    parts = await reading
    assert parts[0].startswith(b": ping") and b'"error"' in parts[-1] and b"stopping" in parts[-1]


async def test_a_client_that_leaves_twice_before_the_first_word_is_recorded_all_the_same() -> None:
    kept = Slow()
    way = way_to(provider("p", 30.0), settings=GatewaySettings(), conversations=kept)
    reading = asyncio.create_task(read(way))
    for _ in range(3):
        await asyncio.sleep(0.003)
        reading.cancel()
    await asyncio.wait({reading})
    await asyncio.sleep(0.05)
    assert reading.cancelled() and kept.kept == 1 and not len(way.places)

"""Requests are counted until their last byte, and refused while the gate is shut."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from agent.gate import Gate
from links.port import FrameRoute, FrameStream, Mount, Request, Response, Route
from protocol.errors import EngineError, Full

ASKED = Request("GET", "/x", {})


async def _nothing() -> None: ...


class Way:
    """A mount whose answers wait for `go`."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.closed = False

    async def whole(self, request: Request) -> Response:
        await self.go.wait()
        return Response(body=b"x")

    async def streamed(self, request: Request) -> Response:
        return Response(body=self._chunks())

    async def failing(self, request: Request) -> Response:
        raise EngineError("no")

    async def frames(self, request: Request, stream: FrameStream) -> None:
        await self.go.wait()

    async def _chunks(self) -> AsyncIterator[bytes]:
        try:
            yield b"a"
            yield b"b"
        finally:
            self.closed = True

    def mount(self) -> Mount:
        routes = [Route("GET", f"/{h.__name__}", h) for h in (self.whole, self.streamed, self.failing)]
        return Mount(routes, [FrameRoute("/frames", self.frames)], _nothing, _nothing)


async def test_the_first_and_the_last_request_are_told_and_a_shut_gate_refuses() -> None:
    busy: list[bool] = []
    gate, way = Gate(busy.append), Way()
    whole, _, failing = gate.before(way.mount()).routes
    tasks = [asyncio.ensure_future(whole.handle(ASKED)) for _ in range(3)]
    await asyncio.sleep(0)
    assert (gate.under_way, busy) == (3, [True])
    gate.open = False
    with pytest.raises(Full) as refused:
        await whole.handle(ASKED)
    assert refused.value.http_status == 503 and refused.value.next_step
    assert not await gate.drained(0.01)
    way.go.set()
    await asyncio.gather(*tasks)
    assert await gate.drained(1.0)
    assert busy == [True, False]
    gate.open = True
    with pytest.raises(EngineError):
        await failing.handle(ASKED)
    assert (gate.under_way, busy) == (0, [True, False, True, False])


@pytest.mark.parametrize("read", [0, 1, 2])
async def test_a_streamed_answer_counts_until_it_is_closed(read: int) -> None:
    gate, way = Gate(), Way()
    streamed = gate.before(way.mount()).routes[1]
    answer = await streamed.handle(ASKED)
    assert gate.under_way == 1
    body = answer.body
    assert not isinstance(body, bytes)
    assert [await anext(body) for _ in range(read)] == [b"a", b"b"][:read]
    for _ in range(2):
        await body.aclose()  # type: ignore[attr-defined]
        assert gate.under_way == 0
    assert way.closed == (read > 0), "the way's own body is closed, too"


async def test_a_client_that_leaves_and_a_frame_stream_are_counted() -> None:
    gate, way = Gate(), Way()
    mount = gate.before(way.mount())
    left = asyncio.ensure_future(mount.routes[0].handle(ASKED))
    frames = asyncio.ensure_future(mount.frame_routes[0].handle(ASKED, None))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    assert gate.under_way == 2
    left.cancel()
    frames.cancel()
    await asyncio.gather(left, frames, return_exceptions=True)
    assert gate.under_way == 0

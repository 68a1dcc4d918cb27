"""TensorEndpoint over tensor frames: many requests in flight on one stream to a server of ours (docs/tensor-frames.md).

A server says in GET /v2 whether it speaks them; others are asked by engines.remote_oip.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

from attrs import evolve

from engines.frame_connection import CREDIT_BYTES, FrameConnection, OnAnswer, Sink
from engines.port import TensorAnswer, TensorEndpoint
from links.port import FrameStream
from protocol.clock import Clock
from protocol.errors import LinkTimeout
from protocol.events import TransferSample
from protocol.tensor_frames import TENSOR_FRAMES_PATH, Ask, heads_of
from protocol.tensors import Tensor
from protocol.trace import present

SILENT_S = 1.0
"""A stream on which a request ran out of time is given up if nothing at all came back for so long: after a change of
networks the old connection would keep silent for a minute."""

OpenStream = Callable[[str], Awaitable[FrameStream]]
"""Link.open of the link to the server."""


def used_at_once(answer: TensorAnswer, used: Callable[[], None]) -> None:
    """An OnAnswer for whoever awaits the answer itself."""
    used()


class FramesEndpoint:
    """The pipelined remote twin of LocalEndpoint, for one event loop.

    The stream is opened by the first request and again by the first one after it was lost.

    Args:
        link: the name that samples carry.
        open_stream: opens a frame stream to a path of the server.
        sink: takes a sample per request as soon as its arrival is known, and per large answer.
        credit_bytes: answer data that the server may have under way to us.
    """

    def __init__(
        self,
        link: str,
        open_stream: OpenStream,
        *,
        sink: Callable[[TransferSample], None] = lambda sample: None,
        clock: Clock = time.monotonic,
        credit_bytes: int = CREDIT_BYTES,
        path: str = TENSOR_FRAMES_PATH,
    ) -> None:
        self._open_stream = open_stream
        self._sink = Sink(link, sink, clock)
        self._credit_bytes = credit_bytes
        self._path = path
        self._opening = asyncio.Lock()
        self._connection: FrameConnection | None = None
        self._closing: set[asyncio.Task[None]] = set()
        self._wait_s = 0.0
        self._count = 0
        self._packed = _Packing(self)

    async def infer(self, model: str, inputs: Sequence[Tensor], deadline_s: float) -> TensorAnswer:
        """Ask the server; see TensorEndpoint. Raises the error that the server names, LinkError for the network's."""
        return await self.infer_then(model, inputs, deadline_s, used_at_once)

    async def infer_then(
        self, model: str, inputs: Sequence[Tensor], deadline_s: float, on_answer: OnAnswer, *, packed: bool = False
    ) -> TensorAnswer:
        """As `infer`; `on_answer` is called when the whole answer is here, before the next frame is read.

        packed: send and ask for zstd data, where both sides have it.
        """
        began_s = self._sink.clock()
        self._count += 1
        span = present()
        ask = Ask(model, span.header if span is not None else f"f{self._count}", 0, heads_of(inputs))
        connection, life, opened_s = None, None, 0.0
        try:
            async with asyncio.timeout(deadline_s):
                connection = self._open_now()
                if connection is None:
                    connection = await self._connected()
                    opened_s = self._sink.clock() - began_s
                life = connection.sign_of_life()
                answer = await connection.ask(ask, inputs, began_s + deadline_s, on_answer, packed=packed)
        except TimeoutError as err:
            timeout = LinkTimeout(
                f"{self._sink.link} gave no answer for {model} within {deadline_s:.2f} s",
                next_step="check the network, or allow a longer deadline",
            )
            if connection is not None and self._silent(connection, life, began_s + opened_s):
                connection.abandon(timeout)
            raise timeout from err
        self._wait_s = answer.wait_s
        if not opened_s:
            return answer
        return evolve(answer, wire=evolve(answer.wire, connect_s=answer.wire.connect_s + opened_s))

    def compressing(self) -> TensorEndpoint | None:
        """The same server with packed data both ways; None until it said that it takes it."""
        connection = self._connection
        return self._packed if connection is not None and connection.packs else None

    def wait_s(self) -> float:
        """The wait that the server reported last; 0 before that."""
        return self._wait_s

    def under_way(self) -> TransferSample | None:
        """The oldest request that is on its way; for netprobe's LinkProbe.watch."""
        return self._connection.under_way() if self._connection is not None else None

    async def close(self) -> None:
        """End the stream; requests in flight raise LinkClosed."""
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()
        await asyncio.gather(*self._closing)

    def _silent(self, connection: FrameConnection, before: tuple[int, int | None] | None, since_s: float) -> bool:
        """Whether nothing came from the far end, not even word of our bytes, for long enough to tell."""
        counted = before is not None and before[1] is not None
        return counted and connection.sign_of_life() == before and self._sink.clock() - since_s >= SILENT_S

    def _open_now(self) -> FrameConnection | None:
        connection = self._connection
        return connection if connection is not None and connection.lost is None else None

    async def _connected(self) -> FrameConnection:
        async with self._opening:
            if (usable := self._open_now()) is not None:
                return usable
            connection, self._connection = self._connection, None
            if connection is not None:
                # Beside: a peer that is gone does not answer the goodbye, and nobody should wait for it.
                task = asyncio.create_task(connection.close(), name="tensor-frames-close")
                self._closing.add(task)
                task.add_done_callback(self._closing.discard)
            fresh = FrameConnection(await self._open_stream(self._path), self._sink, self._credit_bytes)
            try:
                await fresh.greet()
            except BaseException:
                await fresh.close()
                raise
            self._connection = fresh
            return fresh


class _Packing:
    """The endpoint with packed data."""

    def __init__(self, endpoint: FramesEndpoint) -> None:
        self._endpoint = endpoint

    async def infer(self, model: str, inputs: Sequence[Tensor], deadline_s: float) -> TensorAnswer:
        return await self._endpoint.infer_then(model, inputs, deadline_s, used_at_once, packed=True)

    def wait_s(self) -> float:
        return self._endpoint.wait_s()

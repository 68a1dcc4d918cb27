"""In-memory fakes of Link, FrameStream and Browser; they pass the same contract suites as the real adapters."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence

from links.port import (
    MAX_FRAME_BYTES,
    Found,
    FrameRoute,
    FrameStream,
    RejectedStatus,
    Reply,
    Request,
    Response,
    Route,
)
from links.router import Router
from links.service_record import check_service
from protocol.clock import Clock
from protocol.errors import LinkClosed, LinkError, LinkTimeout, MidstreamError, TooLarge
from protocol.events import TransferSample

_BUFFERED_FRAMES = 8


class _Pipe:
    """One direction of a stream: a bounded queue of frames with an end mark and a cut."""

    def __init__(self) -> None:
        self.frames: deque[bytes] = deque()
        self.ended = False
        self.abandoned = False
        self.cut = False
        self._changed = asyncio.Event()

    def notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def put(self, frame: bytes) -> None:
        while True:
            if self.cut or self.abandoned or self.ended:
                raise LinkClosed("the peer closed the frame stream")
            if len(self.frames) < _BUFFERED_FRAMES:
                self.frames.append(frame)
                self.notify()
                return
            await self._changed.wait()

    async def get(self) -> bytes | None:
        while not self.frames:
            if self.ended:
                return None
            if self.cut or self.abandoned:
                raise LinkClosed("the peer vanished in the middle of a frame stream")
            await self._changed.wait()
        frame = self.frames.popleft()
        self.notify()
        return frame


class MemoryStream:
    """One end of a pair made by memory_stream_pair."""

    def __init__(self, inward: _Pipe, outward: _Pipe) -> None:
        self._inward = inward
        self._outward = outward

    async def send(self, frame: bytes) -> None:
        if len(frame) > MAX_FRAME_BYTES:
            raise TooLarge(f"a frame has {len(frame)} bytes, at most {MAX_FRAME_BYTES} are sent")
        await self._outward.put(bytes(frame))

    async def receive(self) -> bytes | None:
        return await self._inward.get()

    async def close(self) -> None:
        """The peer reads what was sent and then None; its sends fail."""
        self._outward.ended = True
        self._inward.abandoned = True
        self._outward.notify()
        self._inward.notify()

    def cut(self) -> None:
        """Fail as a cable would: both ends see LinkClosed once what has arrived is read."""
        for pipe in (self._inward, self._outward):
            pipe.cut = True
            pipe.notify()


def memory_stream_pair() -> tuple[MemoryStream, MemoryStream]:
    """Two joined ends with room for eight frames each way."""
    there, back = _Pipe(), _Pipe()
    return MemoryStream(there, back), MemoryStream(back, there)


class MemoryLink:
    """A Link to routes in the same process.

    Args:
        on_error: shapes MidstreamErrors of handlers, as a server's on_error does.
        sink: takes a TransferSample per exchange, with the real (tiny) times.
        peer: the identity that the handlers see.
    """

    def __init__(
        self,
        name: str,
        routes: Sequence[Route] = (),
        frame_routes: Sequence[FrameRoute] = (),
        *,
        on_error: Callable[[Request, MidstreamError], Response] | None = None,
        sink: Callable[[TransferSample], None] = lambda sample: None,
        clock: Clock = time.monotonic,
        peer: str | None = None,
    ) -> None:
        self._name = name
        self._router = Router(routes, frame_routes)
        self._on_error = on_error
        self._sink = sink
        self._clock = clock
        self._peer = peer
        self._hosts: set[asyncio.Task[None]] = set()
        self._streams: list[MemoryStream] = []
        self._closed = False
        self.reachable = True
        """Set to False to fail every call as an unplugged network does."""

    @property
    def name(self) -> str:
        return self._name

    async def exchange(
        self, path: str, headers: Mapping[str, str], body: bytes, deadline_s: float, method: str = "POST"
    ) -> Reply:
        self._check_up()
        began_s = self._clock()
        try:
            async with asyncio.timeout(deadline_s):
                answer = await self._handle(method, path, headers, body)
                data = answer.body if isinstance(answer.body, bytes) else b"".join([part async for part in answer.body])
        except TimeoutError as err:
            raise LinkTimeout(f"{self._name} did not answer in time") from err
        self._sink(
            TransferSample(
                at_s=self._clock(),
                link=self._name,
                direction="up",
                size_bytes=len(body),
                seconds=self._clock() - began_s,
            )
        )
        return Reply(answer.status, {name.lower(): value for name, value in answer.headers.items()}, data)

    async def lines(
        self, path: str, headers: Mapping[str, str], body: bytes, deadline_s: float
    ) -> AsyncIterator[bytes]:
        self._check_up()
        try:
            async with asyncio.timeout(deadline_s):
                answer = await self._handle("POST", path, headers, body)
        except TimeoutError as err:
            raise LinkTimeout(f"{self._name} did not answer in time") from err
        parts = _single(answer.body) if isinstance(answer.body, bytes) else answer.body
        try:
            if answer.status > 399:
                whole = b"".join([part async for part in parts])
                raise RejectedStatus(
                    f"{self._name} answered {path} with status {answer.status}",
                    status=answer.status,
                    body=whole,
                    headers={name.lower(): value for name, value in answer.headers.items()},
                )
            while True:
                try:
                    async with asyncio.timeout(deadline_s):
                        part = await anext(parts)
                except StopAsyncIteration:
                    return
                except TimeoutError as err:
                    raise LinkTimeout(f"{self._name} did not send the next part in time") from err
                self._check_up()
                yield part
        finally:
            close = getattr(parts, "aclose", None)
            if close is not None:
                await close()

    async def open(self, path: str) -> FrameStream:
        self._check_up()
        try:
            matched = self._router.find("GET", path, upgrade=True)
        except MidstreamError as err:
            raise RejectedStatus(
                f"{self._name} refused the frame stream {path}", status=err.http_status, body=b""
            ) from err
        assert isinstance(matched.route, FrameRoute)
        ours, theirs = memory_stream_pair()
        self._streams.append(ours)
        host = asyncio.ensure_future(self._host(matched.route, Request("GET", path, {}, peer=self._peer), theirs))
        self._hosts.add(host)
        host.add_done_callback(self._hosts.discard)
        return ours

    def cut(self) -> None:
        """Break every open stream and refuse new calls, as when the peer loses power."""
        self.reachable = False
        for stream in self._streams:
            stream.cut()

    async def close(self) -> None:
        self._closed = True
        for stream in self._streams:
            await stream.close()
        hosts = list(self._hosts)
        for host in hosts:
            host.cancel()
        await asyncio.gather(*hosts, return_exceptions=True)

    async def _host(self, route: FrameRoute, request: Request, stream: MemoryStream) -> None:
        try:
            await route.handle(request, stream)
        except MidstreamError:
            return
        finally:
            await stream.close()

    async def _handle(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> Response:
        target, _, query = path.partition("?")
        request = Request(method, target, {name.lower(): value for name, value in headers.items()}, peer=self._peer)
        try:
            matched = self._router.find(method, target, upgrade=False)
            assert isinstance(matched.route, Route)
            if len(body) > matched.route.max_body_bytes:
                raise TooLarge(f"the body has {len(body)} bytes, at most {matched.route.max_body_bytes} are taken here")
            pairs = [pair.partition("=") for pair in query.split("&") if pair]
            request = Request(
                method,
                target,
                request.headers,
                params=matched.params,
                query={key: value for key, _, value in pairs},
                body=body,
                peer=self._peer,
            )
            return await matched.route.handle(request)
        except MidstreamError as err:
            if self._on_error is None:
                return Response(status=err.http_status, body=str(err).encode())
            return self._on_error(request, err)

    def _check_up(self) -> None:
        if self._closed:
            raise LinkClosed(f"the link to {self._name} has been closed")
        if not self.reachable:
            raise LinkError(f"cannot reach {self._name}", next_step="check the network")


async def _single(body: bytes) -> AsyncIterator[bytes]:
    if body:
        yield body


class MemoryNetwork:
    """What MemoryBrowsers of one test share: the services announced on it."""

    def __init__(self) -> None:
        self.services: dict[tuple[str, str], Found] = {}


class MemoryBrowser:
    """A Browser on a MemoryNetwork."""

    def __init__(self, network: MemoryNetwork | None = None, addresses: Sequence[str] = ("127.0.0.1",)) -> None:
        self._network = network or MemoryNetwork()
        self._addresses = tuple(addresses)
        self._mine: set[tuple[str, str]] = set()

    async def browse(self, service_type: str, seconds: float) -> Sequence[Found]:
        await asyncio.sleep(0)
        return [found for (kind, _), found in self._network.services.items() if kind == service_type]

    async def advertise(self, service_type: str, instance: str, port: int, txt: Mapping[str, str]) -> str:
        check_service(service_type, instance, port, txt)
        name, number = instance, 1
        while (service_type, name) in self._network.services and (service_type, name) not in self._mine:
            number += 1
            name = f"{instance}-{number}"
        self._network.services[service_type, name] = Found(name, self._addresses, port, dict(txt))
        self._mine.add((service_type, name))
        return name

    async def close(self) -> None:
        for key in self._mine:
            self._network.services.pop(key, None)
        self._mine.clear()

"""TensorEndpoint at the other end of a Link: any Open Inference Protocol v2 server, tensors in binary.

zstd bodies go only to a server that lists the extension in GET /v2. That is asked once per connection, beside a request
and never before one; a link that failed is asked again, since another server may answer behind it.
"""

from __future__ import annotations

import asyncio
import contextvars
import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from urllib.parse import quote

from engines.aside import aside
from engines.port import TensorAnswer, TensorEndpoint
from links.port import Link, Reply
from protocol import zstd
from protocol.clock import Clock
from protocol.errors import (
    BadRequest,
    EngineError,
    Full,
    LinkError,
    LinkTimeout,
    MidstreamError,
    NotAllowed,
    NotFound,
    TooLarge,
)
from protocol.events import TransferSample
from protocol.oip import (
    ZSTD_EXTENSION,
    InferRequest,
    InferResponse,
    decode_response,
    encode_request,
    error_text,
    server_extensions,
)
from protocol.tensors import Tensor
from protocol.trace import HEADER, present

RETRY_AFTER_S = 1.0
"""For a server that refuses without saying when to come back."""

MAX_RETRY_AFTER_S = 3600.0
MAX_SECONDS = 1e9
"""A server that says more, or a whole number that no float holds, is not believed."""

LOOK_S = 5.0
"""For the answer to GET /v2."""

MAX_HERE_BYTES = 128 << 10
"""Longer bodies are compressed and inflated in a thread: half a millisecond of the event loop, from here on."""


_collected: contextvars.ContextVar[list[TransferSample] | None] = contextvars.ContextVar("collected", default=None)


def collecting(sink: Callable[[TransferSample], None]) -> Callable[[TransferSample], None]:
    """A link's sink that hands each sample to `sink` and, within infer(), to the answer as well.

    >>> link = HttpLink("cloud", url, sink=collecting(probe.add))
    """

    def both(sample: TransferSample) -> None:
        sink(sample)
        mine = _collected.get()
        if mine is not None:
            mine.append(sample)

    return both


class RemoteEndpoint:
    """The remote twin of LocalEndpoint.

    Digest and seconds come from the answer's parameters `digest`, `wait_s`, `compute_s`, where the server gives them;
    transfers from a link whose sink was wrapped by `collecting`.
    """

    def __init__(
        self, link: Link, *, headers: Mapping[str, str] | None = None, clock: Clock = time.perf_counter
    ) -> None:
        self._link = link
        self._headers = dict(headers or {})
        self._clock = clock
        self._wait_s = 0.0
        self._extensions: frozenset[str] | None = None
        self._looking: asyncio.Task[None] | None = None
        self._packed = _Compressing(self)

    async def infer(self, model: str, inputs: Sequence[Tensor], deadline_s: float) -> TensorAnswer:
        """Ask the server; see TensorEndpoint. Raises the error that the status means, LinkError for the network's."""
        return await self.ask(model, inputs, deadline_s, packed=False)

    def wait_s(self) -> float:
        """The wait that the server reported last; 0 before that."""
        return self._wait_s

    @property
    def extensions(self) -> frozenset[str]:
        """What the server said that it speaks beside the base protocol; empty until it was asked."""
        return self._extensions or frozenset()

    def forget(self) -> None:
        """Another server may answer from now on: ask again beside the next request."""
        self._extensions = None

    def compressing(self) -> TensorEndpoint | None:
        """The same server with zstd bodies both ways; None unless it said that it takes them."""
        return self._packed if ZSTD_EXTENSION in self.extensions and zstd.available() else None

    async def learn(self) -> frozenset[str]:
        """Ask the server for its extensions; none when it does not say. Raises LinkError."""
        reply = await self._link.exchange("/v2", self._headers, b"", LOOK_S, method="GET")
        try:
            found = server_extensions(reply.body) if reply.status == 200 else frozenset[str]()
        except MidstreamError:
            found = frozenset[str]()
        self._extensions = found
        return found

    async def ask(self, model: str, inputs: Sequence[Tensor], deadline_s: float, *, packed: bool) -> TensorAnswer:
        """infer(); `packed` sends a zstd body and asks for one. A server that refuses it is asked again without."""
        began_s = self._clock()
        headers, body = encode_request(InferRequest(model=model, inputs=tuple(inputs), binary=True))
        plain = body
        if packed:
            head = body[: len(body) - sum(tensor.size_bytes for tensor in inputs)]
            body = await aside(partial(zstd.compress_tensors, head, inputs), len(body) > MAX_HERE_BYTES)
            headers = {**headers, "content-encoding": zstd.NAME, "accept-encoding": zstd.NAME}
        span = present()
        if span is not None:
            headers = {**headers, HEADER: span.header}
        encode_s = self._clock() - began_s
        samples: list[TransferSample] = []
        reply = await self._exchanged(model, headers, body, max(0.001, deadline_s - encode_s), samples)
        if packed and reply.status in (400, 415):
            self._extensions = None
            headers = {name: value for name, value in headers.items() if not name.endswith("-encoding")}
            body = plain
            left_s = max(0.001, deadline_s - (self._clock() - began_s))
            reply = await self._exchanged(model, headers, body, left_s, samples)
        if reply.status != 200:
            raise error_of(reply, model)
        came_s = self._clock()
        coded = "content-encoding" in reply.headers and len(reply.body) > MAX_HERE_BYTES
        response = await aside(partial(decode_response, reply.headers, reply.body), coded)
        seconds = encode_s, self._clock() - came_s
        return self._answer(response, reply, samples, seconds, len(body))

    async def _exchanged(
        self, model: str, headers: Mapping[str, str], body: bytes, deadline_s: float, samples: list[TransferSample]
    ) -> Reply:
        path = f"/v2/models/{quote(model, safe='')}/infer"
        token = _collected.set(samples)
        try:
            reply = await self._link.exchange(path, {**self._headers, **headers}, body, deadline_s)
        except LinkError:
            self._extensions = None
            raise
        finally:
            _collected.reset(token)
        self._look()
        return reply

    def _look(self) -> None:
        """Learn in the background; the task ends with its own deadline, or with the link."""
        if self._extensions is None and self._looking is None:
            self._looking = asyncio.create_task(self._looked(), name="extensions")

    async def _looked(self) -> None:
        try:
            await self.learn()
        except MidstreamError:
            pass  # the next answer looks again
        finally:
            self._looking = None

    def _answer(
        self,
        response: InferResponse,
        reply: Reply,
        samples: Sequence[TransferSample],
        seconds: tuple[float, float],
        up_bytes: int,
    ) -> TensorAnswer:
        told = response.parameters
        digest = told.get("digest")
        self._wait_s = _seconds(told.get("wait_s")) or 0.0
        compute_s = _seconds(told.get("compute_s"))
        if compute_s is None:
            compute_s = server_seconds(reply.headers) or 0.0
        return TensorAnswer(
            outputs=response.outputs,
            digest=digest if isinstance(digest, str) else "",
            wait_s=self._wait_s,
            compute_s=compute_s,
            transfers=tuple(samples),
            encode_s=seconds[0],
            decode_s=seconds[1],
            up_bytes=up_bytes,
            down_bytes=len(reply.body),
            wire=reply.times,
        )


class _Compressing:
    """The endpoint with zstd bodies."""

    def __init__(self, endpoint: RemoteEndpoint) -> None:
        self._endpoint = endpoint

    async def infer(self, model: str, inputs: Sequence[Tensor], deadline_s: float) -> TensorAnswer:
        return await self._endpoint.ask(model, inputs, deadline_s, packed=True)

    def wait_s(self) -> float:
        return self._endpoint.wait_s()


async def ask_to_load(link: Link, model: str, deadline_s: float) -> bool:
    """Have a server load a model before its first request (load of Triton's model repository extension).

    False when it refuses: servers without the extension load by themselves. Raises LinkError.
    """
    path = f"/v2/repository/models/{quote(model, safe='')}/load"
    reply = await link.exchange(path, {"content-type": "application/json"}, b"{}", deadline_s)
    return reply.status == 200


def error_of(reply: Reply, model: str) -> MidstreamError:
    """What a refusal's status means to the caller; the server's own words are quoted, cut to 500 characters."""
    text = error_text(reply.body) or f"status {reply.status}"
    status = reply.status
    if status == 404:
        return NotFound(f"the server has no model {model}: {text}", field="model")
    if status in (401, 403):
        return NotAllowed(f"the server refused: {text}", next_step="check the credentials; join the fleet again")
    if status == 413:
        return TooLarge(f"the server takes no request of this size: {text}")
    if status in (429, 503):
        retry_after_s = _seconds_text(reply.headers.get("retry-after", ""))
        return Full(
            f"the server is full: {text}", retry_after_s=RETRY_AFTER_S if retry_after_s is None else retry_after_s
        )
    if status in (408, 504):
        return LinkTimeout(f"the server gave up waiting: {text}")
    if 400 <= status < 500:
        return BadRequest(f"the server refused: {text}", field="inputs")
    if status in (500, 501):
        return EngineError(f"the server's engine failed: {text}", next_step="use another arm")
    return LinkError(f"unexpected answer {status}: {text}", next_step="check the server's address")


def server_seconds(headers: Mapping[str, str]) -> float | None:
    """Seconds of the metric `app` (or the first one) in a server-timing header; None without one."""
    for metric in headers.get("server-timing", "")[:1000].split(","):
        for part in metric.split(";")[1:]:
            key, _, value = part.strip().partition("=")
            if key == "dur":
                milliseconds = _seconds_text(value.strip('"'))
                return None if milliseconds is None else milliseconds / 1000
    return None


def _seconds(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MAX_SECONDS:
        return None
    return float(value)


def _seconds_text(text: str) -> float | None:
    """A decimal number of seconds, bounded; None for dates and garbage."""
    try:
        value = float(text)
    except ValueError:
        return None
    return min(value, MAX_RETRY_AFTER_S) if math.isfinite(value) and value >= 0 else None

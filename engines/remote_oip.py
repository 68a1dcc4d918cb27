"""TensorEndpoint at the other end of a Link: any Open Inference Protocol v2 server, tensors in binary."""

from __future__ import annotations

import contextvars
import math
from collections.abc import Callable, Mapping, Sequence
from urllib.parse import quote

from engines.port import TensorAnswer
from links.port import Link, Reply
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
from protocol.oip import InferRequest, InferResponse, decode_response, encode_request, error_text
from protocol.tensors import Tensor

RETRY_AFTER_S = 1.0
"""For a server that refuses without saying when to come back."""

MAX_RETRY_AFTER_S = 3600.0

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

    def __init__(self, link: Link, *, headers: Mapping[str, str] | None = None) -> None:
        self._link = link
        self._headers = dict(headers or {})
        self._wait_s = 0.0

    async def infer(self, model: str, inputs: Sequence[Tensor], deadline_s: float) -> TensorAnswer:
        """Ask the server; see TensorEndpoint. Raises the error that the status means, LinkError for the network's."""
        headers, body = encode_request(InferRequest(model=model, inputs=tuple(inputs), binary=True))
        samples: list[TransferSample] = []
        token = _collected.set(samples)
        try:
            reply = await self._link.exchange(
                f"/v2/models/{quote(model, safe='')}/infer", {**self._headers, **headers}, body, deadline_s
            )
        finally:
            _collected.reset(token)
        if reply.status != 200:
            raise error_of(reply, model)
        return self._answer(decode_response(reply.headers, reply.body), reply, samples)

    def wait_s(self) -> float:
        """The wait that the server reported last; 0 before that."""
        return self._wait_s

    def _answer(self, response: InferResponse, reply: Reply, samples: Sequence[TransferSample]) -> TensorAnswer:
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
        )


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
    fits = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value >= 0
    return float(value) if fits and isinstance(value, (int, float)) else None


def _seconds_text(text: str) -> float | None:
    """A decimal number of seconds, bounded; None for dates and garbage."""
    try:
        value = float(text)
    except ValueError:
        return None
    return min(value, MAX_RETRY_AFTER_S) if math.isfinite(value) and value >= 0 else None

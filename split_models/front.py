"""Open Inference Protocol v2 over HTTP: the front door of tensor requests in both houses.

Answers tell beside the tensors: parameters `digest`, `midstream_arm`, `wait_s`, `compute_s`; headers of the same names,
and `x-midstream-trace-id`.
"""

from __future__ import annotations

import gzip
import importlib.metadata
import json
import os
import zlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial

from attrs import evolve

from engines.aside import aside
from links.port import Request, Response, Route
from protocol import zstd
from protocol.errors import BadRequest, Loading, MidstreamError, NotFound
from protocol.oip import (
    BINARY_EXTENSION,
    HEADER_LENGTH,
    MAX_BODY_BYTES,
    ZSTD_EXTENSION,
    InferRequest,
    InferResponse,
    decode_request,
    encode_metadata,
    encode_response,
    error_body,
    server_metadata,
)
from protocol.trace import HEADER, RANDOM_BYTES, entered, within
from split_models.service import Served, Service

DEADLINE_S = 30.0
MAX_DEADLINE_S = 600.0
VERSION = "1"
JSON = {"content-type": "application/json"}

MAX_HERE_BYTES = 256 << 10
"""Longer bodies are read and made in a thread: the event loop also carries everyone else's requests."""

MAX_COPIED_BYTES = 4 << 20
"""Longer binary answers are put together in a thread: a copy of this takes about a millisecond."""

_MIN_COMPRESSED_BYTES = 1_024


class Front:
    """The handlers; `routes` is what a house mounts. extensions: what GET /v2 says beside its own. chance: that many
    random bytes."""

    def __init__(
        self,
        service: Service,
        deadline_s: float = DEADLINE_S,
        extensions: Sequence[str] = (),
        chance: Callable[[int], bytes] = os.urandom,
    ) -> None:
        self._service = service
        self._deadline_s = deadline_s
        self._extensions = tuple(extensions)
        self._chance = chance
        self._count = 0

    @property
    def routes(self) -> Sequence[Route]:
        found = [
            Route("GET", "/v2", _guarded(self._server)),
            Route("GET", "/v2/health/live", _guarded(self._live)),
            Route("GET", "/v2/health/ready", _guarded(self._ready)),
            Route("GET", "/v2/models", _guarded(self._models)),
        ]
        found.append(Route("POST", "/v2/repository/models/{model}/load", _guarded(self._load)))
        for path in ("/v2/models/{model}", "/v2/models/{model}/versions/{version}"):
            found += [
                Route("GET", path, _guarded(self._metadata)),
                Route("GET", f"{path}/ready", _guarded(self._model_ready)),
                Route("POST", f"{path}/infer", _guarded(self._infer), max_body_bytes=MAX_BODY_BYTES),
            ]
        return found

    async def _server(self, request: Request) -> Response:
        return Response(headers=JSON, body=server_metadata(_version(), (*_extensions(), *self._extensions)))

    async def _live(self, request: Request) -> Response:
        return Response(headers=JSON, body=b'{"live":true}')

    async def _ready(self, request: Request) -> Response:
        return Response(headers=JSON, body=b'{"ready":true}')

    async def _models(self, request: Request) -> Response:
        listed = [{"name": name, "version": VERSION, "state": "READY"} for name in self._service.names()]
        return Response(headers=JSON, body=json.dumps({"models": listed}).encode())

    async def _metadata(self, request: Request) -> Response:
        metadata = await self._service.metadata(_model(request))
        return Response(headers=JSON, body=encode_metadata(metadata))

    async def _model_ready(self, request: Request) -> Response:
        name = _model(request)
        try:
            self._service.find(name)
        except Loading as err:
            # Clients look at the status alone.
            status, headers, _ = error_body(err)
            return Response(status, {**headers, **JSON}, json.dumps({"name": name, "ready": False}).encode())
        return Response(headers=JSON, body=json.dumps({"name": name, "ready": True}).encode())

    async def _load(self, request: Request) -> Response:
        await self._service.load(request.params["model"])
        return Response(headers=JSON, body=b"{}")

    async def _infer(self, request: Request) -> Response:
        name = _model(request)
        shown = self._service.find(name)
        raw_shortcut = request.headers.get("inference-header-content-length") == "0"
        specs = (await self._service.metadata(shown.name)).inputs if raw_shortcut else ()
        decode = partial(decode_request, name, request.headers, request.body, specs=specs)
        asked = await aside(decode, _is_work(request.headers, len(request.body)))
        self._count += 1
        if not asked.id:
            asked = _with_id(asked, request.headers.get("x-request-id") or f"t{self._count}")
            told_id = ""
        else:
            told_id = asked.id
        span = entered(request.headers.get(HEADER, ""), self._chance(RANDOM_BYTES))
        with within(span):
            served = await self._service.infer(asked, self._deadline(asked))
        size_bytes = sum(tensor.size_bytes for tensor in served.outputs)
        bound = MAX_COPIED_BYTES if asked.binary and "accept-encoding" not in request.headers else MAX_HERE_BYTES
        response = await aside(partial(_answer, asked, served, told_id, request.headers), size_bytes > bound)
        return evolve(response, headers={**response.headers, "x-midstream-trace-id": span.trace_id})

    def _deadline(self, asked: InferRequest) -> float:
        """`timeout` in microseconds, as Triton has it, or `deadline_s`."""
        for key, factor in (("timeout", 1e-6), ("deadline_s", 1.0)):
            value = asked.parameters.get(key)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9 / factor:
                raise BadRequest(
                    f"{str(value)[:40]} is no number of seconds to wait",
                    next_step="a positive number",
                    field=f"parameters.{key}",
                )
            return min(MAX_DEADLINE_S, float(value) * factor)
        return self._deadline_s


def _is_work(headers: Mapping[str, str], size_bytes: int) -> bool:
    """Whether taking a body apart takes long: a binary one's tensors stay where they are, however large."""
    if "content-encoding" in headers:
        return True
    return size_bytes > MAX_HERE_BYTES and headers.get(HEADER_LENGTH, "0") == "0"


def _answer(asked: InferRequest, served: Served, told_id: str, headers: Mapping[str, str]) -> Response:
    told: dict[str, object] = {"midstream_arm": served.arm, "digest": served.digest}
    told |= {"wait_s": round(served.wait_s, 6), "compute_s": round(served.compute_s, 6)}
    if served.reason:
        told["midstream_reason"] = served.reason[:300]
    response = InferResponse(
        model_name=asked.model, model_version=VERSION, outputs=served.outputs, id=told_id, parameters=told
    )
    answer_headers, body = encode_response(response, asked.binary)
    answer_headers |= {"x-midstream-arm": served.arm, "x-midstream-digest": served.digest}
    coding, body = _compressed(headers.get("accept-encoding", ""), body)
    return Response(headers=answer_headers | coding, body=body)


def _compressed(accepted: str, body: bytes) -> tuple[dict[str, str], bytes]:
    """Only for a client that asks for exactly one coding: general clients list all of them and want none."""
    wanted = accepted.strip().lower()
    if len(body) < _MIN_COMPRESSED_BYTES or wanted not in ("gzip", "deflate", zstd.NAME):
        return {}, body
    if wanted == zstd.NAME:
        return ({"content-encoding": wanted}, zstd.compress(body)) if zstd.available() else ({}, body)
    packed = gzip.compress(body, compresslevel=1) if wanted == "gzip" else zlib.compress(body, level=1)
    return {"content-encoding": wanted}, packed


def _model(request: Request) -> str:
    version = request.params.get("version", VERSION)
    if version != VERSION:
        raise NotFound(f"there is no version {version[:32]!r}", next_step=f"the version is {VERSION}", field="version")
    return request.params["model"]


def _with_id(asked: InferRequest, request_id: str) -> InferRequest:
    return evolve(asked, id=request_id[:128])


def _guarded(handle: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
    """MidstreamErrors become the protocol's {"error": text} with the right status."""

    async def guarded(request: Request) -> Response:
        try:
            return await handle(request)
        except MidstreamError as err:
            status, headers, body = error_body(err)
            return Response(status=status, headers=headers, body=body)

    return guarded


def _extensions() -> tuple[str, ...]:
    return (BINARY_EXTENSION, ZSTD_EXTENSION) if zstd.available() else (BINARY_EXTENSION,)


def _version() -> str:
    try:
        return importlib.metadata.version("midstream")
    except importlib.metadata.PackageNotFoundError:
        return "0"

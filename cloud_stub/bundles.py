"""Bundles over HTTP: an index, manifests, and head files by range, so that a broken download goes on where it ended."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from attrs import frozen

from links.port import Request, Response, Route
from protocol.decode import encode
from protocol.errors import BadRequest, MidstreamError, NotFound
from protocol.models import BundleManifest
from split_models.bundle_files import files_of, read_bundle

BUNDLES = "/midstream/v1/bundles"
CHUNK_BYTES = 256 << 10

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_RANGE = re.compile(r"bytes=(\d{1,15})-(\d{0,15})")

State = Callable[[], dict[str, str]]
"""Model -> what is going on with its bundle (`ready`, `building 3/21: ...`, `failed: ...`)."""


@frozen
class Span:
    """Bytes [first, end) of a file."""

    first: int
    end: int


class BundleShelf:
    """Serves what stands in `root`. `state` tells of bundles that are not there yet."""

    def __init__(self, root: Path, state: State = dict) -> None:
        self._root = root
        self._state = state

    def routes(self) -> list[Route]:
        return [
            Route("GET", BUNDLES, self._index),
            Route("GET", f"{BUNDLES}/{{model}}/manifest.json", self._manifest),
            Route("GET", f"{BUNDLES}/{{model}}/files/{{file}}", self._file),
        ]

    def manifests(self) -> list[BundleManifest]:
        """Every complete bundle, by name."""
        found = []
        for folder in sorted(self._root.glob("*/")) if self._root.is_dir() else []:
            try:
                found.append(read_bundle(folder))
            except MidstreamError:
                continue  # under construction or damaged; building makes it anew
        return found

    async def _index(self, request: Request) -> Response:
        manifests = await asyncio.to_thread(self.manifests)
        ready = [
            {
                "model": m.model,
                "digest": m.digest,
                "source_sha256": m.source_sha256,
                "cuts": len(m.cuts),
                "manifest": f"{BUNDLES}/{m.model}/manifest.json",
            }
            for m in manifests
        ]
        body = json.dumps({"bundles": ready, "state": self._state()}).encode()
        return Response(headers={"content-type": "application/json"}, body=body)

    async def _manifest(self, request: Request) -> Response:
        manifest = await asyncio.to_thread(read_bundle, self._folder(request.params["model"]))
        return Response(
            headers={"content-type": "application/json", "etag": f'"{manifest.digest}"'}, body=encode(manifest)
        )

    async def _file(self, request: Request) -> Response:
        folder = self._folder(request.params["model"])
        manifest = await asyncio.to_thread(read_bundle, folder)
        name = request.params["file"]
        if name not in files_of(manifest):
            raise NotFound(
                f"bundle {manifest.model} has no file {name[:64]!r}", next_step="see its manifest", field="file"
            )
        sha256, size_bytes = files_of(manifest)[name]
        headers = {"content-type": "application/octet-stream", "etag": f'"{sha256}"', "accept-ranges": "bytes"}
        span = wanted_span(request, sha256, size_bytes)
        if span is None:
            return Response(
                200, headers | {"content-length": str(size_bytes)}, _read(folder / name, Span(0, size_bytes))
            )
        if span.first >= size_bytes:
            return Response(416, headers | {"content-range": f"bytes */{size_bytes}"})
        headers["content-range"] = f"bytes {span.first}-{span.end - 1}/{size_bytes}"
        headers["content-length"] = str(span.end - span.first)
        return Response(206, headers, _read(folder / name, span))

    def _folder(self, model: str) -> Path:
        if not _NAME.fullmatch(model):
            raise BadRequest(f"{model[:64]!r} is not a model name", field="model")
        return self._root / model


def wanted_span(request: Request, sha256: str, size_bytes: int) -> Span | None:
    """The one range asked for (RFC 9110, 14.2), or None for the whole file: no or another kind of range, a new file."""
    found = _RANGE.fullmatch(request.headers.get("range", "").strip())
    if found is None or request.headers.get("if-range", f'"{sha256}"') != f'"{sha256}"':
        return None
    first = int(found[1])
    last = int(found[2]) if found[2] else size_bytes - 1
    if last < first and first < size_bytes:
        return None
    return Span(first, min(last + 1, size_bytes))


async def _read(path: Path, span: Span) -> AsyncIterator[bytes]:
    stream = await asyncio.to_thread(path.open, "rb")
    try:
        await asyncio.to_thread(stream.seek, span.first)
        left = span.end - span.first
        while left > 0:
            chunk = await asyncio.to_thread(stream.read, min(CHUNK_BYTES, left))
            if not chunk:
                return  # truncated under our hands: the client sees a short body and resumes
            left -= len(chunk)
            yield chunk
    finally:
        stream.close()

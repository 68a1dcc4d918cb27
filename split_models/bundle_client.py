"""The device's side of bundles: manifest and the files this device needs, fetched over a link into the model store."""

from __future__ import annotations

import asyncio
from pathlib import Path
from urllib.parse import quote

from engines.store import ModelStore
from links.port import Link
from protocol.errors import LinkError, NotFound, ProtocolError
from protocol.models import BundleManifest, CutEntry
from split_models.bundle_files import MAX_MANIFEST_BYTES, files_of, parse_manifest

BUNDLES = "/midstream/v1/bundles"
CHUNK_BYTES = 1 << 20
"""One range request: what is held in memory, and what a broken download loses at most."""

CHUNK_DEADLINE_S = 60.0
MAX_FILE_BYTES = 512 << 20
TRIES = 3
"""Failures of one range in a row; the next look goes on from there."""


def kept_as(model: str) -> str:
    """Folder of a model's bundle in the store."""
    return f"{model}.bundle"


class BundleClient:
    """Fetches from one coordinator at a time. All methods are for the event loop's thread."""

    def __init__(self, store: ModelStore, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._store = store
        self._chunk_bytes = chunk_bytes

    async def manifest(self, link: Link, model: str) -> BundleManifest:
        """The coordinator's present manifest. Raises NotFound (none yet), LinkError or ProtocolError."""
        reply = await link.exchange(f"{BUNDLES}/{quote(model, safe='')}/manifest.json", {}, b"", 30.0, method="GET")
        if reply.status == 404:
            raise NotFound(f"the coordinator has no bundle of {model} yet", field="model")
        if reply.status != 200:
            raise LinkError(f"the coordinator answered {reply.status} for the bundle of {model}")
        if len(reply.body) > MAX_MANIFEST_BYTES:
            raise ProtocolError(f"bundle manifest of {model} has {len(reply.body)} bytes")
        manifest = parse_manifest(reply.body)
        if manifest.model != model:
            raise ProtocolError(f"asked for the bundle of {model}, got {manifest.model}", field="model")
        return manifest

    async def whole(self, link: Link | None, manifest: BundleManifest) -> Path:
        """The prepared whole model, fetched unless it is here."""
        return await self._file(link, manifest, manifest.whole_file)

    async def head(self, link: Link | None, manifest: BundleManifest, cut: CutEntry) -> Path:
        """A head, fetched unless it is here."""
        return await self._file(link, manifest, cut.head_file)

    async def tail(self, link: Link | None, manifest: BundleManifest, cut: CutEntry) -> Path:
        """A tail, for a device that ends a late request itself; fetched unless it is here."""
        return await self._file(link, manifest, cut.tail_file)

    async def _file(self, link: Link | None, manifest: BundleManifest, name: str) -> Path:
        """Raises NotFound when the file is not here and there is no link, LinkError, EngineError for wrong bytes."""
        sha256, size_bytes = files_of(manifest)[name]
        stored = f"{sha256[:16]}-{name}"
        path = self._store.file_path(kept_as(manifest.model), stored)
        if path.is_file() and path.stat().st_size == size_bytes:
            return path
        if link is None:
            raise NotFound(f"{name} of {manifest.model} is not here", next_step="it is fetched when the link is back")
        await self._download(link, manifest, name, stored, size_bytes)
        return await asyncio.to_thread(self._store.place_file, kept_as(manifest.model), stored, sha256, size_bytes)

    async def _download(self, link: Link, manifest: BundleManifest, name: str, stored: str, size_bytes: int) -> None:
        """Into the store's incoming area by ranges, from where an earlier try ended; one range is held at a time."""
        if not 0 < size_bytes <= MAX_FILE_BYTES:
            raise ProtocolError(f"{name} claims {size_bytes} bytes", field="size_bytes")
        folder, store = kept_as(manifest.model), self._store
        path = f"{BUNDLES}/{quote(manifest.model, safe='')}/files/{quote(name, safe='')}"
        here_bytes = await asyncio.to_thread(store.part_bytes, folder, stored)
        failures = 0
        while here_bytes < size_bytes:
            last = min(here_bytes + self._chunk_bytes, size_bytes) - 1
            try:
                chunk = await _range(link, path, here_bytes, last, size_bytes)
            except LinkError:
                failures += 1
                if failures >= TRIES:
                    raise
                await asyncio.sleep(0.2 * failures)
                continue
            failures = 0
            here_bytes = await asyncio.to_thread(store.extend_file, folder, stored, here_bytes, chunk, size_bytes)


async def _range(link: Link, path: str, first: int, last: int, size_bytes: int) -> bytes:
    reply = await link.exchange(path, {"range": f"bytes={first}-{last}"}, b"", CHUNK_DEADLINE_S, method="GET")
    if reply.status == 206 and 0 < len(reply.body) <= last - first + 1:
        return reply.body
    if reply.status == 200 and len(reply.body) == size_bytes:  # the peer knows no ranges
        return reply.body[first:]
    if reply.status == 404:
        raise NotFound(f"the coordinator no longer has {path}", next_step="the manifest is fetched again")
    raise LinkError(f"the coordinator answered {reply.status} with {len(reply.body)} bytes for {path}")

"""A bundle on disk: a folder per model with manifest.json, the whole model, heads and tails.

A folder is complete or absent: it is built beside its final place, flushed, and renamed.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from engines.digest import file_sha256
from protocol.decode import check_schema, decode, encode
from protocol.durable import disk_error
from protocol.errors import MidstreamError, NotFound, ProtocolError
from protocol.models import BUNDLE_SCHEMA, BundleManifest, CatalogueEntry

MANIFEST = "manifest.json"
MAX_MANIFEST_BYTES = 1 << 20
"""About 600 bytes per cut and codec; 12 cuts need 15 KB."""


def parse_manifest(data: bytes) -> BundleManifest:
    """Strict. Raises ProtocolError naming the field, also for file names that leave the folder."""
    manifest = decode(BundleManifest, data, what="bundle manifest", max_bytes=MAX_MANIFEST_BYTES)
    check_schema(manifest.schema, BUNDLE_SCHEMA)
    for name in [manifest.whole_file, *files_of(manifest)]:
        if not _plain_name(name):
            raise ProtocolError(f"bundle manifest: {name[:64]!r} is not a plain file name", field="cuts.head_file")
    return manifest


def files_of(manifest: BundleManifest) -> dict[str, tuple[str, int]]:
    """sha256 and size of every file by name."""
    found = {manifest.whole_file: (manifest.whole_sha256, manifest.whole_size_bytes)}
    for cut in manifest.cuts:
        found[cut.head_file] = (cut.head_sha256, cut.head_size_bytes)
        found[cut.tail_file] = (cut.tail_sha256, cut.tail_size_bytes)
    for batch in (manifest.whole_batch, *(cut.batch for cut in manifest.cuts)):
        if batch is not None:
            found[batch.file] = (batch.sha256, batch.size_bytes)
    return found


def read_bundle(folder: Path) -> BundleManifest:
    """The manifest of a complete folder. Raises NotFound when there is none, ProtocolError when it is damaged."""
    try:
        data = (folder / MANIFEST).read_bytes()
    except OSError as err:
        raise NotFound(f"no bundle in {folder.name}", next_step="the coordinator makes bundles when it starts") from err
    manifest = parse_manifest(data)
    for name, (_, size_bytes) in files_of(manifest).items():
        file = folder / name
        if not file.is_file() or file.stat().st_size != size_bytes:
            raise ProtocolError(f"bundle of {manifest.model}: {name} is missing or torn", field=name)
    return manifest


def usable_bundle(folder: Path, entry: CatalogueEntry, source_sha256: str) -> BundleManifest | None:
    """The folder's manifest if it was made from this very file and entry, else None."""
    try:
        manifest = read_bundle(folder)
    except MidstreamError:
        return None
    wanted = (entry.name, source_sha256, entry.recipe)
    if (manifest.model, manifest.source_sha256, manifest.recipe) != wanted or manifest.schema != BUNDLE_SCHEMA:
        return None  # another model, or a release that measured less
    if any(manifest.input_shapes.get(name) != shape for name, shape in entry.input_shapes.items()):
        return None
    return manifest


def verify_files(folder: Path, manifest: BundleManifest) -> Sequence[str]:
    """Names of files whose bytes are not those of the manifest."""
    return [name for name, (sha256, _) in files_of(manifest).items() if file_sha256(folder / name) != sha256]


class BundleFolder:
    """A folder under construction: write files, then `publish`, else `discard`. Raises ConfigError on a full disk."""

    def __init__(self, root: Path, model: str) -> None:
        self._final = root / model
        try:
            root.mkdir(parents=True, exist_ok=True)
            self.path = Path(tempfile.mkdtemp(prefix=f".{model}-", dir=root))
        except OSError as err:
            raise disk_error(err, root) from err

    def write(self, name: str, data: bytes) -> None:
        """A new file, flushed to disk."""
        try:
            with (self.path / name).open("xb") as stream:
                stream.write(data)
                stream.flush()
                os.fsync(stream.fileno())
        except OSError as err:
            raise disk_error(err, self._final) from err

    def publish(self, manifest: BundleManifest) -> None:
        """Put the folder in its place; the one before is kept until the new one stands."""
        self.write(MANIFEST, encode(manifest))
        old = self._final.with_name(f".{self._final.name}.previous")
        try:
            _sync(self.path)
            shutil.rmtree(old, ignore_errors=True)
            if self._final.exists():
                self._final.rename(old)
            self.path.rename(self._final)
            _sync(self._final.parent)
        except OSError as err:
            raise disk_error(err, self._final) from err
        shutil.rmtree(old, ignore_errors=True)

    def discard(self) -> None:
        """Remove what was written; idempotent."""
        shutil.rmtree(self.path, ignore_errors=True)


def sweep(root: Path, model: str) -> None:
    """Remove what a crash left; a previous folder comes back when the new one had not been renamed yet."""
    final, old = root / model, root / f".{model}.previous"
    if old.exists() and not final.exists():
        old.rename(final)
    for left in root.glob(f".{model}-*"):
        shutil.rmtree(left, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)


def _plain_name(name: str) -> bool:
    return 0 < len(name) <= 128 and not name.startswith(".") and all(c.isalnum() or c in "._-" for c in name)


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

"""Finished bundles are kept beside their model, so that another start, or another coordinator, need not build again.

`<models>/<model>/bundle-<key>/<model>/` holds one bundle. The key covers everything that its bytes and its measured
figures depend on. What is served is a folder of hard links to it: removing a model from the store, or building another
bundle, takes nothing from under a coordinator that runs. Blocking: runs in the child that builds.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import platform
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path

from attrs import field, frozen

from engines.side_files import source_sha256 as source_digest
from protocol import zstd
from protocol.decode import encode
from protocol.durable import disk_error
from protocol.errors import ConfigError, EngineError, MidstreamError
from protocol.models import BUNDLE_SCHEMA, BundleManifest, CatalogueEntry
from split_models.bundle import BundleLimits, Progress, build_bundle
from split_models.bundle_files import BundleFolder, files_of, read_bundle, usable_bundle, verify_files

log = logging.getLogger("midstream.coordinator.cutting")

BUILD_FORM = 3
"""Raise it when the same inputs give another bundle."""

MAX_KEPT = 3
"""Bundles kept per model: settings that alternate do not build each time, and a disk does not fill."""

_PREFIX = "bundle-"


@frozen
class Order:
    """What is to be built: `out_dir/<entry.name>` is served; samples are encoded pictures."""

    entry: CatalogueEntry
    file: Path
    out_dir: Path
    samples: Sequence[bytes] = ()
    limits: BundleLimits = field(factory=BundleLimits)


def finished_bundle(order: Order, progress: Callable[[Progress], None] = lambda _: None) -> BundleManifest:
    """The bundle in its served place: kept from before and verified, else built and kept.

    A store that cannot be written is no reason to serve nothing: then the bundle is built where it is served. Raises as
    build_bundle does.
    """
    if not order.file.is_file():
        raise EngineError(f"{order.file.name} is not there", next_step="midstream models pull fetches it")
    source_sha256 = source_digest(order.file, order.entry.format)
    kept_root = order.file.parent / f"{_PREFIX}{build_key(order, source_sha256)}"
    try:
        with _locked(order.file.parent):
            manifest = _kept(kept_root, order, source_sha256) or _build(kept_root, order, progress)
            _place(kept_root / order.entry.name, manifest, order.out_dir)
            _forget_oldest(kept_root)
    except ConfigError as err:
        log.info("the bundle of %s cannot be kept beside its model: %s", order.entry.name, err)
        manifest = _build(order.out_dir, order, progress)
    return manifest


def build_key(order: Order, source_sha256: str) -> str:
    """Names a bundle by all that went into it: model, entry, settings, samples, tools, and the machine it measured."""
    told = {
        "form": BUILD_FORM,
        "schema": BUNDLE_SCHEMA,
        "source": source_sha256,
        "recipe": order.entry.recipe,
        "shapes": {name: list(shape) for name, shape in order.entry.input_shapes.items()},
        "limits": [order.limits.max_cuts, order.limits.seconds, order.limits.threads],
        "samples": [hashlib.sha256(sample).hexdigest() for sample in order.samples],
        "tools": [*map(_version, ("onnxruntime", "onnx", "ai-edge-litert")), zstd.available()],
        "machine": _machine(),
    }
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:16]


def _kept(root: Path, order: Order, source_sha256: str) -> BundleManifest | None:
    """A kept bundle whose every byte is as its manifest says; a damaged one is removed."""
    folder = root / order.entry.name
    manifest = usable_bundle(folder, order.entry, source_sha256)
    if manifest is None:
        return None
    wrong = verify_files(folder, manifest)
    if wrong:
        log.warning("the kept bundle of %s is damaged (%s); it is built again", order.entry.name, wrong[0])
        shutil.rmtree(root, ignore_errors=True)
        return None
    return manifest


def _build(out_dir: Path, order: Order, progress: Callable[[Progress], None]) -> BundleManifest:
    try:
        return build_bundle(
            order.file, order.entry, out_dir, samples=order.samples, limits=order.limits, progress=progress
        )
    finally:
        with suppress(OSError):  # holds a bundle, as it should
            out_dir.rmdir()


def _place(kept: Path, manifest: BundleManifest, out_dir: Path) -> None:
    """Put links to the kept files where they are served, whole or not at all; nothing to do when they are there."""
    final = out_dir / manifest.model
    if _same(final, manifest):
        return
    folder = BundleFolder(out_dir, manifest.model)
    try:
        for name in files_of(manifest):
            _link(kept / name, folder.path / name)
        folder.publish(manifest)
    finally:
        folder.discard()


def _same(folder: Path, manifest: BundleManifest) -> bool:
    try:
        return encode(read_bundle(folder)) == encode(manifest) and not verify_files(folder, manifest)
    except MidstreamError:
        return False


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links
        try:
            shutil.copyfile(source, target)
            with target.open("rb") as stream:
                os.fsync(stream.fileno())
        except OSError as err:
            raise disk_error(err, target) from err


def _forget_oldest(used: Path) -> None:
    """Keep the bundles that were used last."""
    os.utime(used)
    kept = sorted(used.parent.glob(f"{_PREFIX}*/"), key=lambda path: path.stat().st_mtime, reverse=True)
    for old in kept[MAX_KEPT:]:
        shutil.rmtree(old, ignore_errors=True)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One builder per model, across processes; the lock ends with the process that held it."""
    try:
        handle = (folder / ".bundle.lock").open("a")
    except OSError as err:
        raise disk_error(err, folder) from err
    with handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "none"


def _machine() -> str:
    """What the measured seconds depend on, and a restart or another container does not change."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return f"{platform.system()} {platform.machine()} {model} {os.cpu_count()}"

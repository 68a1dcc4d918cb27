"""Bundles as a model repository: tails and whole models in the layout that Triton, KServe and others read.

One folder per model, `<name>/config.pbtxt` and `<name>/1/model.onnx` (Triton's model repository and model
configuration; batches are off, since shapes are fixed). Names carry the weights' digest, so a folder never changes
once it is there, and a server that polls sees whole models only.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from attrs import frozen

from engines.digest import file_sha256
from engines.port import TensorRuntime
from protocol.durable import disk_error
from protocol.errors import ConfigError
from protocol.models import BundleManifest, foreign_name, tail_name
from protocol.tensors import TensorSpec
from split_models.bundle_files import read_bundle

CONFIG = "config.pbtxt"
PLATFORM = "onnxruntime_onnx"

_TYPES = {"BYTES": "TYPE_STRING"}


@frozen
class Exported:
    """One model of the repository. `new` is False when it stood there already."""

    name: str
    new: bool


@frozen
class _Part:
    name: str
    file: Path
    sha256: str


def export_repository(
    bundles: Sequence[Path], out_dir: Path, runtime: TensorRuntime, note: Callable[[str], None] = lambda _: None
) -> Sequence[Exported]:
    """Write the whole model and the tails of every bundle folder into `out_dir`, which may hold other models.

    `note` is told in words of what is left out. Raises ConfigError (full disk, a folder of that name with another
    file), NotFound or ProtocolError (no bundle, torn bundle), EngineError (a file that the runtime cannot load).
    """
    done: list[Exported] = []
    for bundle in bundles:
        manifest = read_bundle(bundle)
        if not manifest.whole_file.endswith(".onnx"):
            note(f"{manifest.model} is left out: these servers run no {Path(manifest.whole_file).suffix} files")
            continue
        done += [_export(part, out_dir, runtime) for part in _parts(bundle, manifest)]
    return done


def model_config(name: str, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> str:
    """The text of config.pbtxt; free dimensions are -1."""
    lines = [f'name: "{name}"', f'platform: "{PLATFORM}"', "max_batch_size: 0"]
    for kind, specs in (("input", inputs), ("output", outputs)):
        lines += [line for spec in specs for line in _tensor(kind, spec)]
    return "\n".join(lines) + "\n"


def _tensor(kind: str, spec: TensorSpec) -> Iterator[str]:
    dims = ", ".join("-1" if size is None else str(size) for size in spec.shape)
    datatype = _TYPES.get(spec.datatype, f"TYPE_{spec.datatype}")
    yield f'{kind} {{ name: "{_quoted(spec.name)}" data_type: {datatype} dims: [ {dims} ] }}'


def _quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')


def _parts(bundle: Path, manifest: BundleManifest) -> Iterator[_Part]:
    yield _Part(foreign_name(manifest.model, manifest.digest), bundle / manifest.whole_file, manifest.whole_sha256)
    for cut in manifest.cuts:
        name = tail_name(manifest.model, manifest.digest, cut.id, cut.codec)
        yield _Part(name, bundle / cut.tail_file, cut.tail_sha256)


def _export(part: _Part, out_dir: Path, runtime: TensorRuntime) -> Exported:
    final = out_dir / part.name
    if final.exists():
        _check_same(final, part)
        return Exported(part.name, new=False)
    model = runtime.load(part.file, 1)
    try:
        config = model_config(part.name, model.inputs, model.outputs)
    finally:
        model.close()
    try:
        _write(part, config, final)
    except OSError as err:
        raise disk_error(err, out_dir) from err
    return Exported(part.name, new=True)


def _write(part: _Part, config: str, final: Path) -> None:
    """Beside its place, then renamed: servers skip names with a dot, and see the folder complete or not at all."""
    if not final.parent.exists():
        final.parent.mkdir(parents=True)
        final.parent.chmod(0o755)  # like all below: servers run as other users, whatever our umask is
    room = Path(tempfile.mkdtemp(prefix=f".{part.name}-", dir=final.parent))
    try:
        (room / "1").mkdir()
        shutil.copyfile(part.file, room / "1" / "model.onnx")
        (room / CONFIG).write_text(config)
        for file in (room / "1" / "model.onnx", room / CONFIG):
            file.chmod(0o644)
            _flush(file)
        for folder in (room / "1", room):
            folder.chmod(0o755)
        room.rename(final)
    finally:
        shutil.rmtree(room, ignore_errors=True)


def _check_same(final: Path, part: _Part) -> None:
    file = final / "1" / "model.onnx"
    if not file.is_file() or file_sha256(file) != part.sha256:
        raise ConfigError(
            f"{final} is there and holds another file", next_step="remove it, or export to another folder", field="DIR"
        )


def _flush(file: Path) -> None:
    with file.open("rb") as stream:
        os.fsync(stream.fileno())

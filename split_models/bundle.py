"""Prepare and cut a model once, measure the server's parts, and publish the bundle that devices fetch from."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from attrs import evolve, frozen

from engines.digest import file_sha256
from engines.onnx import OnnxRuntime
from engines.port import TensorModel, TensorRuntime
from protocol.clock import Clock
from protocol.errors import ConfigError, EngineError
from protocol.models import BUNDLE_SCHEMA, BundleManifest, CatalogueEntry, CutEntry
from split_models.bundle_files import BundleFolder, sweep, usable_bundle
from split_models.calibration import Calibration, observe
from split_models.codec import INT8, wire_bytes
from split_models.cuts import Cut, single_tensor_cuts
from split_models.measure import MeasureRun, time_calls, time_model
from split_models.offer import Offered, offers
from split_models.partition_onnx import Partitioner
from split_models.prepare_onnx import Prepared, prepare
from split_models.recipes import Recipe, recipe
from split_models.seam import Seam

WHOLE = "whole.onnx"


@frozen
class BundleLimits:
    """Bounds of one build: cuts that get files, and seconds after which no further cut is looked at."""

    max_cuts: int = 6
    seconds: float = 90.0
    threads: int = 0


@frozen
class Progress:
    """done of total steps of one model's build; `what` is the step that begins."""

    model: str
    done: int
    total: int
    what: str


def build_bundle(
    file: Path,
    entry: CatalogueEntry,
    out_dir: Path,
    *,
    runtime: TensorRuntime | None = None,
    measure: MeasureRun = time_model,
    samples: Sequence[bytes] = (),
    limits: BundleLimits | None = None,
    progress: Callable[[Progress], None] = lambda _: None,
    clock: Clock = time.monotonic,
) -> BundleManifest:
    """Make `out_dir/<entry.name>/`, or return what is there when it was made from the same file and entry.

    Blocks for seconds to `limits.seconds`. samples: encoded inputs (JPEG, PNG) beside the recipe's own. Raises
    EngineError (not a model that can be cut), ConfigError (no recipe, full disk) or ProtocolError.
    """
    source_sha256 = file_sha256(_existing(file))
    sweep(out_dir, entry.name)
    ready = usable_bundle(out_dir / entry.name, entry, source_sha256)
    if ready is not None:
        return ready
    if entry.recipe is None:
        raise ConfigError(f"{entry.name} has no recipe, so no cut of it can be judged", field="recipe")
    build = _Build(
        entry, recipe(entry.recipe), runtime or OnnxRuntime(), measure, limits or BundleLimits(), progress, clock
    )
    folder = BundleFolder(out_dir, entry.name)
    try:
        manifest = build.into(folder, file, source_sha256, samples)
        folder.publish(manifest)
    finally:
        folder.discard()
    return manifest


class _Build:
    """One build; its methods follow the order of work."""

    def __init__(
        self,
        entry: CatalogueEntry,
        recipe: Recipe,
        runtime: TensorRuntime,
        measure: MeasureRun,
        limits: BundleLimits,
        progress: Callable[[Progress], None],
        clock: Clock,
    ) -> None:
        self._entry = entry
        self._recipe = recipe
        self._runtime = runtime
        self._measure = measure
        self._limits = limits
        self._progress = progress
        self._clock = clock
        self._ends_s = clock() + limits.seconds
        self._done = 0

    def into(self, folder: BundleFolder, file: Path, source_sha256: str, samples: Sequence[bytes]) -> BundleManifest:
        self._step("prepare")
        shapes = dict(self._entry.input_shapes) or {_only_input(file, self._runtime): self._recipe.input_shape}
        prepared = prepare(file, shapes)
        folder.write(WHOLE, prepared.data)
        whole = self._runtime.load(folder.path / WHOLE, self._limits.threads)
        try:
            return self._measured(folder, prepared, whole, source_sha256, shapes, samples)
        finally:
            whole.close()

    def _measured(
        self,
        folder: BundleFolder,
        prepared: Prepared,
        whole: TensorModel,
        source_sha256: str,
        shapes: dict[str, tuple[int, ...]],
        samples: Sequence[bytes],
    ) -> BundleManifest:
        cuts = single_tensor_cuts(prepared.graph)
        partitioner = Partitioner(prepared)
        self._step("calibrate")
        names = [tensor.name for cut in cuts for tensor in cut.crossing if tensor.datatype == "FP32"]
        shape = shapes[whole.inputs[0].name]
        seen = observe(partitioner, names, whole, self._runtime, self._recipe, shape, samples)
        if not seen.observed:
            raise EngineError(f"no calibration input of {self._entry.name} could be used")
        first = seen.observed[0]
        self._step("measure the whole model")
        whole_s = self._measure(whole, first.made.inputs).median_s

        def cloud() -> None:
            made = self._recipe.before(first.encoded, whole.inputs[0].name, shape)
            self._recipe.after(whole.run(made.inputs), made.context)

        manifest = BundleManifest(
            schema=BUNDLE_SCHEMA,
            model=self._entry.name,
            digest=prepared.digest,
            source_sha256=source_sha256,
            recipe=self._entry.recipe,
            input_shapes=shapes,
            whole_file=WHOLE,
            whole_sha256=prepared.digest,
            whole_size_bytes=len(prepared.data),
            whole_s=whole_s,
            cloud_s=time_calls(cloud).median_s,
            encoded_bytes=len(first.encoded),
            down_bytes=sum(tensor.size_bytes for tensor in first.answer),
            cuts=(),
            outputs=tuple((tensor.name, tensor.datatype, tensor.shape) for tensor in prepared.graph.outputs),
            flops=prepared.graph.flops,
            single_cuts=len(cuts),
        )
        return evolve(manifest, cuts=tuple(self._cuts(folder, prepared, partitioner, cuts, seen)))

    def _cuts(
        self,
        folder: BundleFolder,
        prepared: Prepared,
        partitioner: Partitioner,
        cuts: Sequence[Cut],
        seen: Calibration,
    ) -> list[CutEntry]:
        seam = Seam(prepared, partitioner, seen)
        trial = folder.path / ".trial.onnx"

        def error_of(cut: Cut) -> float:
            self._step(f"try cut {cut.id}")
            if cut.crossing[0].datatype != "FP32":
                return 1.0
            return seam.best_clip(cut, trial, self._runtime, self._recipe, self._limits.threads)

        found = offers(cuts, error_of, self._limits.max_cuts, lambda: self._clock() < self._ends_s)
        return [self._write_cut(folder, seam, offered) for offered in found]

    def _write_cut(self, folder: BundleFolder, seam: Seam, offered: Offered) -> CutEntry:
        cut, codec = offered.cut, offered.codec
        self._step(f"measure tail {cut.id} {codec}")
        parts = seam.parts(cut, codec)
        head_file, tail_file = f"head_{cut.id}_{codec}.onnx", f"tail_{cut.id}_{codec}.onnx"
        folder.write(head_file, parts.head)
        folder.write(tail_file, parts.tail)
        answer = seam.answer if codec == INT8 else None
        seen = seam.calibration.observed[0]
        tail = self._runtime.load(folder.path / tail_file, self._limits.threads)
        try:
            sent = seam.sent(seen.crossing, cut, codec, parts)
            tail_s = self._measure(tail, sent).median_s
            down_bytes = sum(tensor.size_bytes for tensor in tail.run(sent))
        finally:
            tail.close()
        return CutEntry(
            id=cut.id,
            codec=codec,
            crossing=parts.crossing,
            head_file=head_file,
            head_sha256=hashlib.sha256(parts.head).hexdigest(),
            head_size_bytes=len(parts.head),
            tail_file=tail_file,
            tail_sha256=hashlib.sha256(parts.tail).hexdigest(),
            tail_size_bytes=len(parts.tail),
            wire_bytes=wire_bytes(codec, parts.crossing),
            head_flops=cut.head_flops,
            tail_s=tail_s,
            error_ratio=offered.error_ratio,
            down_bytes=down_bytes,
            answer_scale=answer.scales[0] if answer else 0.0,
            answer_zero=answer.zeros[0] if answer else 0,
        )

    def _step(self, what: str) -> None:
        total = 3 + 3 * self._limits.max_cuts
        self._progress(Progress(self._entry.name, min(self._done, total), total, what))
        self._done += 1


def _existing(file: Path) -> Path:
    if not file.is_file():
        raise EngineError(f"{file.name} is not there", next_step="midstream models pull fetches it")
    return file


def _only_input(file: Path, runtime: TensorRuntime) -> str:
    model = runtime.load(file, threads=1)
    try:
        if len(model.inputs) != 1:
            raise ConfigError(
                "a recipe feeds one input; give input_shapes for models with several", field="input_shapes"
            )
        return model.inputs[0].name
    finally:
        model.close()

"""Prepare and cut a model once, measure the server's parts, and publish the bundle that devices fetch from."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from attrs import evolve, frozen

from engines.port import TensorModel, TensorRuntime
from engines.side_files import source_sha256 as source_digest
from protocol.clock import Clock
from protocol.errors import ConfigError, EngineError
from protocol.models import BUNDLE_SCHEMA, BundleManifest, CatalogueEntry, CutEntry
from protocol.tensors import TensorSpec
from split_models.backend import Backend, Prepared, backend_of
from split_models.bundle_cut import CutWriter, batch_file
from split_models.bundle_files import BundleFolder, sweep, usable_bundle
from split_models.calibration import Calibration, observe
from split_models.candidates import candidates
from split_models.cuts import Cut, single_tensor_cuts
from split_models.graph import Graph
from split_models.measure import MeasureRun, time_calls, time_model
from split_models.offer import offers
from split_models.raw_input import still_input
from split_models.recipes import recipe
from split_models.seam import Bench, Seam
from split_models.task import RecipeTask, SampledTask, Task


@frozen
class BundleLimits:
    """Bounds of one build: cuts that get files, and seconds after which no further cut is looked at.

    batches: whether a form that answers several requests at once is tried, for servers that join requests.
    """

    max_cuts: int = 8
    seconds: float = 90.0
    threads: int = 0
    batches: bool = True


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

    Blocks for seconds to `limits.seconds`. samples: inputs beside the task's own, encoded pictures for a model with a
    recipe, .npz files for one without; what a task cannot use it leaves out. Raises EngineError (not a model that can
    be cut), ConfigError (a format that is never cut, free input sizes, full disk) or ProtocolError.
    """
    source_sha256 = source_digest(_existing(file), entry.format)
    sweep(out_dir, entry.name)
    ready = usable_bundle(out_dir / entry.name, entry, source_sha256)
    if ready is not None:
        return ready
    backend = backend_of(entry.format)
    build = _Build(
        entry, backend, runtime or backend.runtime(), measure, limits or BundleLimits(), progress, clock, samples
    )
    folder = BundleFolder(out_dir, entry.name)
    try:
        manifest = build.into(folder, file, source_sha256)
        folder.publish(manifest)
    finally:
        folder.discard()
    return manifest


def task_of(
    entry: CatalogueEntry,
    shapes: Mapping[str, tuple[int, ...]],
    backend: Backend,
    prepared: Prepared,
    samples: Sequence[bytes] = (),
) -> Task:
    """What judges the answers of this model."""
    if entry.recipe is not None:
        if len(shapes) != 1:
            raise ConfigError("a recipe feeds one input", next_step="name one in input_shapes", field="input_shapes")
        (name,) = shapes
        return RecipeTask(recipe(entry.recipe), name, shapes[name])
    specs = [TensorSpec(tensor.name, tensor.datatype, tensor.shape) for tensor in prepared.graph.inputs]
    return SampledTask(specs, backend.index_bounds(prepared), samples)


class _Build:
    """One build; its methods follow the order of work."""

    def __init__(
        self,
        entry: CatalogueEntry,
        backend: Backend,
        runtime: TensorRuntime,
        measure: MeasureRun,
        limits: BundleLimits,
        progress: Callable[[Progress], None],
        clock: Clock,
        samples: Sequence[bytes],
    ) -> None:
        self._entry = entry
        self._backend = backend
        self._runtime = runtime
        self._measure = measure
        self._limits = limits
        self._progress = progress
        self._clock = clock
        self._samples = samples
        self._ends_s = clock() + limits.seconds
        self._done = 0

    def into(self, folder: BundleFolder, file: Path, source_sha256: str) -> BundleManifest:
        self._step("prepare")
        shapes = fixed_shapes(file, self._entry, self._runtime)
        prepared = self._backend.prepare(file, shapes)
        whole_file = f"whole.{self._backend.format}"
        data = self._backend.whole(prepared)
        folder.write(whole_file, data)
        whole = self._runtime.load(folder.path / whole_file, self._limits.threads)
        try:
            manifest = BundleManifest(
                schema=BUNDLE_SCHEMA,
                model=self._entry.name,
                digest=prepared.digest,
                source_sha256=source_sha256,
                recipe=self._entry.recipe,
                input_shapes=shapes,
                whole_file=whole_file,
                whole_sha256=hashlib.sha256(data).hexdigest(),
                whole_size_bytes=len(data),
                whole_s=0.0,
                encoded_bytes=0,
                down_bytes=0,
                cuts=(),
                outputs=tuple((tensor.name, tensor.datatype, tensor.shape) for tensor in prepared.graph.outputs),
                flops=prepared.graph.flops,
                format=self._backend.format,
                index_bounds=dict(self._backend.index_bounds(prepared)),
            )
            return self._measured(folder, prepared, whole, manifest)
        finally:
            whole.close()

    def _measured(
        self, folder: BundleFolder, prepared: Prepared, whole: TensorModel, manifest: BundleManifest
    ) -> BundleManifest:
        backend, cuts = self._backend, candidates(prepared.graph)
        partitioner = backend.partitioner(prepared)
        self._step("calibrate")
        task = task_of(self._entry, manifest.input_shapes, backend, prepared, self._samples)
        names = crossing_names(prepared.graph, cuts)
        seen = observe(
            partitioner,
            names,
            whole,
            self._runtime,
            task,
            self._samples,
            suffix=backend.format,
            axis=backend.channel_axis,
        )
        if not seen.observed:
            raise EngineError(f"no calibration input of {self._entry.name} could be used")
        manifest = self._whole(whole, task, seen, evolve(manifest, single_cuts=len(single_tensor_cuts(prepared.graph))))
        if self._limits.batches:
            asked = [found.case.made.inputs for found in seen.observed]
            batch = batch_file(folder, manifest.whole_file, asked, self._runtime, self._limits.threads)
            manifest = evolve(manifest, whole_batch=batch)
        seam = Seam(prepared.graph, partitioner, seen, task)
        return evolve(manifest, cuts=tuple(self._cuts(folder, prepared.graph, cuts, seam)))

    def _whole(self, whole: TensorModel, task: Task, seen: Calibration, manifest: BundleManifest) -> BundleManifest:
        """Seconds and bytes of the whole model, alone and with what stands around it."""
        self._step("measure the whole model")
        first = seen.observed[0]

        def cloud() -> None:
            made = task.before(first.case)
            task.answer(whole.run(made.inputs), first.case)

        return evolve(
            manifest,
            whole_s=self._measure(whole, first.case.made.inputs).median_s,
            cloud_s=time_calls(cloud).median_s,
            encoded_bytes=first.case.size_bytes,
            down_bytes=sum(tensor.size_bytes for tensor in first.answer),
        )

    def _cuts(self, folder: BundleFolder, graph: Graph, cuts: Sequence[Cut], seam: Seam) -> list[CutEntry]:
        threads, raw = self._limits.threads, still_input(graph)
        bench = Bench(folder.path / f".trial.{self._backend.format}", self._runtime, threads)
        writer = CutWriter(
            folder, seam, self._runtime, self._measure, threads, self._backend.format, raw, self._limits.batches
        )

        def error_of(cut: Cut, codec: str) -> float:
            self._step(f"try cut {cut.id} {codec}")
            return seam.error_ratio(cut, codec, bench)

        found: list[CutEntry] = []
        for offered in offers(cuts, error_of, self._limits.max_cuts, lambda: self._clock() < self._ends_s, raw):
            self._step(f"measure cut {offered.cut.id} {offered.codec}")
            found.append(writer.write(offered))
        return found

    def _step(self, what: str) -> None:
        total = 3 + 6 * self._limits.max_cuts
        self._progress(Progress(self._entry.name, min(self._done, total), total, what))
        self._done += 1


def crossing_names(graph: Graph, cuts: Sequence[Cut]) -> list[str]:
    """Computed tensors that may cross, each once, without the graph's own inputs and outputs."""
    ends = {tensor.name for tensor in (*graph.inputs, *graph.outputs)}
    return [name for name in dict.fromkeys(t.name for cut in cuts for t in cut.crossing) if name not in ends]


def fixed_shapes(file: Path, entry: CatalogueEntry, runtime: TensorRuntime) -> dict[str, tuple[int, ...]]:
    """The fixed shapes that a model is cut for: the entry's, the recipe's, or the file's own with a batch of one.

    Raises ConfigError when a size is left free.
    """
    if entry.input_shapes:
        return dict(entry.input_shapes)
    model = runtime.load(file, threads=1)
    try:
        specs = model.inputs
    finally:
        model.close()
    if entry.recipe is not None:
        if len(specs) != 1:
            raise ConfigError(
                "a recipe feeds one input; give input_shapes for models with several", field="input_shapes"
            )
        return {specs[0].name: recipe(entry.recipe).input_shape}
    return {spec.name: _fixed(spec) for spec in specs}


def _fixed(spec: TensorSpec) -> tuple[int, ...]:
    """A free first size is a batch; nobody but the user knows any other."""
    sizes = [1 if place == 0 and size is None else size for place, size in enumerate(spec.shape)]
    if any(size is None for size in sizes):
        shown = "x".join("?" if size is None else str(size) for size in sizes)
        raise ConfigError(
            f"input {spec.name!r} is {shown}: a cut needs every size",
            next_step="give input_shapes in the catalogue entry",
            field="input_shapes",
        )
    return tuple(size for size in sizes if size is not None)


def _existing(file: Path) -> Path:
    if not file.is_file():
        raise EngineError(f"{file.name} is not there", next_step="midstream models pull fetches it")
    return file

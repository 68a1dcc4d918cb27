"""Check a model's cuts for real: head and tail against the whole, raw for exactness and every form for the answer."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from attrs import frozen

from engines.port import TensorModel, TensorRuntime
from protocol.models import BundleManifest, CatalogueEntry
from protocol.tensors import Tensor, TensorSpec
from split_models.backend import Partitioner, backend_of
from split_models.bundle import fixed_shapes, task_of
from split_models.bundle_cut import run_through
from split_models.bundle_files import read_bundle
from split_models.candidates import candidates
from split_models.codec import RAW
from split_models.cuts import Cut, multi_tensor_cuts, single_tensor_cuts
from split_models.graph import Graph
from split_models.plan import ModelPlan
from split_models.recipes import recipe
from split_models.sanity import greatest_difference
from split_models.task import RecipeTask, SampledTask, Task


@frozen
class Checked:
    """One cut and codec: max_relative_error over the whole model's largest value; error_ratio of the task's answer."""

    cut: str
    codec: str
    max_relative_error: float
    error_ratio: float


def verify_cuts(
    file: Path,
    entry: CatalogueEntry,
    samples: Sequence[bytes] = (),
    runtime: TensorRuntime | None = None,
    every: int = 1,
    all_boundaries: bool = False,
) -> Sequence[Checked]:
    """Cuts of a model with the raw codec, on the task's first input (the first of `samples` that it can use).

    every: 1 checks all of them, n each n-th in order. all_boundaries: also places where several tensors cross and that
    send no less than a single one before, which no bundle considers.
    """
    backend = backend_of(entry.format)
    runtime = runtime or backend.runtime()
    shapes = fixed_shapes(file, entry, runtime)
    prepared = backend.prepare(file, shapes)
    task = task_of(entry, shapes, backend, prepared, samples)
    case = task.cases(samples)[0]
    partitioner = backend.partitioner(prepared)
    checked: list[Checked] = []
    with tempfile.TemporaryDirectory(prefix="midstream-verify-") as folder:
        room = _Room(Path(folder), backend.format, runtime)
        with room.loaded("whole", backend.whole(prepared)) as whole:
            reference = tuple(whole.run(case.made.inputs))
        wanted = task.answer(reference, case)
        for cut in _checked_cuts(prepared.graph, all_boundaries)[::every]:
            outputs = room.through(partitioner, cut, case.made.inputs)
            error = max(greatest_difference(a, b) for a, b in zip(outputs, reference, strict=True))
            checked.append(Checked(cut.id, RAW, error, task.error_ratio(task.answer(outputs, case), wanted)))
    return checked


def _checked_cuts(graph: Graph, all_boundaries: bool) -> Sequence[Cut]:
    if not all_boundaries:
        return candidates(graph)
    found = [*single_tensor_cuts(graph), *multi_tensor_cuts(graph, [])]
    return sorted(found, key=lambda cut: cut.after)


def verify_offered(
    folder: Path, inputs: Sequence[bytes] = (), runtime: TensorRuntime | None = None
) -> Sequence[Checked]:
    """Every cut and codec of a bundle, by its own files, over the task's inputs and those of `inputs` it can use."""
    manifest = read_bundle(folder)
    runtime = runtime or backend_of(manifest.format).runtime()
    whole = runtime.load(folder / manifest.whole_file, 0)
    task = _task_of_bundle(manifest, whole.inputs, inputs)
    plan = ModelPlan(manifest, recipe(manifest.recipe) if manifest.recipe is not None else None)
    cases = task.cases(inputs)
    references = [tuple(whole.run(case.made.inputs)) for case in cases]
    whole.close()
    checked: list[Checked] = []
    for cut in manifest.cuts:
        head, tail = runtime.load(folder / cut.head_file, 0), runtime.load(folder / cut.tail_file, 0)
        error, error_ratio = 0.0, 0.0
        for case, reference in zip(cases, references, strict=True):
            outputs = plan.plain(cut, run_through(head, tail, case.made.inputs))
            found = task.error_ratio(task.answer(outputs, case), task.answer(reference, case))
            error_ratio = max(error_ratio, found)
            error = max(error, *(greatest_difference(a, b) for a, b in zip(outputs, reference, strict=True)))
        head.close()
        tail.close()
        checked.append(Checked(cut.id, cut.codec, error, error_ratio))
    return checked


def _task_of_bundle(manifest: BundleManifest, specs: Sequence[TensorSpec], samples: Sequence[bytes]) -> Task:
    if manifest.recipe is not None:
        (name,) = manifest.input_shapes
        return RecipeTask(recipe(manifest.recipe), name, manifest.input_shapes[name])
    return SampledTask(specs, manifest.index_bounds, samples)


@frozen
class _Room:
    """A scratch folder where parts are loaded from."""

    folder: Path
    suffix: str
    runtime: TensorRuntime

    @contextmanager
    def loaded(self, name: str, data: bytes) -> Iterator[TensorModel]:
        file = self.folder / f"{name}.{self.suffix}"
        file.write_bytes(data)
        model = self.runtime.load(file, 0)
        try:
            yield model
        finally:
            model.close()

    def through(self, partitioner: Partitioner, cut: Cut, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        parts = partitioner.split(cut, RAW)
        with self.loaded("head", parts.head) as head:
            crossing = head.run(inputs)
        with self.loaded("tail", parts.tail) as tail:
            return tuple(tail.run(crossing))

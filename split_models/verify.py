"""Check a model's cuts for real: head and tail against the whole, raw for exactness and int8 for the task's answer."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from attrs import frozen

from engines.onnx import OnnxRuntime
from engines.port import TensorModel, TensorRuntime
from protocol.errors import ConfigError
from protocol.models import CatalogueEntry
from protocol.tensors import Tensor
from split_models.bundle_files import read_bundle
from split_models.codec import RAW
from split_models.cuts import Cut, single_tensor_cuts
from split_models.partition_onnx import Partitioner
from split_models.plan import ModelPlan
from split_models.prepare_onnx import prepare
from split_models.recipes import Recipe, recipe
from split_models.sanity import greatest_difference


@frozen
class Checked:
    """One cut: max_relative_error over the whole model's largest value; error_ratio and least_iou of the answer."""

    cut: str
    codec: str
    max_relative_error: float
    same: bool
    least_iou: float


def verify_cuts(
    file: Path, entry: CatalogueEntry, encoded: bytes | None = None, runtime: TensorRuntime | None = None
) -> Sequence[Checked]:
    """Every single-tensor cut of a model with the raw codec, on `encoded` or the recipe's first calibration input."""
    found = _recipe_of(entry)
    runtime = runtime or OnnxRuntime()
    shapes = dict(entry.input_shapes)
    prepared = prepare(file, shapes)
    (name,) = shapes
    made = found.before(encoded or found.calibration()[0], name, shapes[name])
    partitioner = Partitioner(prepared)
    with tempfile.TemporaryDirectory(prefix="midstream-verify-") as folder:
        room = Path(folder)
        with _loaded(runtime, room / "whole.onnx", prepared.data) as whole:
            reference = tuple(whole.run(made.inputs))
        wanted = found.after(reference, made.context)
        checked: list[Checked] = []
        for cut in single_tensor_cuts(prepared.graph):
            outputs = _through(partitioner, cut, runtime, room, made.inputs)
            likeness = found.compare(found.after(outputs, made.context), wanted)
            error = max(greatest_difference(a, b) for a, b in zip(outputs, reference, strict=True))
            checked.append(Checked(cut.id, RAW, error, likeness.same, likeness.least_iou))
    return checked


def verify_offered(
    folder: Path, inputs: Sequence[bytes] = (), runtime: TensorRuntime | None = None
) -> Sequence[Checked]:
    """Every cut and codec of a bundle, by its own files, over `inputs` and the recipe's calibration inputs."""
    manifest = read_bundle(folder)
    if manifest.recipe is None:
        raise ConfigError("a bundle without a recipe cannot be judged", field="recipe")
    found = recipe(manifest.recipe)
    runtime = runtime or OnnxRuntime()
    plan = ModelPlan(manifest, found)
    made = [found.before(data, plan.input_name, plan.input_shape) for data in [*inputs, *found.calibration()]]
    whole = runtime.load(folder / manifest.whole_file, 0)
    references = [tuple(whole.run(one.inputs)) for one in made]
    whole.close()
    checked: list[Checked] = []
    for cut in manifest.cuts:
        head, tail = runtime.load(folder / cut.head_file, 0), runtime.load(folder / cut.tail_file, 0)
        error, same, least = 0.0, True, 1.0
        for one, reference in zip(made, references, strict=True):
            outputs = plan.plain(cut, tuple(tail.run(head.run(one.inputs))))
            likeness = found.compare(found.after(outputs, one.context), found.after(reference, one.context))
            error = max(error, *(greatest_difference(a, b) for a, b in zip(outputs, reference, strict=True)))
            same, least = same and likeness.same, min(least, likeness.least_iou)
        head.close()
        tail.close()
        checked.append(Checked(cut.id, cut.codec, error, same, least))
    return checked


def _through(
    partitioner: Partitioner, cut: Cut, runtime: TensorRuntime, room: Path, inputs: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    parts = partitioner.split(cut, RAW)
    with _loaded(runtime, room / "head.onnx", parts.head) as head:
        crossing = head.run(inputs)
    with _loaded(runtime, room / "tail.onnx", parts.tail) as tail:
        return tuple(tail.run(crossing))


@contextmanager
def _loaded(runtime: TensorRuntime, file: Path, data: bytes) -> Iterator[TensorModel]:
    file.write_bytes(data)
    model = runtime.load(file, 0)
    try:
        yield model
    finally:
        model.close()


def _recipe_of(entry: CatalogueEntry) -> Recipe:
    if entry.recipe is None or len(entry.input_shapes) != 1:
        raise ConfigError(f"{entry.name} needs a recipe and one fixed input to be judged", field="recipe")
    return recipe(entry.recipe)

"""Run a prepared model on calibration inputs: ranges of the tensors that may cross, and reference answers."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from attrs import field, frozen

from engines.arrays import to_array
from engines.port import TensorModel, TensorRuntime
from protocol.errors import RejectedError
from protocol.tensors import Tensor
from split_models.codec import Affine, affine_for
from split_models.partition_onnx import Partitioner
from split_models.recipes import Made, Recipe

MAX_INPUTS = 8


@frozen
class Observed:
    """One calibration input: what the recipe made of it, every crossing tensor, the model's outputs and the answer."""

    encoded: bytes = field(repr=False)
    made: Made = field(repr=False)
    crossing: dict[str, Tensor] = field(repr=False)
    outputs: tuple[Tensor, ...] = field(repr=False)
    answer: tuple[Tensor, ...] = field(repr=False)


class Calibration:
    """What the inputs showed."""

    def __init__(self, observed: Sequence[Observed]) -> None:
        self.observed = tuple(observed)

    def affine(self, name: str, clip: float = 0.0) -> Affine:
        """Range per channel of a crossing tensor or an output, without the share `clip` of values at each end."""
        import numpy as np

        arrays = [to_array(_named(seen, name)) for seen in self.observed]
        if arrays[0].ndim < 2:
            values = np.concatenate([array.reshape(1, -1) for array in arrays], axis=1)
        else:
            rows = [np.moveaxis(array, 1, 0).reshape(array.shape[1], -1) for array in arrays]
            values = np.concatenate(rows, axis=1)
        if clip > 0.0:
            low, high = np.quantile(values, (clip, 1.0 - clip), axis=1)
        else:
            low, high = values.min(axis=1), values.max(axis=1)
        return affine_for(low.tolist(), high.tolist())


def observe(
    partitioner: Partitioner,
    names: Sequence[str],
    whole: TensorModel,
    runtime: TensorRuntime,
    recipe: Recipe,
    shape: tuple[int, ...],
    samples: Sequence[bytes],
) -> Calibration:
    """Feed the recipe's own inputs and `samples` (encoded; those that do not decode are left out)."""
    observed: list[Observed] = []
    with tempfile.TemporaryDirectory(prefix="midstream-calibrate-") as folder:
        file = Path(folder) / "outputs.onnx"
        file.write_bytes(partitioner.with_outputs(list(names)))
        model = runtime.load(file, threads=0)
        try:
            for encoded in [*recipe.calibration(), *samples][:MAX_INPUTS]:
                seen = _observe_one(model, whole, recipe, shape, encoded)
                if seen is not None:
                    observed.append(seen)
        finally:
            model.close()
    return Calibration(observed)


def _observe_one(
    model: TensorModel, whole: TensorModel, recipe: Recipe, shape: tuple[int, ...], encoded: bytes
) -> Observed | None:
    try:
        made = recipe.before(encoded, whole.inputs[0].name, shape)
    except RejectedError:
        return None
    outputs = tuple(whole.run(made.inputs))
    return Observed(
        encoded=encoded,
        made=made,
        crossing={tensor.name: tensor for tensor in model.run(made.inputs)},
        outputs=outputs,
        answer=recipe.after(outputs, made.context),
    )


def _named(seen: Observed, name: str) -> Tensor:
    if name in seen.crossing:
        return seen.crossing[name]
    return next(tensor for tensor in seen.outputs if tensor.name == name)

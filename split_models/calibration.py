"""Run a prepared model on calibration inputs: ranges of the tensors that may cross, and reference answers."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import field, frozen

from engines.arrays import to_array
from engines.port import TensorModel, TensorRuntime
from protocol.tensors import Tensor
from split_models.backend import Partitioner
from split_models.codec import FINEST, Affine, Coarseness, affine_for
from split_models.task import Case, Task

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MAX_HELD_BYTES = 768 << 20
"""Activations of all inputs together: with many large ones fewer inputs are looked at, but never less than two."""

SAMPLED_MARGIN_RATIO = 0.125
"""Ranges seen on made-up inputs are widened by this share of their width at each end."""


@frozen
class Observed:
    """One calibration input: every tensor that may cross, the model's outputs and the answer."""

    case: Case = field(repr=False)
    crossing: dict[str, Tensor] = field(repr=False)
    outputs: tuple[Tensor, ...] = field(repr=False)
    answer: tuple[Tensor, ...] = field(repr=False)

    def tensor(self, name: str) -> Tensor:
        """A tensor that may cross, by name: computed, an input that is sent again, or an output made by the head."""
        for tensor in (*self.outputs, *self.case.made.inputs):
            if tensor.name == name:
                return tensor
        return self.crossing[name]


class Calibration:
    """What the inputs showed.

    Args:
        axis: along which channels differ, for the format's activations.
        margin: share of a range by which it is widened at each end.
    """

    def __init__(self, observed: Sequence[Observed], axis: int = 1, margin: float = 0.0) -> None:
        self.observed = tuple(observed)
        self._axis = axis
        self._margin = margin

    def affine(self, name: str, coarseness: Coarseness = FINEST, learning: bool = False) -> Affine:
        """Range per channel of a crossing tensor or an output. learning: of every other input only, so that the rest
        show how the form does on inputs that it has not seen.
        """
        import numpy as np

        arrays = [to_array(seen.tensor(name)) for seen in (self.observed[::2] if learning else self.observed)]
        axis = _better_axis(arrays, self._axis)
        low, high = _ends(_rows(arrays, axis), coarseness.clip)
        low, high = low.astype(np.float64), high.astype(np.float64)  # a mask's -3.4e38 leaves no room in FP32
        spare = self._margin * (high - low)
        return affine_for((low - spare).tolist(), (high + spare).tolist(), axis, coarseness)


def observe(
    partitioner: Partitioner,
    names: Sequence[str],
    whole: TensorModel,
    runtime: TensorRuntime,
    task: Task,
    samples: Sequence[bytes],
    *,
    suffix: str = "onnx",
    axis: int = 1,
) -> Calibration:
    """Feed the task's own inputs and those of `samples` that it can use. `names`: the tensors to look at."""
    observed: list[Observed] = []
    with tempfile.TemporaryDirectory(prefix="midstream-calibrate-") as folder:
        model = _with_outputs(partitioner, names, runtime, Path(folder) / f"outputs.{suffix}")
        held_bytes = 0
        try:
            for case in task.cases(samples):
                seen = _observe_one(model, whole, task, case)
                observed.append(seen)
                held_bytes += sum(tensor.size_bytes for tensor in seen.crossing.values())
                if len(observed) >= 2 and held_bytes * (1 + 1 / len(observed)) > MAX_HELD_BYTES:
                    break
        finally:
            if model is not None:
                model.close()
    return Calibration(observed, axis, 0.0 if task.real else SAMPLED_MARGIN_RATIO)


def _with_outputs(
    partitioner: Partitioner, names: Sequence[str], runtime: TensorRuntime, file: Path
) -> TensorModel | None:
    """The model with these outputs, loaded; None when nothing is to be looked at."""
    if not names:
        return None
    file.write_bytes(partitioner.with_outputs(list(names)))
    return runtime.load(file, threads=0)


def _observe_one(model: TensorModel | None, whole: TensorModel, task: Task, case: Case) -> Observed:
    outputs = tuple(whole.run(case.made.inputs))
    crossing = model.run(case.made.inputs) if model is not None else ()
    return Observed(case, {tensor.name: tensor for tensor in crossing}, outputs, task.answer(outputs, case))


def _ends(rows: NDArray[Any], clip: float) -> tuple[NDArray[Any], NDArray[Any]]:
    """Lowest and highest value per row, without the share `clip` of values at each end."""
    import numpy as np

    if clip > 0.0:
        low, high = np.quantile(rows, (clip, 1.0 - clip), axis=1)
        return low, high
    return rows.min(axis=1), rows.max(axis=1)


def _rows(arrays: Sequence[NDArray[Any]], axis: int) -> NDArray[Any]:
    """All values of all arrays, one row per channel."""
    import numpy as np

    if arrays[0].ndim < 2:
        return np.concatenate([array.reshape(1, -1) for array in arrays], axis=1)
    rows = [np.moveaxis(array, axis, 0).reshape(array.shape[axis], -1) for array in arrays]
    return np.concatenate(rows, axis=1)


def _better_axis(arrays: Sequence[NDArray[Any]], axis: int) -> int:
    """Of three axes the middle one may count channels or places: the axis that leaves the smaller steps is taken."""
    if arrays[0].ndim != 3 or axis != 1:
        return axis
    return min((1, 2), key=lambda one: _step_energy(_rows(arrays, one)))


def _step_energy(rows: NDArray[np.float32]) -> float:
    """Mean square of the steps that 8 bits leave, over all values."""
    width = rows.max(axis=1) - rows.min(axis=1)
    return float((width.astype("f8") ** 2).mean())

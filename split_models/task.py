"""What judges an answer: a recipe's own comparison, or, for models without one, how far the outputs moved.

Without a recipe nobody says what the model is for. Inputs are then sampled from a seed by datatype and shape, or taken
from the user's own sample; an answer's error is the relative L2 distance of its outputs, or the share of rows whose
greatest value clearly moved, whichever is worse.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from attrs import field, frozen

from engines.arrays import NUMPY_NAMES, to_array, to_tensor
from protocol.errors import BadRequest, EngineError, RejectedError
from protocol.tensors import Tensor, TensorSpec, check_against
from split_models.recipes import Made, Recipe

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MAX_CASES = 8
SAMPLED_CASES = 4
SEED = 20_480

MAX_SAMPLE_BYTES = 256 << 20
"""All arrays of one user's sample, as they would be in memory."""

CLEAR_MARGIN_RATIO = 0.1
"""A row's greatest value moved clearly when the reference had it ahead by this share of the row's spread."""

INDEX_LIMIT = 1_000
"""Integers that index a table of unknown size stay below this."""


@frozen
class Case:
    """One input. encoded: None where tensors are given as they are; its bytes are what a whole request would send."""

    made: Made = field(repr=False)
    encoded: bytes | None = field(default=None, repr=False)

    @property
    def size_bytes(self) -> int:
        if self.encoded is not None:
            return len(self.encoded)
        return sum(tensor.size_bytes for tensor in self.made.inputs)


class Task(Protocol):
    """real: whether the cases look like what live requests bring, so that ranges seen on them may be trusted."""

    @property
    def real(self) -> bool: ...

    def cases(self, samples: Sequence[bytes]) -> Sequence[Case]:
        """At most MAX_CASES inputs: the task's own and those of `samples` that it can use."""
        ...

    def before(self, case: Case) -> Made:
        """The work that stands before the model, done again: for measuring."""
        ...

    def answer(self, outputs: Sequence[Tensor], case: Case) -> tuple[Tensor, ...]:
        """Raises EngineError when the outputs cannot be an answer."""
        ...

    def error_ratio(self, answer: Sequence[Tensor], reference: Sequence[Tensor]) -> float:
        """0: the same; 1: wrong."""
        ...


class RecipeTask:
    """Judged by the recipe: labels and boxes."""

    real = True

    def __init__(self, recipe: Recipe, input_name: str, shape: tuple[int, ...]) -> None:
        self._recipe = recipe
        self._input_name = input_name
        self._shape = shape

    def cases(self, samples: Sequence[bytes]) -> Sequence[Case]:
        found: list[Case] = []
        for encoded in [*self._recipe.calibration(), *samples][:MAX_CASES]:
            try:
                found.append(Case(self._recipe.before(encoded, self._input_name, self._shape), encoded))
            except RejectedError:  # a sample that does not decode is nobody's input
                continue
        return found

    def before(self, case: Case) -> Made:
        if case.encoded is None:
            return case.made
        return self._recipe.before(case.encoded, self._input_name, self._shape)

    def answer(self, outputs: Sequence[Tensor], case: Case) -> tuple[Tensor, ...]:
        return self._recipe.after(outputs, case.made.context)

    def error_ratio(self, answer: Sequence[Tensor], reference: Sequence[Tensor]) -> float:
        return self._recipe.compare(answer, reference).error_ratio


class SampledTask:
    """Judged by the outputs themselves.

    Args:
        inputs: with every size fixed.
        bounds: rows of the tables that an integer input indexes, by its name, where the graph tells.
        samples: .npz files with one array per input, named as the inputs (see read_npz); with one, nothing is made up.
    """

    def __init__(self, inputs: Sequence[TensorSpec], bounds: Mapping[str, int], samples: Sequence[bytes] = ()) -> None:
        self._inputs = tuple(inputs)
        self._bounds = dict(bounds)
        self._own = [made for sample in samples for made in read_npz(sample, self._inputs)]
        self.real = bool(self._own)

    def cases(self, samples: Sequence[bytes]) -> Sequence[Case]:
        if self._own:
            return [Case(made) for made in self._own[:MAX_CASES]]
        return [Case(Made(tuple(self._sampled(spec, kind) for spec in self._inputs))) for kind in range(SAMPLED_CASES)]

    def before(self, case: Case) -> Made:
        return case.made

    def answer(self, outputs: Sequence[Tensor], case: Case) -> tuple[Tensor, ...]:
        return tuple(outputs)

    def error_ratio(self, answer: Sequence[Tensor], reference: Sequence[Tensor]) -> float:
        if len(answer) != len(reference):
            return 1.0
        return max((_distance(a, b) for a, b in zip(answer, reference, strict=True)), default=0.0)

    def _sampled(self, spec: TensorSpec, kind: int) -> Tensor:
        import numpy as np

        random = np.random.default_rng([SEED, kind])
        shape = tuple(size or 1 for size in spec.shape)
        if spec.datatype.startswith("FP"):
            values = _signal(random, shape, kind)
        elif spec.datatype == "BOOL":
            values = random.integers(0, 2, shape)
        elif spec.datatype == "UINT8" and spec.name not in self._bounds:
            values = 255 * _unit(_signal(random, shape, kind))
        elif spec.datatype == "INT8" and spec.name not in self._bounds:
            values = 255 * _unit(_signal(random, shape, kind)) - 128
        else:
            values = _indices(random, shape, spec.name, self._bounds, kind)
        if spec.datatype not in NUMPY_NAMES:
            raise EngineError(f"input {spec.name!r} is {spec.datatype}, which cannot be sampled", field=spec.name)
        return to_tensor(spec.name, np.asarray(values).astype(NUMPY_NAMES[spec.datatype]))


def read_npz(data: bytes, inputs: Sequence[TensorSpec]) -> Sequence[Made]:
    """Model inputs from the arrays of a .npz: one of each input's shape, or several of them stacked along a first axis.

    None at all when it is no .npz, is too large, or does not fit. Nothing is unpickled.
    """
    import numpy as np

    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            if sum(member.file_size for member in archive.infolist()) > MAX_SAMPLE_BYTES:
                return ()
        with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
            stacks = [_stack(arrays[spec.name], spec) for spec in inputs]
        count = min(map(len, stacks), default=0)
        made = [Made(tuple(stack[index] for stack in stacks)) for index in range(min(count, MAX_CASES))]
        for tensor, spec in [pair for one in made for pair in zip(one.inputs, inputs, strict=True)]:
            check_against(tensor, spec)
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, BadRequest, EngineError):
        return ()
    return made


def _stack(array: NDArray[Any], spec: TensorSpec) -> Sequence[Tensor]:
    """The array as one tensor or several. Raises ValueError when its shape is neither."""
    shape = tuple(size or 1 for size in spec.shape)
    if array.shape == shape:
        return [to_tensor(spec.name, array)]
    return [to_tensor(spec.name, part) for part in array.reshape(-1, *shape)] if array.size else []


def _signal(random: np.random.Generator, shape: tuple[int, ...], kind: int) -> NDArray[Any]:
    """Kinds in turn: smooth, as pictures and sound are; noise; smooth with noise; small noise."""
    import numpy as np

    noise = random.standard_normal(shape)
    smooth = np.zeros(shape)
    for axis in range(len(shape)):
        if shape[axis] >= 16:
            place = np.arange(shape[axis]).reshape([-1 if a == axis else 1 for a in range(len(shape))])
            for cycles in random.uniform(0.5, shape[axis] / 16, 3):
                smooth = smooth + np.sin(2 * np.pi * (cycles * place / shape[axis] + random.uniform()))
    smooth = smooth / max(1.0, float(np.abs(smooth).max()))
    return [smooth + 0.01 * noise, noise, smooth + 0.3 * noise, 0.1 * noise][kind % 4]


def _unit(values: NDArray[Any]) -> NDArray[Any]:
    low, high = float(values.min()), float(values.max())
    return (values - low) / max(high - low, 1e-12)


def _indices(
    random: np.random.Generator, shape: tuple[int, ...], name: str, bounds: Mapping[str, int], kind: int
) -> NDArray[Any]:
    """Indices into the table where there is one; else a mask: ones, in every other case with zeros at the end."""
    import numpy as np

    if name in bounds:
        return random.integers(0, max(1, bounds[name]), shape)
    if bounds or not shape:  # other inputs index tables, so this one says which of them count
        mask = np.ones(shape, dtype=np.int64)
        if shape and kind % 2:
            mask[..., -max(1, shape[-1] // 4) :] = 0
        return mask
    return random.integers(0, INDEX_LIMIT, shape)


def _distance(tensor: Tensor, reference: Tensor) -> float:
    """Relative L2 distance, or the share of rows whose clear maximum is elsewhere; not finite or misshapen: 1."""
    import numpy as np

    if (tensor.datatype, tensor.shape) != (reference.datatype, reference.shape):
        return 1.0
    if tensor.datatype == "BYTES":
        return float(bytes(tensor.data) != bytes(reference.data))
    a, b = to_array(tensor).astype(np.float64), to_array(reference).astype(np.float64)
    if not a.size:
        return 0.0
    if not np.isfinite(a).all():
        return 0.0 if np.array_equal(a, b, equal_nan=True) else 1.0
    distance = float(np.linalg.norm(a - b) / max(float(np.linalg.norm(b)), 1e-12))
    return min(1.0, max(distance, _moved(a, b)))


def _moved(a: NDArray[np.float64], b: NDArray[np.float64]) -> float:
    """Of the rows of the last axis, the share whose maximum clearly was elsewhere."""
    import numpy as np

    if b.ndim < 2 or b.shape[-1] < 2:
        return 0.0
    rows, reference = a.reshape(-1, a.shape[-1]), b.reshape(-1, b.shape[-1])
    place = np.arange(len(rows))
    lead = reference.max(axis=1) - reference[place, rows.argmax(axis=1)]
    spread = reference.max(axis=1) - reference.min(axis=1)
    return float((lead > CLEAR_MARGIN_RATIO * np.maximum(spread, 1e-12)).mean())

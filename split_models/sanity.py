"""Whether tensors can be believed: shapes, values that are finite, distance from a reference."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import chain
from math import isfinite

from engines.arrays import to_array
from protocol.errors import BadRequest, EngineError
from protocol.tensors import Tensor, TensorSpec, check_against, check_tensor

_LETTERS = {"FP16": "e", "FP32": "f", "FP64": "d"}


def all_finite(tensor: Tensor) -> bool:
    """False when a float is NaN or infinite. Without numpy it takes some 0.1 s per million floats."""
    if not tensor.datatype.startswith("FP"):
        return True
    try:
        import numpy as np
    except ImportError:
        return plainly_finite(tensor)
    return bool(np.isfinite(to_array(tensor)).all())


def plainly_finite(tensor: Tensor) -> bool:
    """The same of a tensor of floats, by the standard library alone. Raises BadRequest when data and shape disagree."""
    check_tensor(tensor)
    values = struct.iter_unpack("<" + _LETTERS[tensor.datatype], tensor.data)
    return all(map(isfinite, chain.from_iterable(values)))


def finite(tensors: Sequence[Tensor]) -> bool:
    """Whether all floats of all tensors are finite."""
    return all(all_finite(tensor) for tensor in tensors)


def check_outputs(tensors: Sequence[Tensor], specs: Sequence[TensorSpec]) -> tuple[Tensor, ...]:
    """The tensors in the order of `specs`.

    Raises EngineError unless each is there with its datatype and shape and all floats are finite.
    """
    found = {tensor.name: tensor for tensor in tensors}
    ordered: list[Tensor] = []
    for spec in specs:
        tensor = found.get(spec.name)
        if tensor is None:
            raise EngineError(f"output {spec.name!r} is missing from the answer")
        try:
            check_against(tensor, spec)
        except BadRequest as err:
            raise EngineError(f"output {spec.name!r} does not fit: {err.message}") from err
        if not all_finite(tensor):
            raise EngineError(f"output {spec.name!r} holds values that are not finite")
        ordered.append(tensor)
    return tuple(ordered)


def greatest_difference(tensor: Tensor, reference: Tensor) -> float:
    """Largest absolute difference over the reference's largest magnitude; infinite when shapes differ."""
    import numpy as np

    a, b = to_array(tensor).astype(np.float64), to_array(reference).astype(np.float64)
    if a.shape != b.shape:
        return float("inf")
    return float(np.abs(a - b).max() / max(float(np.abs(b).max()), 1e-12)) if a.size else 0.0

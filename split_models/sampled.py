"""Inputs for models that nobody sent any: seeded, of the right datatype and shape."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

from engines.arrays import NUMPY_NAMES, to_tensor
from protocol.errors import EngineError
from protocol.tensors import Tensor
from split_models.graph import GraphTensor


def sampled_inputs(inputs: Sequence[GraphTensor], seed: int = 0) -> tuple[Tensor, ...]:
    """One tensor per input: floats from the standard normal distribution, integers and booleans 0 or 1.

    Small integers are token ids, masks and positions in every vocabulary. The same seed gives the same tensors. Raises
    EngineError for a datatype that is no number.
    """
    import numpy as np

    found = []
    for tensor in inputs:
        draw = np.random.default_rng([seed, zlib.crc32(tensor.name.encode())])
        name = NUMPY_NAMES.get(tensor.datatype)
        if name is None:
            raise EngineError(f"no sample can be drawn for {tensor.name!r}, which is {tensor.datatype}")
        floats = name.startswith("float")
        values: Any = draw.normal(size=tensor.shape) if floats else draw.integers(0, 2, size=tensor.shape)
        found.append(to_tensor(tensor.name, values.astype(name)))
    return tuple(found)

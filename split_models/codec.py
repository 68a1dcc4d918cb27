"""Wire forms of an activation: raw (as computed), fp16, and int8 (UINT8, scale and zero point per channel).

fp16 and int8 live in the graphs: heads end in them, tails begin by undoing them. Per channel, because the ranges of one
layer's channels differ by orders of magnitude. `+zstd` after a name: the same head and tail, with compressed bodies.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite, prod
from typing import TYPE_CHECKING

from attrs import frozen

from engines.arrays import to_array, to_tensor
from protocol.errors import EngineError, Unsupported
from protocol.tensors import DATATYPE_BYTES, Tensor

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

RAW = "raw"
FP16 = "fp16"
INT8 = "int8"
CODECS = (RAW, FP16, INT8)
"""In the graph."""

FP16_MAX = 65504.0
"""Beyond it a value is cut off, so that it never becomes infinite on the wire."""


@frozen
class Affine:
    """value = (code - zero) * scale, code in 0..255; one pair per channel along `axis`, or a single pair for all."""

    scales: tuple[float, ...]
    zeros: tuple[int, ...]
    axis: int = 1

    def along(self, rank: int) -> tuple[int, ...]:
        """The shape in which the pairs spread over a tensor of that rank."""
        if len(self.scales) == 1:
            return (1,) * rank
        return tuple(len(self.scales) if place == self.axis % rank else 1 for place in range(rank))


def check_codec(codec: str) -> str:
    """The codec's name, or Unsupported when this build has no such codec."""
    if codec not in CODECS:
        raise Unsupported(f"codec {codec!r} is not known", next_step=f"use one of {', '.join(CODECS)}", field="codec")
    return codec


@frozen
class Coarseness:
    """How an int8 form spends its codes. clip: share of values cut off at each end of a range. levels: steps that the
    widest channel gets. evenness: 0 gives every channel as many steps, 1 gives all channels steps of one size; entropy
    coding makes fewer bytes of the latter, and of fewer levels.
    """

    clip: float = 0.0
    levels: int = 255
    evenness: float = 0.0


FINEST = Coarseness()


def affine_for(lows: Sequence[float], highs: Sequence[float], axis: int = 1, coarseness: Coarseness = FINEST) -> Affine:
    """Pairs that cover [low, high] of each channel and represent 0 exactly (padding and ReLU depend on it)."""
    widest = max((max(high, 0.0) - min(low, 0.0) for low, high in zip(lows, highs, strict=True)), default=0.0)
    pairs = [_pair(low, high, widest, coarseness) for low, high in zip(lows, highs, strict=True)]
    return Affine(scales=tuple(scale for scale, _ in pairs), zeros=tuple(zero for _, zero in pairs), axis=axis)


def _pair(low: float, high: float, widest: float, coarseness: Coarseness) -> tuple[float, int]:
    if not (isfinite(low) and isfinite(high)):
        raise EngineError("calibration met a value that is not finite", next_step="check the model on its own")
    low, high = min(low, 0.0), max(high, 0.0)
    if high - low <= 255e-12:
        return 1.0, 0
    even = coarseness.evenness
    scale = (high - low) ** (1.0 - even) * widest**even / coarseness.levels
    return scale, max(0, min(255, round(-low / scale)))


def wire_bytes(codec: str, crossing: Sequence[tuple[str, str, tuple[int, ...]]]) -> int:
    """Bytes that one request uploads: data only; the envelope's few hundred bytes are the link's business."""
    check_codec(codec)
    return sum(prod(shape) * _element_bytes(codec, datatype) for _, datatype, shape in crossing)


def _element_bytes(codec: str, datatype: str) -> int:
    """fp16 and int8 are for FP32; whatever else crosses goes as it is."""
    if datatype != "FP32" or codec == RAW:
        return DATATYPE_BYTES[datatype]
    return 2 if codec == FP16 else 1


def halve(values: NDArray[np.float32]) -> NDArray[np.float16]:
    """What the head's last operators do with fp16: cut off what is out of range, then round to nearest."""
    import numpy as np

    return np.clip(values, -FP16_MAX, FP16_MAX).astype(np.float16)


def quantise(values: NDArray[np.float32], affine: Affine) -> NDArray[np.uint8]:
    """What the head's last operators do: round half to even, then saturate."""
    import numpy as np

    scales, zeros = _along_channels(affine, values.ndim)
    codes: NDArray[np.uint8] = np.clip(np.rint(values / scales + zeros), 0, 255).astype(np.uint8)
    return codes


def dequantise(tensor: Tensor, affine: Affine) -> Tensor:
    """A UINT8 tensor as FP32 of the same shape."""
    scales, zeros = _along_channels(affine, len(tensor.shape))
    return to_tensor(tensor.name, (to_array(tensor) - zeros) * scales)


def _along_channels(affine: Affine, rank: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    import numpy as np

    shape = affine.along(rank)
    return np.array(affine.scales, "f4").reshape(shape), np.array(affine.zeros, "f4").reshape(shape)

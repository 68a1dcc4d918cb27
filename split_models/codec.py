"""Wire forms of an activation: raw (as computed) and int8 (UINT8 with one scale and zero point, inside the graph)."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite, prod
from typing import TYPE_CHECKING

from attrs import frozen

from protocol.errors import EngineError, Unsupported
from protocol.tensors import DATATYPE_BYTES, Tensor

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

RAW = "raw"
INT8 = "int8"
CODECS = (RAW, INT8)


@frozen
class Affine:
    """value = (code - zero) * scale with code in 0..255; the form of ONNX QuantizeLinear with UINT8."""

    scale: float
    zero: int


def check_codec(codec: str) -> str:
    """The codec's name, or Unsupported when this build has no such codec."""
    if codec not in CODECS:
        raise Unsupported(f"codec {codec!r} is not known", next_step=f"use one of {', '.join(CODECS)}", field="codec")
    return codec


def affine_for(low: float, high: float) -> Affine:
    """Scale and zero point that cover [low, high] and represent 0 exactly (padding and ReLU depend on it)."""
    if not (isfinite(low) and isfinite(high)):
        raise EngineError("calibration met a value that is not finite", next_step="check the model on its own")
    low, high = min(low, 0.0), max(high, 0.0)
    scale = (high - low) / 255.0
    if scale <= 0.0:
        return Affine(scale=1.0, zero=0)
    return Affine(scale=scale, zero=max(0, min(255, round(-low / scale))))


def wire_bytes(codec: str, crossing: Sequence[tuple[str, str, tuple[int, ...]]]) -> int:
    """Bytes that one request uploads: data only; the envelope's few hundred bytes are the link's business."""
    check_codec(codec)
    return sum(prod(shape) * (DATATYPE_BYTES[datatype] if codec == RAW else 1) for _, datatype, shape in crossing)


def quantise(values: NDArray[np.float32], affine: Affine) -> NDArray[np.uint8]:
    """What QuantizeLinear does: round half to even, then saturate."""
    import numpy as np

    codes = np.rint(values / np.float32(affine.scale)) + affine.zero
    return np.clip(codes, 0, 255).astype(np.uint8)


def dequantise(tensor: Tensor, affine: Affine) -> Tensor:
    """A UINT8 tensor as FP32 of the same shape."""
    import numpy as np

    codes = np.frombuffer(tensor.data, dtype=np.uint8).astype(np.int32)
    values = ((codes - affine.zero) * np.float32(affine.scale)).astype("<f4")
    return Tensor(tensor.name, "FP32", tensor.shape, values.tobytes())

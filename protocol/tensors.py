"""Tensors as they cross a wire: bytes with a datatype and a shape, no numpy.

Datatypes are those of the Open Inference Protocol v2; data is little-endian and row-major.
"""

from __future__ import annotations

from math import prod

from attrs import field, frozen

from protocol.errors import BadRequest

DATATYPE_BYTES: dict[str, int] = {
    "BOOL": 1, "UINT8": 1, "UINT16": 2, "UINT32": 4, "UINT64": 8,
    "INT8": 1, "INT16": 2, "INT32": 4, "INT64": 8, "FP16": 2, "FP32": 4, "FP64": 8,
}  # fmt: skip
"""Size of one element; BYTES is absent because its elements carry their own length."""

# A dimension beyond this is an attack or a bug, and its product would overflow what the runtimes accept.
MAX_RANK = 16


@frozen
class Tensor:
    """A named array. `data` holds prod(shape) elements, little-endian, row-major."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: bytes | memoryview = field(repr=False)

    @property
    def size_bytes(self) -> int:
        """Length of `data` in bytes."""
        return self.data.nbytes if isinstance(self.data, memoryview) else len(self.data)


@frozen
class TensorSpec:
    """What a model takes or gives; None in `shape` is a free dimension."""

    name: str
    datatype: str
    shape: tuple[int | None, ...]


def check_tensor(tensor: Tensor) -> None:
    """Raise BadRequest unless datatype, shape and length of data agree."""
    if tensor.datatype == "BYTES":
        return
    size = DATATYPE_BYTES.get(tensor.datatype)
    if size is None:
        raise BadRequest(f"unknown datatype {tensor.datatype!r}", field=f"{tensor.name}.datatype")
    if len(tensor.shape) > MAX_RANK or any(d < 0 for d in tensor.shape):
        raise BadRequest(f"shape {list(tensor.shape)} is not valid", field=f"{tensor.name}.shape")
    expected = prod(tensor.shape) * size
    if tensor.size_bytes != expected:
        raise BadRequest(
            f"{tensor.datatype}{list(tensor.shape)} needs {expected} bytes, got {tensor.size_bytes}",
            field=f"{tensor.name}.data",
        )


def check_against(tensor: Tensor, spec: TensorSpec) -> None:
    """Raise BadRequest unless `tensor` is well-formed and fits `spec`, free dimensions apart."""
    check_tensor(tensor)
    if tensor.datatype != spec.datatype:
        raise BadRequest(
            f"datatype is {tensor.datatype}, the model takes {spec.datatype}", field=f"{spec.name}.datatype"
        )
    fits = len(tensor.shape) == len(spec.shape) and all(
        want is None or want == got for got, want in zip(tensor.shape, spec.shape, strict=True)
    )
    if not fits:
        want = [-1 if d is None else d for d in spec.shape]
        raise BadRequest(f"shape is {list(tensor.shape)}, the model takes {want}", field=f"{spec.name}.shape")

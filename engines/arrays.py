"""Tensor <-> numpy array without copying where the memory allows it; the only numpy user of this room's tensor side."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from protocol.errors import BadRequest, EngineError
from protocol.oip_data import elements_of, pack_bytes
from protocol.tensors import Tensor, check_tensor

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

NUMPY_NAMES: Mapping[str, str] = {
    "BOOL": "bool", "UINT8": "uint8", "UINT16": "uint16", "UINT32": "uint32", "UINT64": "uint64",
    "INT8": "int8", "INT16": "int16", "INT32": "int32", "INT64": "int64",
    "FP16": "float16", "FP32": "float32", "FP64": "float64",
}  # fmt: skip
DATATYPES: Mapping[str, str] = {numpy_name: datatype for datatype, numpy_name in NUMPY_NAMES.items()}


def to_array(tensor: Tensor) -> NDArray[Any]:
    """A read-only view of the tensor's bytes in its shape; BYTES become an object array of text.

    Raises BadRequest when datatype, shape and data do not agree.
    """
    import numpy as np

    check_tensor(tensor)
    if tensor.datatype == "BYTES":
        # The runtimes take text, not bytes: they would store the Python form of a bytes object.
        try:
            elements = [element.decode("utf-8") for element in elements_of(tensor)]
        except UnicodeDecodeError as err:
            raise BadRequest("BYTES elements for a model must be UTF-8", field=f"{tensor.name}.data") from err
        array = np.empty(len(elements), dtype=object)
        array[:] = elements
        return array.reshape(tensor.shape)
    if tensor.datatype == "BOOL" and np.frombuffer(tensor.data, np.uint8).max(initial=0) > 1:
        raise BadRequest("BOOL elements are 0 or 1", field=f"{tensor.name}.data")
    flat = np.frombuffer(tensor.data, dtype=np.dtype(NUMPY_NAMES[tensor.datatype]).newbyteorder("<"))
    return flat.reshape(tensor.shape)


def to_tensor(name: str, array: NDArray[Any]) -> Tensor:
    """The array's own memory as a Tensor; a copy only where it is not contiguous or not little-endian.

    Raises EngineError for an element type that Open Inference Protocol v2 cannot carry.
    """
    import numpy as np

    if array.dtype.kind in "OSU":
        elements = [e if isinstance(e, bytes) else str(e).encode() for e in array.reshape(-1).tolist()]
        return Tensor(name, "BYTES", tuple(array.shape), pack_bytes(elements))
    datatype = datatype_of(array.dtype, name)
    whole = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
    return Tensor(name, datatype, tuple(array.shape), whole.reshape(-1).view(np.uint8).data)


def datatype_of(dtype: np.dtype[Any] | type, name: str) -> str:
    """Protocol name of a numpy element type. Raises EngineError for one that has none."""
    import numpy as np

    found = DATATYPES.get(np.dtype(dtype).name)
    if found is None:
        raise EngineError(f"tensor {name!r} has elements of type {np.dtype(dtype).name}, which no request can carry")
    return found

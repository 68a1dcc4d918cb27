"""Open Inference Protocol v2 over HTTP: JSON, and the binary tensor data extension.

A body is a JSON header, followed by the raw tensors in the order of the header when `inference-header-content-length`
gives the header's length. Specification: kserve/open-inference-protocol, "HTTP/REST"; the extension is Triton's
"Binary Tensor Data Extension", with its raw shortcut (header length 0, one input, the whole body is its data).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from attrs import field, frozen

from protocol.decode import load_json
from protocol.errors import BadRequest, ProtocolError, TooLarge, Unsupported
from protocol.oip_data import elements_of, from_json, pack_bytes, to_json
from protocol.oip_fields import (
    MAX_BODY_BYTES,
    MAX_HEADER_BYTES,
    MAX_TENSORS,
    as_list,
    as_object,
    as_shape,
    as_text,
    dump,
    inflate,
)
from protocol.oip_metadata import (
    BINARY_EXTENSION,
    ZSTD_EXTENSION,
    ModelMetadata,
    decode_metadata,
    encode_metadata,
    error_body,
    error_text,
    server_extensions,
    server_metadata,
)
from protocol.tensors import DATATYPE_BYTES, Tensor, TensorSpec, check_tensor

__all__ = [
    "BINARY_EXTENSION", "HEADER_LENGTH", "InferRequest", "InferResponse", "MAX_BODY_BYTES", "MAX_TENSORS",
    "ModelMetadata", "ZSTD_EXTENSION", "bytes_elements", "bytes_tensor", "decode_metadata", "decode_request",
    "decode_response", "encode_metadata", "encode_request", "encode_response", "error_body", "error_text", "inflate",
    "server_extensions", "server_metadata",
]  # fmt: skip

HEADER_LENGTH = "inference-header-content-length"


@frozen
class InferRequest:
    """One request. outputs None: all of them. binary: True for all outputs, or the names wanted in binary."""

    model: str
    inputs: tuple[Tensor, ...]
    id: str = ""
    outputs: tuple[str, ...] | None = None
    binary: frozenset[str] | bool = False
    parameters: Mapping[str, Any] = field(factory=dict)


@frozen
class InferResponse:
    """One answer. `parameters` carries what a server wants to tell beside the tensors (digest, seconds)."""

    model_name: str
    outputs: tuple[Tensor, ...]
    model_version: str = ""
    id: str = ""
    parameters: Mapping[str, Any] = field(factory=dict)


def encode_request(request: InferRequest) -> tuple[dict[str, str], bytes]:
    """Headers and body; every input travels in binary."""
    header: dict[str, Any] = {"inputs": [], "id": request.id}
    parts = _binary_entries(request.inputs, header["inputs"])
    parameters = dict(request.parameters)
    if request.outputs is None:
        if request.binary:
            parameters["binary_data_output"] = True
    else:
        header["outputs"] = [
            {"name": name, "parameters": {"binary_data": _wants(request.binary, name)}} for name in request.outputs
        ]
    if parameters:
        header["parameters"] = parameters
    return _join(header, parts)


def decode_request(
    model: str,
    headers: Mapping[str, str],
    body: bytes,
    *,
    specs: Sequence[TensorSpec] = (),
    max_bytes: int = MAX_BODY_BYTES,
) -> InferRequest:
    """Take a request apart. Header names are lower case; Content-Type is not looked at (tritonclient sends none).

    specs: the model's inputs, needed for the raw shortcut only. Raises ProtocolError or BadRequest naming the field,
    TooLarge when the body inflates over `max_bytes`, Unsupported for shared memory.
    """
    body = inflate(headers, body, max_bytes)
    length = _header_length(headers, len(body))
    if length == 0:
        return InferRequest(model, (_raw_input(specs, body),), binary=True)
    header = _header(body, length, "request")
    inputs = _tensors(header.get("inputs"), "inputs", body, length)
    if not inputs:
        raise BadRequest("a request needs at least one input", field="inputs")
    parameters = as_object(header.get("parameters"), "parameters")
    names, binary = _wanted(header.get("outputs"), parameters)
    return InferRequest(
        model=model,
        inputs=inputs,
        id=as_text(header.get("id", ""), "id"),
        outputs=names,
        binary=binary,
        parameters={key: value for key, value in parameters.items() if key != "binary_data_output"},
    )


def encode_response(response: InferResponse, binary: frozenset[str] | bool) -> tuple[dict[str, str], bytes]:
    """Headers and body; `binary` names the outputs that travel raw (True: all), the others are JSON numbers.

    Raises BadRequest for an FP16 output that is not asked for in binary, EngineError for NaN or Infinity in JSON.
    """
    header: dict[str, Any] = {"model_name": response.model_name, "outputs": []}
    if response.model_version:
        header["model_version"] = response.model_version
    if response.id:
        header["id"] = response.id
    if response.parameters:
        header["parameters"] = dict(response.parameters)
    parts: list[bytes | memoryview] = []
    for tensor in response.outputs:
        if _wants(binary, tensor.name):
            parts += _binary_entries((tensor,), header["outputs"])
        else:
            header["outputs"].append({**_entry(tensor), "data": to_json(tensor)})
    return _join(header, parts)


def decode_response(headers: Mapping[str, str], body: bytes, *, max_bytes: int = MAX_BODY_BYTES) -> InferResponse:
    """Take an answer apart. Raises ProtocolError for everything that is not one."""
    try:
        body = inflate(headers, body, max_bytes)
        length = _header_length(headers, len(body))
        header = _header(body, length, "response")
        outputs = _tensors(header.get("outputs"), "outputs", body, length)
    except (BadRequest, Unsupported, TooLarge) as err:
        raise ProtocolError(f"the server's answer is not valid: {err.message}", field=err.field) from err
    return InferResponse(
        model_name=as_text(header.get("model_name", ""), "model_name"),
        outputs=outputs,
        # KServe writes null where there is nothing to say.
        model_version=as_text(header.get("model_version") or "", "model_version"),
        id=as_text(header.get("id") or "", "id"),
        parameters=as_object(header.get("parameters"), "parameters"),
    )


def bytes_tensor(name: str, elements: Sequence[bytes], shape: tuple[int, ...] | None = None) -> Tensor:
    """A BYTES tensor: each element is a 4-byte little-endian length and its bytes."""
    return Tensor(name, "BYTES", (len(elements),) if shape is None else shape, pack_bytes(elements))


def bytes_elements(tensor: Tensor) -> list[bytes]:
    """The elements of a BYTES tensor. Raises BadRequest when the lengths do not add up."""
    return elements_of(tensor)


def _wants(binary: frozenset[str] | bool, name: str) -> bool:
    return binary if isinstance(binary, bool) else name in binary


def _entry(tensor: Tensor) -> dict[str, Any]:
    return {"name": tensor.name, "shape": list(tensor.shape), "datatype": tensor.datatype}


def _binary_entries(tensors: Sequence[Tensor], entries: list[dict[str, Any]]) -> list[bytes | memoryview]:
    for tensor in tensors:
        entries.append({**_entry(tensor), "parameters": {"binary_data_size": tensor.size_bytes}})
    return [tensor.data for tensor in tensors]


def _join(header: dict[str, Any], parts: list[bytes | memoryview]) -> tuple[dict[str, str], bytes]:
    text = dump(header)
    if not parts:
        return {"content-type": "application/json"}, text
    headers = {"content-type": "application/octet-stream", HEADER_LENGTH: str(len(text))}
    return headers, b"".join((text, *parts))


def _header_length(headers: Mapping[str, str], size_bytes: int) -> int | None:
    text = headers.get(HEADER_LENGTH)
    if text is None:
        return None
    text = text.strip()
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise ProtocolError(f"{HEADER_LENGTH} {text[:32]!r} is not a length", field=HEADER_LENGTH)
    if int(text) > size_bytes:
        raise ProtocolError(f"{HEADER_LENGTH} is {text}, the body has {size_bytes} bytes", field=HEADER_LENGTH)
    return int(text)


def _header(body: bytes, length: int | None, what: str) -> dict[str, Any]:
    if length is not None and length > MAX_HEADER_BYTES:
        raise TooLarge(f"the JSON part of the {what} has {length} bytes, at most {MAX_HEADER_BYTES} are taken")
    text = body if length is None else body[:length]
    return as_object(load_json(text, what=f"inference {what}", max_bytes=len(text), bulk=True), "")


def _raw_input(specs: Sequence[TensorSpec], body: bytes) -> Tensor:
    if len(specs) != 1:
        raise BadRequest("a raw body needs a model with exactly one input", field=HEADER_LENGTH)
    spec = specs[0]
    if spec.datatype == "BYTES":
        return bytes_tensor(spec.name, [body])
    known = prod(d for d in spec.shape if d is not None) * DATATYPE_BYTES.get(spec.datatype, 1)
    free = sum(d is None for d in spec.shape)
    count, left = divmod(len(body), known) if known else (0, 1)
    if left or free > 1 or (free == 0 and count != 1):
        want = [-1 if d is None else d for d in spec.shape]
        raise BadRequest(f"{len(body)} raw bytes do not fill {spec.datatype}{want}", field=spec.name)
    return Tensor(spec.name, spec.datatype, tuple(count if d is None else d for d in spec.shape), memoryview(body))


def _tensors(entries: Any, what: str, body: bytes, start: int | None) -> tuple[Tensor, ...]:
    listed = as_list(entries, what)
    found: list[Tensor] = []
    at = len(body) if start is None else start
    for number, entry in enumerate(listed):
        path = f"{what}[{number}]"
        tensor, at = _tensor(as_object(entry, path), path, body, at)
        found.append(tensor)
    if start is not None and at != len(body):
        raise ProtocolError(f"{len(body) - at} bytes after the last tensor", field=what)
    if len({tensor.name for tensor in found}) != len(found):
        raise BadRequest(f"two {what} have the same name", field=what)
    return tuple(found)


def _tensor(entry: Mapping[str, Any], path: str, body: bytes, at: int) -> tuple[Tensor, int]:
    name = as_text(entry.get("name"), f"{path}.name")
    datatype = as_text(entry.get("datatype"), f"{path}.datatype")
    shape = as_shape(entry.get("shape"), f"{path}.shape")
    parameters = as_object(entry.get("parameters"), f"{path}.parameters")
    if any(key.startswith("shared_memory") for key in parameters):
        raise Unsupported("shared memory is not supported", next_step="send the data", field=f"{path}.parameters")
    size = parameters.get("binary_data_size")
    if size is None:
        if "data" not in entry:
            raise BadRequest(f"{name} has no data", field=f"{path}.data")
        return from_json(name, datatype, shape, entry["data"], f"{path}.data"), at
    if not isinstance(size, int) or isinstance(size, bool) or size < 0 or "data" in entry:
        raise BadRequest("binary_data_size is a length, and excludes data", field=f"{path}.parameters.binary_data_size")
    if size > len(body) - at:
        raise BadRequest(
            f"{name} needs {size} bytes, the body has {len(body) - at} left",
            field=f"{path}.parameters.binary_data_size",
        )
    tensor = Tensor(name, datatype, shape, memoryview(body)[at : at + size])
    check_tensor(tensor)
    if datatype == "BYTES":
        elements_of(tensor)
    return tensor, at + size


def _wanted(entries: Any, parameters: Mapping[str, Any]) -> tuple[tuple[str, ...] | None, frozenset[str] | bool]:
    everything = parameters.get("binary_data_output", False) is True
    listed = as_list(entries, "outputs")
    if not listed:
        return None, everything
    names: list[str] = []
    binary: set[str] = set()
    for number, raw in enumerate(listed):
        entry = as_object(raw, f"outputs[{number}]")
        name = as_text(entry.get("name"), f"outputs[{number}].name")
        own = as_object(entry.get("parameters"), f"outputs[{number}].parameters")
        if "classification" in own or any(key.startswith("shared_memory") for key in own):
            raise Unsupported(
                "classification and shared memory are not supported", field=f"outputs[{number}].parameters"
            )
        names.append(name)
        if own.get("binary_data", everything) is True:
            binary.add(name)
    return tuple(names), frozenset(binary)

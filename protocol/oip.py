"""Open Inference Protocol v2 over HTTP: JSON, and the binary tensor data extension.

A body is a JSON header, followed by the raw tensors in the order of the header when `inference-header-content-length`
gives the header's length. Specification: kserve/open-inference-protocol, "HTTP/REST"; the extension is Triton's
"Binary Tensor Data Extension", with its raw shortcut (header length 0, one input, the whole body is its data).
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from attrs import field, frozen

from protocol.decode import load_json
from protocol.errors import BadRequest, EngineError, MidstreamError, ProtocolError, TooLarge, Unsupported
from protocol.oip_data import elements_of, from_json, pack_bytes, to_json
from protocol.tensors import DATATYPE_BYTES, MAX_RANK, Tensor, TensorSpec, check_tensor

HEADER_LENGTH = "inference-header-content-length"
BINARY_EXTENSION = "binary_tensor_data"
MAX_BODY_BYTES = 64 << 20
"""Triton's default for one request; more than any tensor of a model that a device can run."""
MAX_HEADER_BYTES = 1 << 20
"""The JSON part of a binary body: names and shapes only."""
MAX_TENSORS = 256
MAX_NAME_CHARS = 512


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


@frozen
class ModelMetadata:
    """GET /v2/models/{name}."""

    name: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    platform: str = ""
    versions: tuple[str, ...] = ()


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
    parameters = _object(header.get("parameters"), "parameters")
    names, binary = _wanted(header.get("outputs"), parameters)
    return InferRequest(
        model=model,
        inputs=inputs,
        id=_text(header.get("id", ""), "id"),
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
        model_name=_text(header.get("model_name", ""), "model_name"),
        outputs=outputs,
        model_version=_text(header.get("model_version", ""), "model_version"),
        id=_text(header.get("id", ""), "id"),
        parameters=_object(header.get("parameters"), "parameters"),
    )


def server_metadata(version: str, extensions: Sequence[str] = (BINARY_EXTENSION,), name: str = "midstream") -> bytes:
    """Body of GET /v2."""
    return _dump({"name": name, "version": version, "extensions": list(extensions)})


def server_extensions(body: bytes) -> frozenset[str]:
    """What a server says it can do beyond the base protocol; empty when it does not say."""
    found = load_json(body, what="server metadata")
    listed = found.get("extensions") if isinstance(found, dict) else None
    return frozenset(item for item in listed if isinstance(item, str)) if isinstance(listed, list) else frozenset()


def encode_metadata(metadata: ModelMetadata) -> bytes:
    """Body of GET /v2/models/{name}; a free dimension is -1."""
    document: dict[str, Any] = {"name": metadata.name}
    if metadata.versions:
        document["versions"] = list(metadata.versions)
    document["platform"] = metadata.platform
    for key, specs in (("inputs", metadata.inputs), ("outputs", metadata.outputs)):
        document[key] = [
            {"name": s.name, "datatype": s.datatype, "shape": [-1 if d is None else d for d in s.shape]} for s in specs
        ]
    return _dump(document)


def decode_metadata(body: bytes) -> ModelMetadata:
    """Read a server's model metadata. Raises ProtocolError."""
    found = _object(load_json(body, what="model metadata", max_bytes=MAX_HEADER_BYTES), "metadata")
    versions = found.get("versions") or []
    return ModelMetadata(
        name=_text(found.get("name", ""), "name"),
        inputs=_specs(found.get("inputs"), "inputs"),
        outputs=_specs(found.get("outputs"), "outputs"),
        platform=_text(found.get("platform", ""), "platform"),
        versions=tuple(str(v) for v in versions[:64]) if isinstance(versions, list) else (),
    )


def error_body(err: MidstreamError) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of a refusal; `field` is put in front when the message does not name it."""
    text = str(err)
    if err.field and err.field not in text:
        text = f"{err.field}: {text}"
    headers = {"content-type": "application/json"}
    retry_after_s = getattr(err, "retry_after_s", None)
    if retry_after_s is not None:
        headers["retry-after"] = str(max(1, round(retry_after_s)))
    return err.http_status, headers, _dump({"error": text})


def error_text(body: bytes) -> str:
    """What a server's error body says, at most 500 characters; empty when it says nothing readable."""
    try:
        found = load_json(body, what="error")
    except MidstreamError:
        return body[:500].decode("utf-8", "replace").strip()
    text = found.get("error") if isinstance(found, dict) else None
    return text[:500] if isinstance(text, str) else ""


def inflate(headers: Mapping[str, str], body: bytes, max_bytes: int) -> bytes:
    """Undo a gzip or deflate Content-Encoding, never making more than `max_bytes`.

    Some HTTP servers inflate on their own and leave the header: a body that begins with JSON is taken as it is.
    """
    encoding = headers.get("content-encoding", "identity").strip().lower()
    if len(body) > max_bytes:
        raise TooLarge(f"the body has {len(body)} bytes, at most {max_bytes} are taken")
    if encoding in ("", "identity") or body[:1] == b"{":
        return body
    if encoding not in ("gzip", "x-gzip", "deflate"):
        raise Unsupported(f"content-encoding {encoding[:32]!r} is not supported", next_step="use gzip or deflate")
    inflater = zlib.decompressobj(wbits=47)  # gzip or zlib by their own headers
    try:
        whole = inflater.decompress(body, max_bytes + 1)
    except zlib.error as err:
        raise ProtocolError(f"the body is not valid {encoding}: {err}", field="content-encoding") from err
    if len(whole) > max_bytes:
        raise TooLarge(f"the body inflates over {max_bytes} bytes")
    if not inflater.eof or inflater.unused_data:
        raise ProtocolError(f"the {encoding} body is cut short or has bytes after its end", field="content-encoding")
    return whole


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
    text = _dump(header)
    if not parts:
        return {"content-type": "application/json"}, text
    headers = {"content-type": "application/octet-stream", HEADER_LENGTH: str(len(text))}
    return headers, b"".join((text, *parts))


def _dump(document: Mapping[str, Any]) -> bytes:
    try:
        text = json.dumps(document, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    except ValueError as err:
        raise EngineError(
            "the answer holds NaN or Infinity, which JSON cannot say", next_step="ask for binary outputs"
        ) from err
    # A name with half a surrogate pair, which JSON can say and UTF-8 cannot, keeps its escape.
    return text.encode("utf-8", "backslashreplace")


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
    return _object(load_json(text, what=f"inference {what}", max_bytes=len(text), bulk=True), "")


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
    listed = _list(entries, what)
    found: list[Tensor] = []
    at = len(body) if start is None else start
    for number, entry in enumerate(listed):
        path = f"{what}[{number}]"
        tensor, at = _tensor(_object(entry, path), path, body, at)
        found.append(tensor)
    if start is not None and at != len(body):
        raise ProtocolError(f"{len(body) - at} bytes after the last tensor", field=what)
    if len({tensor.name for tensor in found}) != len(found):
        raise BadRequest(f"two {what} have the same name", field=what)
    return tuple(found)


def _tensor(entry: Mapping[str, Any], path: str, body: bytes, at: int) -> tuple[Tensor, int]:
    name = _text(entry.get("name"), f"{path}.name")
    datatype = _text(entry.get("datatype"), f"{path}.datatype")
    shape = _shape(entry.get("shape"), f"{path}.shape")
    parameters = _object(entry.get("parameters"), f"{path}.parameters")
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
    listed = _list(entries, "outputs")
    if not listed:
        return None, everything
    names: list[str] = []
    binary: set[str] = set()
    for number, raw in enumerate(listed):
        entry = _object(raw, f"outputs[{number}]")
        name = _text(entry.get("name"), f"outputs[{number}].name")
        own = _object(entry.get("parameters"), f"outputs[{number}].parameters")
        if "classification" in own or any(key.startswith("shared_memory") for key in own):
            raise Unsupported(
                "classification and shared memory are not supported", field=f"outputs[{number}].parameters"
            )
        names.append(name)
        if own.get("binary_data", everything) is True:
            binary.add(name)
    return tuple(names), frozenset(binary)


def _specs(entries: Any, what: str) -> tuple[TensorSpec, ...]:
    found: list[TensorSpec] = []
    for number, raw in enumerate(_list(entries, what)):
        entry = _object(raw, f"{what}[{number}]")
        name = _text(entry.get("name"), f"{what}[{number}].name")
        shape = _shape(entry.get("shape"), f"{what}[{number}].shape", least=-1)
        datatype = _text(entry.get("datatype"), f"{what}[{number}].datatype")
        found.append(TensorSpec(name, datatype, tuple(None if d < 0 else d for d in shape)))
    return tuple(found)


def _list(value: Any, path: str) -> list[Any]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise ProtocolError(f"{path} must be a list", field=path)
    if len(value) > MAX_TENSORS:
        raise TooLarge(f"{path} has {len(value)} entries, at most {MAX_TENSORS} are taken", field=path)
    return value


def _object(value: Any, path: str) -> dict[str, Any]:
    if value is None and path:
        return {}
    if not isinstance(value, dict):
        raise ProtocolError(f"{path or 'the body'} must be an object", field=path or None)
    return value


def _text(value: Any, path: str) -> str:
    if not isinstance(value, str) or len(value) > MAX_NAME_CHARS:
        raise ProtocolError(f"{path} must be a string of at most {MAX_NAME_CHARS} characters", field=path)
    return value


def _shape(value: Any, path: str, least: int = 0) -> tuple[int, ...]:
    fits = isinstance(value, list) and len(value) <= MAX_RANK
    if not fits or any(type(d) is not int or not least <= d < 1 << 31 for d in value):
        raise ProtocolError(f"{path} must be a list of at most {MAX_RANK} sizes", field=path)
    return tuple(value)

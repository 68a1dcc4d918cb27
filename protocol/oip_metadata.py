"""Metadata and errors of the Open Inference Protocol: what a server, a model and a refusal say of themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attrs import frozen

from protocol import zstd
from protocol.decode import load_json
from protocol.errors import MidstreamError
from protocol.oip_fields import MAX_HEADER_BYTES, as_list, as_object, as_shape, as_text, dump
from protocol.tensors import TensorSpec

BINARY_EXTENSION = "binary_tensor_data"
ZSTD_EXTENSION = zstd.NAME
"""Ours: request bodies may come, and answers be asked for, with content-encoding zstd."""


@frozen
class ModelMetadata:
    """GET /v2/models/{name}."""

    name: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    platform: str = ""
    versions: tuple[str, ...] = ()


def server_metadata(version: str, extensions: Sequence[str] = (BINARY_EXTENSION,), name: str = "midstream") -> bytes:
    """Body of GET /v2."""
    return dump({"name": name, "version": version, "extensions": list(extensions)})


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
    return dump(document)


def decode_metadata(body: bytes) -> ModelMetadata:
    """Read a server's model metadata. Raises ProtocolError."""
    found = as_object(load_json(body, what="model metadata", max_bytes=MAX_HEADER_BYTES), "metadata")
    versions = found.get("versions") or []
    return ModelMetadata(
        name=as_text(found.get("name", ""), "name"),
        inputs=_specs(found.get("inputs"), "inputs"),
        outputs=_specs(found.get("outputs"), "outputs"),
        platform=as_text(found.get("platform", ""), "platform"),
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
    return err.http_status, headers, dump({"error": text})


def error_text(body: bytes) -> str:
    """What a server's error body says, at most 500 characters; empty when it says nothing readable."""
    try:
        found = load_json(body, what="error")
    except MidstreamError:
        return body[:500].decode("utf-8", "replace").strip()
    text = found.get("error") if isinstance(found, dict) else None
    return text[:500] if isinstance(text, str) else ""


def _specs(entries: Any, what: str) -> tuple[TensorSpec, ...]:
    found: list[TensorSpec] = []
    for number, raw in enumerate(as_list(entries, what)):
        entry = as_object(raw, f"{what}[{number}]")
        name = as_text(entry.get("name"), f"{what}[{number}].name")
        shape = as_shape(entry.get("shape"), f"{what}[{number}].shape", least=-1)
        datatype = as_text(entry.get("datatype"), f"{what}[{number}].datatype")
        found.append(TensorSpec(name, datatype, tuple(None if d < 0 else d for d in shape)))
    return tuple(found)

"""Why an ONNX file cannot be run or cut here, in words, before a library says it in its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from protocol.errors import EngineError
from split_models.onnx_files import onnx_module

_KNOWN_DOMAINS = ("", "ai.onnx", "ai.onnx.ml", "ai.onnx.preview.training", "com.microsoft", "com.microsoft.nchwc")


def check_known(model: Any, name: str) -> None:
    """Raise EngineError for a format, an operator set or an operator that nothing here knows; `name` is the file's."""
    reasons = [*_versions(model), *_strangers(model), *_sparse(model)]
    if reasons:
        raise EngineError(f"{name} {reasons[0]}", next_step=_next_step(reasons[0]))


def _versions(model: Any) -> Sequence[str]:
    onnx = onnx_module()
    newest = onnx.defs.onnx_opset_version()
    found = []
    if model.ir_version > onnx.IR_VERSION:
        found.append(f"has format version {model.ir_version}; versions up to {onnx.IR_VERSION} are known here")
    if not model.opset_import and model.ir_version >= 3:
        found.append("names no operator set, so nobody can tell what its operators mean")
    for opset in model.opset_import:
        if opset.domain in ("", "ai.onnx") and opset.version > newest:
            found.append(f"needs operator set {opset.version}; sets up to {newest} are known here")
    return found


def _strangers(model: Any) -> Sequence[str]:
    """Operators of domains that neither onnxruntime nor a function of the model itself defines."""
    functions = {(function.domain, function.name) for function in model.functions}
    imported = {opset.domain for opset in model.opset_import}
    for node in _all_nodes(model.graph):
        if (node.domain, node.op_type) in functions:
            continue
        if node.domain not in _KNOWN_DOMAINS:
            return [f"uses the operator {node.op_type} of the domain {node.domain!r}, which onnxruntime does not have"]
        if node.domain not in ("", "ai.onnx") and node.domain not in imported:
            return [f"uses {node.op_type} of {node.domain!r} without importing that domain"]
    return []


def _sparse(model: Any) -> Sequence[str]:
    return [f"holds the sparse weight {one.values.name!r}" for one in model.graph.sparse_initializer]


def _all_nodes(graph: Any) -> Sequence[Any]:
    found = []
    for node in graph.node:
        found.append(node)
        for attribute in node.attribute:
            for body in ([attribute.g] if attribute.HasField("g") else []) + list(attribute.graphs):
                found += _all_nodes(body)
    return found


def _next_step(reason: str) -> str:
    if "sparse" in reason:
        return "export the model with dense weights"
    if "domain" in reason:
        return "export the model with standard operators, or with the operator as a function of the model"
    if "names no operator set" in reason:
        return "export the model again with opset_import filled in"
    return "export it for an older operator set, or install newer onnx and onnxruntime"

"""Make a model cuttable: fix input shapes, fold constants, save at onnxruntime's BASIC level.

Cutting comes before optimising: at higher levels the graph holds operators without shape inference. Fixed shapes remove
the chains of Shape and Gather that would otherwise cross every cut.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attrs import field, frozen

from protocol.errors import ConfigError, EngineError
from split_models.graph import Graph
from split_models.onnx_files import graph_of, load_model, onnx_module, to_bytes, with_shapes


@frozen
class Prepared:
    """A prepared model: `data` is the file's bytes, `digest` their sha256, `proto` the same as a ModelProto."""

    data: bytes = field(repr=False)
    digest: str
    graph: Graph = field(repr=False)
    proto: Any = field(repr=False)


def prepare(file: Path, input_shapes: Mapping[str, tuple[int, ...]]) -> Prepared:
    """The prepared form of an ONNX file. Raises EngineError (not a model, shapes do not fit) or ConfigError."""
    model = load_model(file)
    _fix_inputs(model, input_shapes)
    _constants_to_weights(model)
    del model.graph.value_info[:]
    for output in model.graph.output:
        output.type.tensor_type.ClearField("shape")
    model = with_shapes(_at_basic_level(model, file.name))
    _drop_unused_domains(model)
    data = to_bytes(model)
    return Prepared(data=data, digest=hashlib.sha256(data).hexdigest(), graph=graph_of(model), proto=model)


def _fix_inputs(model: Any, input_shapes: Mapping[str, tuple[int, ...]]) -> None:
    inputs = {value.name: value for value in model.graph.input}
    for name, shape in input_shapes.items():
        if name not in inputs:
            raise ConfigError(f"the model has no input {name!r}, it has {sorted(inputs)}", field="input_shapes")
        dims = inputs[name].type.tensor_type.shape.dim
        if len(dims) != len(shape) or any(size <= 0 for size in shape):
            raise ConfigError(f"{list(shape)} does not fit input {name!r} of rank {len(dims)}", field="input_shapes")
        for dim, size in zip(dims, shape, strict=True):
            dim.Clear()
            dim.dim_value = size


def _constants_to_weights(model: Any) -> None:
    """Real models keep weights in Constant nodes; folding and cutting both want them as initialisers."""
    onnx = onnx_module()
    kept = []
    for node in model.graph.node:
        value = next((a for a in node.attribute if a.name == "value" and a.HasField("t")), None)
        if node.op_type == "Constant" and value is not None:
            weight = onnx.TensorProto()
            weight.CopyFrom(value.t)
            weight.name = node.output[0]
            model.graph.initializer.append(weight)
        else:
            kept.append(node)
    del model.graph.node[:]
    model.graph.node.extend(kept)


def _at_basic_level(model: Any, name: str) -> Any:
    try:
        import onnxruntime
    except ImportError as err:
        raise ConfigError("onnxruntime is not installed", next_step="install midstream[coordinator]") from err
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    with tempfile.TemporaryDirectory(prefix="midstream-prepare-") as folder:
        out = Path(folder) / "basic.onnx"
        options.optimized_model_filepath = str(out)
        try:
            onnxruntime.InferenceSession(to_bytes(model), options, providers=["CPUExecutionProvider"])
        except Exception as err:  # onnxruntime's own exception classes have no common public root
            raise EngineError(
                f"onnxruntime cannot prepare {name}: {str(err)[:200]}",
                next_step="check input_shapes and the model file",
            ) from err
        return load_model(out)


def _drop_unused_domains(model: Any) -> None:
    """The saved file imports every operator set onnxruntime knows; other runtimes refuse the unknown ones."""
    used = {node.domain for node in model.graph.node} | {""}
    kept = [opset for opset in model.opset_import if opset.domain in used]
    del model.opset_import[:]
    model.opset_import.extend(kept)

"""onnxruntime while a model is prepared: saved at a level, and asked for shapes. Serving is engines/onnx.py."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from protocol.errors import ConfigError, EngineError
from protocol.extras import install_step
from split_models.onnx_files import load_model, onnx_module, to_bytes

BASIC, DISABLED = "ORT_ENABLE_BASIC", "ORT_DISABLE_ALL"

_ELEMENTS = {
    "tensor(float)": 1, "tensor(uint8)": 2, "tensor(int8)": 3, "tensor(uint16)": 4, "tensor(int16)": 5,
    "tensor(int32)": 6, "tensor(int64)": 7, "tensor(bool)": 9, "tensor(float16)": 10, "tensor(double)": 11,
    "tensor(uint32)": 12, "tensor(uint64)": 13,
}  # fmt: skip
_DTYPES = {
    1: "f4",
    2: "u1",
    3: "i1",
    4: "u2",
    5: "i2",
    6: "i4",
    7: "i8",
    9: "?",
    10: "f2",
    11: "f8",
    12: "u4",
    13: "u8",
}


OLDEST_OPSET = 7
"""Of ONNX's own operators; onnxruntime has kernels from there on."""

_SETTLED = "__settled"


def at_basic_level(model: Any, name: str) -> Any:
    """The model as onnxruntime saves it with constants folded. Raises EngineError, ConfigError without onnxruntime."""
    with tempfile.TemporaryDirectory(prefix="midstream-prepare-") as folder:
        out = Path(folder) / "basic.onnx"
        try:
            _session(to_bytes(model), BASIC, str(out))
        except ConfigError:
            raise
        except Exception as err:  # onnxruntime's own exception classes have no common public root
            raise EngineError(
                f"onnxruntime cannot prepare {name}: {_first_line(err)}", next_step=_advice(model)
            ) from err
        basic = load_model(out)
    _settle_names(basic, model)
    return basic


def _advice(model: Any) -> str:
    version = next((opset.version for opset in model.opset_import if opset.domain in ("", "ai.onnx")), OLDEST_OPSET)
    if version < OLDEST_OPSET:
        return f"it is in operator set {version}: convert it with onnx.version_converter to {OLDEST_OPSET} or later"
    return "check input_shapes and the model file"


def _settle_names(basic: Any, before: Any) -> None:
    """Rename what fusions made (`gemm_input_shape`): the same fusion in a part of the graph counts anew.

    It would meet its own earlier name there, and onnxruntime refuses the part ("Attempt to replace the existing").
    """
    known = {value.name for value in (*before.graph.input, *before.graph.output, *before.graph.initializer)}
    known |= {name for node in before.graph.node for name in node.output} | {""}
    made = {name for node in basic.graph.node for name in node.output} - known
    made |= {tensor.name for tensor in basic.graph.initializer} - known

    def settled(name: str) -> str:
        return name + _SETTLED if name in made else name

    for tensor in basic.graph.initializer:
        tensor.name = settled(tensor.name)
    for value in basic.graph.value_info:
        value.name = settled(value.name)
    _rename_in(basic.graph, settled)


def _rename_in(graph: Any, settled: Callable[[str], str]) -> None:
    for node in graph.node:
        node.input[:] = [settled(name) for name in node.input]
        node.output[:] = [settled(name) for name in node.output]
        for attribute in node.attribute:
            for body in ([attribute.g] if attribute.HasField("g") else []) + list(attribute.graphs):
                for port in (*body.input, *body.output, *body.initializer, *body.value_info):
                    port.name = settled(port.name)
                _rename_in(body, settled)


def loads(model: Any) -> bool:
    """Whether onnxruntime takes the model as it is."""
    try:
        _session(to_bytes(model), DISABLED)
    except Exception:  # noqa: BLE001 - as above; the caller asks only whether
        return False
    return True


def shapes_by_runtime(model: Any, names: Sequence[str]) -> Sequence[Any]:
    """ValueInfoProtos of those of `names` whose shape onnxruntime knows, or that had one shape on three inputs.

    onnx knows no operator of onnxruntime's own, and not what comes out of a Loop. A shape that was only seen is as good
    as the inputs: a part that answers another one at run time is refused there.
    """
    onnx = onnx_module()
    asking = onnx.ModelProto()
    asking.CopyFrom(model)
    there = {value.name for value in asking.graph.output}
    asking.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names if name not in there)
    try:
        session = _session(to_bytes(asking), DISABLED)
        wanted = {value.name: value for value in session.get_outputs() if value.name in names}
        # A tensor of unknown rank also has the shape []; a known scalar cannot be told apart from it.
        known = {name: tuple(value.shape) for name, value in wanted.items() if value.shape and _fixed(value.shape)}
        if len(known) < len(wanted):
            known |= _seen(session, [name for name in wanted if name not in known])
    except Exception:  # noqa: BLE001 - as above; unknown shapes stay unknown
        return []
    make = onnx.helper.make_tensor_value_info
    elements = {name: _ELEMENTS.get(wanted[name].type) for name in known}
    return [make(name, elements[name], shape) for name, shape in known.items() if elements[name]]


def _seen(session: Any, names: Sequence[str]) -> Mapping[str, tuple[int, ...]]:
    """Shapes that were the same on zeros and on two seeded random inputs."""
    import numpy as np

    inputs = [(value.name, value.shape, _ELEMENTS[value.type]) for value in session.get_inputs()]
    draw = np.random.default_rng(20)
    seen: list[list[tuple[int, ...]]] = []
    for spread in (0, 1, 1):
        feed = {}
        for name, shape, element in inputs:
            values = draw.normal(size=shape) if element in (1, 10, 11) else draw.integers(0, 2, size=shape)
            feed[name] = (values * spread).astype(_DTYPES[element])
        seen.append([array.shape for array in session.run(list(names), feed)])
    return {name: first for name, first, second, third in zip(names, *seen, strict=True) if first == second == third}


def _session(data: bytes, level: str, save_to: str | None = None) -> Any:
    try:
        import onnxruntime
    except ImportError as err:
        raise ConfigError("onnxruntime is not installed", next_step=install_step("coordinator")) from err
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    if save_to is not None:
        options.optimized_model_filepath = save_to
    return onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])


def _fixed(shape: Sequence[Any]) -> bool:
    return all(isinstance(size, int) and size > 0 for size in shape)


def _first_line(err: Exception) -> str:
    return str(err).strip().partition("\n")[0][:200]

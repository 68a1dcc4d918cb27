"""Weights in side files: check them, read the small ones, take over the large ones by reference.

Protobuf holds 2 GB at most, so larger models keep their weights beside the file. Nothing here reads a large weight to
look at a graph (onnx/onnx#6352): while onnxruntime folds, large weights stand aside as inputs of the graph.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from engines.digest import CHUNK_BYTES
from protocol.errors import EngineError
from split_models.onnx_files import MAX_MODEL_BYTES, SHAPE_BYTES, onnx_module, tensor_bytes

INLINE_BYTES = 512 << 20
"""Up to this in all, weights are read and kept in the prepared file; beyond, the large ones stay where they are."""


def external_tensors(model: Any) -> Iterator[Any]:
    """Every TensorProto of a model whose data lie in a side file."""
    yield from (tensor for tensor in _tensors_of(model.graph) if _outside(tensor))
    for function in model.functions:
        yield from (tensor for node in function.node for tensor in _in_attributes(node) if _outside(tensor))


def check_side_files(tensors: Sequence[Any], folder: Path) -> None:
    """Raise EngineError unless each side file lies in `folder` and holds what is said to be in it."""
    sizes: dict[str, int] = {}
    for tensor in tensors:
        place, offset = _place(tensor)
        path = PurePosixPath(place)
        if not place or path.is_absolute() or ".." in path.parts or "\\" in place:
            raise EngineError(
                f"weight {tensor.name!r} points outside the model's folder: {place[:80]!r}",
                next_step="save the model again with its weights beside it",
            )
        if place not in sizes:
            file = folder / place
            if not file.is_file() or not file.resolve().is_relative_to(folder.resolve()):
                raise EngineError(
                    f"the side file {place[:80]!r} with the model's weights is missing",
                    next_step="put it beside the model file and add the model again",
                )
            sizes[place] = file.stat().st_size
        if offset + tensor_bytes(tensor) > sizes[place]:
            raise EngineError(
                f"the side file {place[:80]!r} is too short for weight {tensor.name!r}",
                next_step="copy it again; it may have been cut off",
            )


def side_files(model: Any) -> Sequence[str]:
    """Names of a model's side files, sorted."""
    return sorted({_place(tensor)[0] for tensor in external_tensors(model)})


def read_into(model: Any, folder: Path, most_bytes: int = MAX_MODEL_BYTES) -> None:
    """Read all weights that lie aside into the model. Raises EngineError when they are more than `most_bytes`."""
    tensors = list(external_tensors(model))
    check_side_files(tensors, folder)
    size_bytes = sum(map(tensor_bytes, tensors))
    if size_bytes > most_bytes:
        raise EngineError(
            f"this part holds {size_bytes / 1e9:.1f} GB of weights, over the {most_bytes / 1e9:.1f} GB of one file",
            next_step="choose a cut that leaves less on this side, or serve the model whole",
        )
    for tensor in tensors:
        _read(tensor, folder)


def set_aside(model: Any, folder: Path, inline_bytes: int) -> Sequence[Any]:
    """Read what is small, or everything if it is at most `inline_bytes`; turn the rest into inputs of the graph.

    Returns the weights that stand aside, for put_back.
    """
    tensors = list(external_tensors(model))
    check_side_files(tensors, folder)
    everything = sum(map(tensor_bytes, tensors)) <= inline_bytes
    weights = {tensor.name for tensor in model.graph.initializer}
    for tensor in tensors:
        if everything or tensor_bytes(tensor) <= SHAPE_BYTES or tensor.name not in weights:
            _read(tensor, folder)
    large = [tensor for tensor in model.graph.initializer if _outside(tensor)]
    kept = [tensor for tensor in model.graph.initializer if not _outside(tensor)]
    aside = [_copy(tensor) for tensor in large]
    make = onnx_module().helper.make_tensor_value_info
    model.graph.input.extend(make(tensor.name, tensor.data_type, tensor.dims) for tensor in aside)
    if aside:
        del model.graph.initializer[:]
        model.graph.initializer.extend(kept)
    return aside


def put_back(model: Any, aside: Sequence[Any]) -> None:
    """Undo set_aside: the weights are weights again, by reference; those that nothing reads any more are dropped."""
    names = {tensor.name for tensor in aside}
    inputs = [value for value in model.graph.input if value.name not in names]
    del model.graph.input[:]
    model.graph.input.extend(inputs)
    model.graph.initializer.extend(aside)


def digest_of(data: bytes, tensors: Sequence[Any], folder: Path) -> str:
    """sha256 over a model's bytes and then the side files of `tensors`, by name."""
    digest = hashlib.sha256(data)
    for place in sorted({_place(tensor)[0] for tensor in tensors}):
        with (folder / place).open("rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                digest.update(chunk)
    return digest.hexdigest()


def _tensors_of(graph: Any) -> Iterator[Any]:
    yield from graph.initializer
    for node in graph.node:
        yield from _in_attributes(node)


def _in_attributes(node: Any) -> Iterator[Any]:
    for attribute in node.attribute:
        if attribute.HasField("t"):
            yield attribute.t
        yield from attribute.tensors
        for body in ([attribute.g] if attribute.HasField("g") else []) + list(attribute.graphs):
            yield from _tensors_of(body)


def _outside(tensor: Any) -> bool:
    return bool(tensor.data_location == onnx_module().TensorProto.EXTERNAL)


def _place(tensor: Any) -> tuple[str, int]:
    entries = {entry.key: entry.value for entry in tensor.external_data}
    return str(entries.get("location", "")), int(entries.get("offset", "0") or 0)


def _read(tensor: Any, folder: Path) -> None:
    place, offset = _place(tensor)
    with (folder / place).open("rb") as file:
        file.seek(offset)
        tensor.raw_data = file.read(tensor_bytes(tensor))
    tensor.ClearField("external_data")
    tensor.data_location = onnx_module().TensorProto.DEFAULT


def _copy(tensor: Any) -> Any:
    copied = onnx_module().TensorProto()
    copied.CopyFrom(tensor)
    return copied

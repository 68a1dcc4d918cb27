"""What cuts files of one format: a pair of prepare and Partitioner, the same for every format."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from attrs import frozen

from engines.port import TensorRuntime
from protocol.errors import ConfigError
from split_models.codec import Affine
from split_models.cuts import Cut
from split_models.graph import Graph
from split_models.input_shapes import InputPort
from split_models.partition_onnx import Parts

CUTTABLE = ("onnx", "tflite")
"""Formats that have a backend."""


class Prepared(Protocol):
    """A model that can be cut. `digest` names it; `graph` is its neutral form."""

    @property
    def digest(self) -> str: ...

    @property
    def graph(self) -> Graph: ...


class Partitioner(Protocol):
    """Cuts one prepared model again and again."""

    def split(
        self, cut: Cut, codec: str, affine: Mapping[str, Affine] | None = None, answer: Affine | None = None
    ) -> Parts: ...

    def with_outputs(self, names: list[str]) -> bytes: ...


@frozen
class Backend:
    """format: also the suffix of its files. channel_axis: along which an activation's ranges differ.

    inputs: of a file as it came, read without its runtime, which a damaged file might take down.
    whole: the bytes of the whole prepared model. index_bounds: rows of the tables that integer inputs index, by input.
    """

    format: Literal["onnx", "tflite"]
    channel_axis: int
    inputs: Callable[[Path], Sequence[InputPort]]
    prepare: Callable[[Path, Mapping[str, tuple[int, ...]]], Any]
    partitioner: Callable[[Any], Partitioner]
    whole: Callable[[Any], bytes]
    index_bounds: Callable[[Any], Mapping[str, int]]
    runtime: Callable[[], TensorRuntime]


def backend_of(kind: str) -> Backend:
    """The backend of a format; foreign libraries come in only when it works. Raises ConfigError when there is none."""
    if kind == "onnx":
        return _onnx()
    if kind == "tflite":
        return _tflite()
    raise ConfigError(f"{kind} models cannot be cut", next_step="serve the model whole", field="format")


def _onnx() -> Backend:
    from engines.onnx import OnnxRuntime
    from split_models.onnx_files import index_bounds
    from split_models.partition_onnx import Partitioner as OnnxPartitioner
    from split_models.prepare_onnx import inputs_of, prepare, whole_file

    return Backend(
        format="onnx",
        channel_axis=1,
        inputs=inputs_of,
        prepare=prepare,
        partitioner=OnnxPartitioner,
        whole=whole_file,
        index_bounds=lambda prepared: index_bounds(prepared.proto),
        runtime=OnnxRuntime,
    )


def _tflite() -> Backend:
    from engines.tflite import TfliteRuntime
    from split_models.partition_tflite import Partitioner as TflitePartitioner
    from split_models.prepare_tflite import inputs_of, prepare
    from split_models.tflite_graph import index_bounds

    return Backend(
        format="tflite",
        channel_axis=-1,
        inputs=inputs_of,
        prepare=prepare,
        partitioner=TflitePartitioner,
        whole=lambda prepared: prepared.data,
        index_bounds=lambda prepared: index_bounds(prepared.model),
        runtime=TfliteRuntime,
    )

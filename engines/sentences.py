"""Sentence vectors from a transformer encoder: a Hugging Face tokenizer in front of a tensor endpoint, mean pooling."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engines.digest import file_sha256
from engines.port import TensorEndpoint
from protocol.errors import ConfigError, EngineError
from protocol.extras import install_step
from protocol.tensors import Tensor

MAX_TOKENS = 256
"""all-MiniLM-L6-v2 was trained on texts of up to 128 word pieces; from 256 on it reads nothing more."""

MAX_BATCH = 32
DEADLINE_S = 10.0


class SentenceEmbedder:
    """Unit vectors for texts.

    Args:
        endpoint: runs `model`, a BERT-like encoder with input_ids, attention_mask and token_type_ids (INT64,
            [batch, tokens]) and token vectors (FP32, [batch, tokens, dimensions]) as its first output.
        tokenizer: tokenizer.json of the same model. Raises ConfigError when the library or the file is missing.
    """

    def __init__(self, endpoint: TensorEndpoint, model: str, tokenizer: Path, digest: str, dimensions: int) -> None:
        self._endpoint = endpoint
        self.model = model
        """Which of the endpoint's models runs; another copy of the same one may take its place."""
        self._tokenizer = _load(tokenizer)
        self.dimensions = dimensions
        self.id = f"{model}@{digest[:12]}/{file_sha256(tokenizer)[:12]}/mean"

    async def embed(self, texts: Sequence[str]) -> Sequence[Sequence[float]]:
        """float32 (n, dimensions), each of length 1. Raises Full, EngineError or LinkError."""
        vectors: list[Sequence[float]] = []
        for first in range(0, len(texts), MAX_BATCH):
            vectors.extend(await self._batch(list(texts[first : first + MAX_BATCH])))
        return vectors

    async def _batch(self, texts: list[str]) -> Sequence[Sequence[float]]:
        import numpy

        encoded = self._tokenizer.encode_batch(texts)
        ids = numpy.asarray([one.ids for one in encoded], dtype="<i8")
        mask = numpy.asarray([one.attention_mask for one in encoded], dtype="<i8")
        inputs = [
            _tensor("input_ids", ids),
            _tensor("attention_mask", mask),
            _tensor("token_type_ids", numpy.zeros_like(ids)),
        ]
        answer = await self._endpoint.infer(self.model, inputs, DEADLINE_S)
        return self._pooled(answer.outputs[0], mask)

    def _pooled(self, output: Tensor, mask: Any) -> Sequence[Sequence[float]]:
        if output.datatype != "FP32" or output.shape != (*mask.shape, self.dimensions):
            raise EngineError(
                f"{self.model} gave {output.datatype} {list(output.shape)}, not FP32 {[*mask.shape, self.dimensions]}",
                next_step="configure an encoder that gives token vectors",
            )
        import numpy

        tokens = numpy.frombuffer(output.data, dtype="<f4").reshape(output.shape)
        weights = mask[:, :, None].astype(numpy.float32)
        sums = (tokens * weights).sum(axis=1)
        lengths = numpy.linalg.norm(sums, axis=1, keepdims=True)
        vectors: Sequence[Sequence[float]] = sums / numpy.maximum(lengths, 1e-12)
        return vectors


def _tensor(name: str, array: Any) -> Tensor:
    return Tensor(name, "INT64", tuple(array.shape), array.tobytes())


def _load(file: Path) -> Any:
    try:
        import tokenizers
    except ImportError as err:
        raise ConfigError("sentence vectors need tokenizers", next_step=install_step("cache")) from err
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(file))
    except Exception as err:  # the library raises bare Exception for a missing or damaged file
        raise ConfigError(
            f"{file} is no tokenizer: {str(err)[:200]}", next_step="pull it again", field="tokenizer"
        ) from err
    tokenizer.enable_truncation(MAX_TOKENS)
    tokenizer.enable_padding()
    return tokenizer

"""ONNX language models through onnxruntime-genai as a TextEngine: a folder as its model builder writes it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from engines.decoding import DecodingModel
from engines.here_or_worker import HereOrWorker
from engines.hf_tokenizer import HfTokenizer, read_json
from engines.model_files import GENAI_FILE
from engines.onnx_genai_native import GenaiModel, vocabulary_size
from engines.owned_text import Described, OwnedTextEngine


class EmbeddedOnnxGenai(OwnedTextEngine):
    """A model folder in this process. A native crash takes the process along: OnnxGenaiEngine isolates it."""

    def _describe(self) -> Described:
        folder = model_folder(self._path)
        vocabulary_size(folder)
        described = read_json(folder / "tokenizer_config.json")
        template = described.get("chat_template")
        if not isinstance(template, str) and (folder / "chat_template.jinja").is_file():
            template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
        return Described(
            vocabulary=HfTokenizer(folder).digest,
            template=template if isinstance(template, str) else None,
            begin=_mark(described.get("bos_token")),
            end=_mark(described.get("eos_token")),
        )

    def _decoding_model(self, should_abort: Callable[[], bool]) -> DecodingModel:
        return GenaiModel(
            model_folder(self._path),
            context_tokens=self._context_tokens,
            threads=self._threads,
            should_abort=should_abort,
        )


class OnnxGenaiEngine(HereOrWorker):
    """An ONNX language model: its folder, or a file in it (its `genai_config.json`)."""

    embedded = EmbeddedOnnxGenai

    def _name_of(self, path: Path) -> str:
        return model_folder(path).name


def model_folder(path: Path) -> Path:
    """The folder that holds the settings: `path`, or where it lies."""
    return path.parent if path.name == GENAI_FILE else path


def _mark(value: object) -> str:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else ""

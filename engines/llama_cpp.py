"""llama.cpp through llama-cpp-python as a TextEngine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from engines.decoding import DecodingModel
from engines.gguf import read_metadata
from engines.here_or_worker import HereOrWorker
from engines.llama_cpp_native import NativeModel
from engines.owned_text import Described, OwnedTextEngine
from engines.vocabulary import Vocabulary


class EmbeddedLlamaCpp(OwnedTextEngine):
    """A GGUF model in this process. A native crash takes the process along: LlamaCppEngine isolates it."""

    def _describe(self) -> Described:
        metadata = read_metadata(self._path)
        vocabulary = Vocabulary(metadata, self._path.name)
        template = metadata.get("tokenizer.chat_template")
        return Described(
            vocabulary=vocabulary.digest,
            template=template.decode("utf-8", "replace") if isinstance(template, bytes) else None,
            begin=vocabulary.text("bos"),
            end=vocabulary.text("eos"),
        )

    def _decoding_model(self, should_abort: Callable[[], bool]) -> DecodingModel:
        # One sequence more than slots: evaluations run in it.
        return NativeModel(
            self._path,
            context_tokens=self._context_tokens * self._slots.count,
            sequences=self._slots.count + 1,
            threads=self._threads,
            should_abort=should_abort,
        )


class LlamaCppEngine(HereOrWorker):
    """A GGUF model on llama-cpp-python, in a worker process unless `in_process`.

    Args:
        model_path: the GGUF file.
        model: name of the model in messages.
        context_tokens: room for prompt and answer of one generation.
        threads: 0 takes all cores but one.
        slots: generations at once; more are refused with Full.
        chat_template: Jinja text for files that carry none.
        in_process: run here; a native crash then ends this process.
    """

    def __init__(
        self,
        model_path: Path | str,
        *,
        model: str = "",
        context_tokens: int = 2048,
        threads: int = 0,
        slots: int = 2,
        chat_template: str | None = None,
        in_process: bool = False,
    ) -> None:
        settings: dict[str, Any] = {
            "model_path": str(model_path),
            "context_tokens": context_tokens,
            "threads": threads,
            "slots": slots,
            "chat_template": chat_template,
        }
        name = model or Path(model_path).stem
        target = "engines.llama_cpp:EmbeddedLlamaCpp"
        super().__init__(target, EmbeddedLlamaCpp, settings, name=name, in_process=in_process)

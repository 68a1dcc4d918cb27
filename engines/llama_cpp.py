"""llama.cpp through llama-cpp-python as a TextEngine."""

from __future__ import annotations

from collections.abc import Callable

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
    """A GGUF model on llama-cpp-python."""

    embedded = EmbeddedLlamaCpp

"""The only user of onnxruntime-genai: one generator per sequence, fed token by token, so that sampling stays ours."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engines.decoding import Aborted, Entry
from engines.hf_tokenizer import HfTokenizer, read_json
from engines.model_files import GENAI_FILE
from engines.registry import import_native
from protocol.errors import EngineError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class GenaiModel:
    """A loaded model folder and the memory of its sequences. Every method but `interrupt` is for one thread.

    Args:
        folder: what onnxruntime-genai's model builder writes.
        context_tokens: room of one sequence.
        should_abort: asked before each sequence of a batch.
    """

    def __init__(self, folder: Path, *, context_tokens: int, threads: int, should_abort: Callable[[], bool]) -> None:
        self._library = import_native("onnxruntime_genai", extra="onnx-genai")
        self._numpy = import_native("numpy", extra="onnx-genai")
        self._context_tokens = context_tokens
        self._should_abort = should_abort
        self._tokenizer_file = HfTokenizer(folder)
        self._generators: dict[int, Any] = {}
        self._logits: dict[int, NDArray[np.float32]] = {}
        self._running: Any = None
        self._guard = threading.Lock()
        with self._failing(f"onnxruntime-genai cannot load {folder.name}"):
            settings = self._library.Config(str(folder))
            settings.overlay(_options(threads))
            self._model = self._library.Model(settings)
            self._tokenizer = self._library.Tokenizer(self._model)
            self._ends = frozenset(int(one) for one in self._tokenizer.eos_token_ids)
            self._begin = self._begin_ids()
        self.vocabulary_size = vocabulary_size(folder)

    def close(self) -> None:
        """Free everything; the object is of no use afterwards."""
        self._generators.clear()
        self._logits.clear()
        del self._tokenizer, self._model

    def decode(self, entries: Sequence[Entry]) -> None:
        """Evaluate the entries, one sequence after the other. Raises Aborted, or EngineError when it is broken."""
        self._logits.clear()
        for sequence, group in groupby(enumerate(entries), key=lambda pair: pair[1].sequence):
            if self._should_abort():
                raise Aborted("the batch was aborted")
            placed = list(group)
            self._append(sequence, [entry.token for _, entry in placed])
            last, entry = placed[-1]
            if entry.logits:
                self._logits[last] = self._generators[sequence].get_logits()[0, -1].copy()

    def interrupt(self) -> None:
        """End the evaluation that runs; the sequence it was of is forgotten."""
        with self._guard:
            if self._running is not None:
                self._running.set_runtime_option("terminate_session", "1")

    def logits(self, place: int) -> NDArray[np.float32]:
        """Logits of the entry at `place` of the last batch, which had asked for them, [vocabulary]."""
        return self._logits[place]

    def keep(self, sequence: int, tokens: int) -> int:
        """Drop what `sequence` holds from position `tokens` on; returns what is left."""
        if tokens < 1:
            self._generators.pop(sequence, None)
        elif tokens < self.held(sequence):
            try:
                self._generators[sequence].rewind_to(tokens)
            except RuntimeError:
                # Some memories (sliding windows) only drop all.
                self._generators.pop(sequence, None)
        return self.held(sequence)

    def held(self, sequence: int) -> int:
        """Tokens of `sequence` in memory."""
        generator = self._generators.get(sequence)
        return 0 if generator is None else int(generator.token_count())

    def clear(self) -> None:
        """Forget all sequences."""
        self._generators.clear()

    def tokenize(self, data: bytes, *, special: bool) -> tuple[int, ...]:
        """Ids of UTF-8 `data`; `special` keeps the begin mark where the model wants one."""
        with self._failing("onnxruntime-genai cannot tokenise this text"):
            ids = tuple(int(one) for one in self._tokenizer.encode(data.decode("utf-8", "replace")))
        return ids if special else ids[len(self._begin) :]

    def piece(self, token: int) -> bytes:
        """Raw bytes of a token, empty for control tokens; pieces of any length."""
        return self._tokenizer_file.piece(token)

    def ends(self, token: int) -> bool:
        """Whether this token is an end of generation."""
        return token in self._ends

    @property
    def begin_piece(self) -> bytes:
        """Empty: templates are written here, and the tokenizer's begin mark is seen to by tokenize()."""
        return b""

    def _append(self, sequence: int, ids: Sequence[int]) -> None:
        generator = self._generators.get(sequence)
        if generator is None:
            with self._failing("onnxruntime-genai has no room for another sequence"):
                parameters = self._library.GeneratorParams(self._model)
                parameters.set_search_options(max_length=self._context_tokens)
                generator = self._generators[sequence] = self._library.Generator(self._model, parameters)
        with self._guard:
            self._running = generator
        try:
            generator.append_tokens(self._numpy.array(ids, dtype=self._numpy.int32))
        except RuntimeError as err:
            self._generators.pop(sequence, None)
            if self._should_abort():
                raise Aborted("the batch was aborted") from err
            raise EngineError(f"onnxruntime-genai failed on {len(ids)} tokens: {str(err)[:200]}") from err
        finally:
            with self._guard:
                self._running = None

    def _begin_ids(self) -> tuple[int, ...]:
        """What the tokenizer puts before every text."""
        return tuple(int(one) for one in self._tokenizer.encode(""))

    @contextmanager
    def _failing(self, problem: str) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, ValueError, TypeError) as err:
            raise EngineError(f"{problem}: {str(err)[:200]}", next_step="check the model's folder") from err


def vocabulary_size(folder: Path) -> int:
    """Logits per token. Raises EngineError when the folder's settings do not tell."""
    try:
        return int(read_json(folder / GENAI_FILE)["model"]["vocab_size"])
    except (KeyError, TypeError, ValueError) as err:
        raise EngineError(f"{folder.name}/{GENAI_FILE} does not tell the size of the vocabulary") from err


def _options(threads: int) -> str:
    session = {"intra_op_num_threads": threads, "inter_op_num_threads": 1}
    return json.dumps({"model": {"decoder": {"session_options": session}}})

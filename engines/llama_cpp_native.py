"""The only user of llama-cpp-python: its C functions with checked returns, for one thread.

Not its Llama class: that detokenises through a 32-byte buffer, keeps all logits for logprobs and cannot be cancelled
inside a prompt.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engines.decoding import BATCH_TOKENS, Aborted, Entry, NoRoom
from protocol.errors import EngineError
from protocol.extras import install_step

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

STEP_TOKENS = 8
"""A batch of up to this many tokens is a decode step; it ends by itself soon enough."""


class NativeModel:
    """A loaded model and one context. Every method is for the thread that made it.

    Args:
        should_abort: asked by llama.cpp between operations of a batch.
    """

    def __init__(
        self, path: Path, *, context_tokens: int, sequences: int, threads: int, should_abort: Callable[[], bool]
    ) -> None:
        try:
            import llama_cpp
            import numpy
        except (ImportError, OSError, RuntimeError) as err:
            raise EngineError(
                f"llama-cpp-python cannot be loaded: {err}", next_step=install_step("llama-native")
            ) from err
        self._numpy = numpy
        self._lib: Any = llama_cpp
        # A ctypes callback lives as long as its reference: this one as long as the context ...
        self._abort = llama_cpp.ggml_abort_callback(lambda _data: should_abort())
        llama_cpp.llama_log_set(_quiet_log(llama_cpp), None)
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
        if not self._model:
            raise EngineError(
                f"llama.cpp cannot load {path.name}", next_step="check the file with `midstream models verify`"
            )
        self._context = llama_cpp.llama_init_from_model(
            self._model, self._parameters(context_tokens, sequences, threads)
        )
        if not self._context:
            llama_cpp.llama_model_free(self._model)
            raise EngineError(
                f"llama.cpp has no room for a context of {context_tokens} tokens", next_step="lower context_tokens"
            )
        self._never = llama_cpp.ggml_abort_callback()
        self._abortable = False
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._vocabulary = llama_cpp.llama_model_get_vocab(self._model)
        self._batch = llama_cpp.llama_batch_init(BATCH_TOKENS, 0, 1)
        self.vocabulary_size = int(llama_cpp.llama_vocab_n_tokens(self._vocabulary))
        self.context_tokens = int(llama_cpp.llama_n_ctx(self._context))
        self._pieces: dict[int, bytes] = {}

    def close(self) -> None:
        """Free everything; the object is of no use afterwards."""
        self._lib.llama_batch_free(self._batch)
        self._lib.llama_free(self._context)
        self._lib.llama_model_free(self._model)

    def decode(self, entries: Sequence[Entry]) -> None:
        """Evaluate at most BATCH_TOKENS tokens. Raises NoRoom, Aborted, or EngineError when it is broken."""
        self._ask_to_abort(len(entries) > STEP_TOKENS)
        batch = self._batch
        batch.n_tokens = len(entries)
        for place, entry in enumerate(entries):
            batch.token[place] = entry.token
            batch.pos[place] = entry.position
            batch.n_seq_id[place] = 1
            batch.seq_id[place][0] = entry.sequence
            batch.logits[place] = entry.logits
        code = self._lib.llama_decode(self._context, batch)
        if code == 1:
            raise NoRoom("llama.cpp found no room for the batch in its key-value memory")
        if code == 2:
            raise Aborted("the batch was aborted")
        if code != 0:
            raise EngineError(f"llama.cpp failed on a batch of {len(entries)} tokens (code {code})")

    def interrupt(self) -> None:
        """Nothing to do: llama.cpp asks by itself."""

    def _ask_to_abort(self, wanted: bool) -> None:
        """llama.cpp asks once per graph node: 7 % of a decode step, so only batches that take long are asked about."""
        if wanted != self._abortable:
            self._abortable = wanted
            self._lib.llama_set_abort_callback(self._context, self._abort if wanted else self._never, None)

    def logits(self, place: int) -> NDArray[np.float32]:
        """A copy of the logits of the entry at `place` of the last batch, [vocabulary]."""
        pointer = self._lib.llama_get_logits_ith(self._context, place)
        if not pointer:
            raise EngineError(f"llama.cpp kept no logits for entry {place}")
        array: NDArray[np.float32] = self._numpy.ctypeslib.as_array(pointer, shape=(self.vocabulary_size,)).copy()
        return array

    def keep(self, sequence: int, tokens: int) -> int:
        """Drop what `sequence` holds from position `tokens` on; returns what is left (some memories only drop all)."""
        if tokens > 0 and self._lib.llama_memory_seq_rm(self._memory, sequence, tokens, -1):
            return min(tokens, self.held(sequence))
        self._lib.llama_memory_seq_rm(self._memory, sequence, -1, -1)
        return 0

    def held(self, sequence: int) -> int:
        """Tokens of `sequence` in memory."""
        return int(self._lib.llama_memory_seq_pos_max(self._memory, sequence)) + 1

    def clear(self) -> None:
        """Forget all sequences."""
        self._lib.llama_memory_clear(self._memory, True)

    def tokenize(self, data: bytes, *, special: bool) -> tuple[int, ...]:
        """Ids of UTF-8 `data`; `special` adds the begin mark where the model wants one and reads control tokens."""
        room = len(data) + 8
        for _ in range(2):
            buffer = (self._lib.llama_token * room)()
            count = self._lib.llama_tokenize(self._vocabulary, data, len(data), buffer, room, special, special)
            if count >= 0:
                return tuple(buffer[:count])
            room = -count
        raise EngineError("llama.cpp cannot tokenise this text")

    def piece(self, token: int) -> bytes:
        """Raw bytes of a token, empty for control tokens; pieces of any length."""
        known = self._pieces.get(token)
        if known is None:
            known = self._pieces[token] = self._piece(token)
        return known

    def ends(self, token: int) -> bool:
        """Whether this token is an end of generation."""
        return bool(self._lib.llama_vocab_is_eog(self._vocabulary, token))

    @property
    def begin_piece(self) -> bytes:
        """Text of the begin mark that tokenize(special=True) adds; empty when it adds none."""
        if not self._lib.llama_vocab_get_add_bos(self._vocabulary):
            return b""
        return self._piece(self._lib.llama_vocab_bos(self._vocabulary), special=True)

    def _piece(self, token: int, *, special: bool = False) -> bytes:
        room = 64
        for _ in range(2):
            buffer = ctypes.create_string_buffer(room)
            count = self._lib.llama_token_to_piece(self._vocabulary, token, buffer, room, 0, special)
            if count >= 0:
                return buffer.raw[:count]
            room = -count
        raise EngineError(f"llama.cpp cannot show token {token}")

    def _parameters(self, context_tokens: int, sequences: int, threads: int) -> Any:
        parameters = self._lib.llama_context_default_params()
        parameters.n_ctx = context_tokens
        parameters.n_seq_max = sequences
        parameters.n_batch = parameters.n_ubatch = BATCH_TOKENS
        parameters.n_threads = parameters.n_threads_batch = threads
        # One pool for all sequences: a reserve that only one of them uses at a time costs no share of it.
        parameters.kv_unified = True
        return parameters


@functools.cache
def _quiet_log(library: Any) -> Any:
    """... and this one, which the library keeps for all its users, as long as the process."""
    return library.llama_log_callback(_ignore_log)


def _ignore_log(level: int, text: bytes, data: object) -> None:
    """llama.cpp's messages go nowhere; failures come back as codes."""

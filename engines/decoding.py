"""A model that decodes batches, as the one thread that owns it sees it: what a binding has to offer for an engine.

Implementations: engines.llama_cpp_native, engines.onnx_genai_native. All methods are for the thread that made it, apart
from `interrupt`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from attrs import frozen

from protocol.errors import EngineError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

BATCH_TOKENS = 512
"""Most tokens of a batch."""


class NoRoom(EngineError):
    """The key-value memory has no place for the batch; free another sequence and try again."""


class Aborted(EngineError):
    """The batch was told to end; a part of it may be in memory."""


@frozen
class Entry:
    """One token of a batch: where it stands in which sequence, and whether its logits are wanted."""

    token: int
    position: int
    sequence: int
    logits: bool


class DecodingModel(Protocol):
    """A loaded model and the memory of its sequences, numbered from 0."""

    @property
    def vocabulary_size(self) -> int: ...

    @property
    def begin_piece(self) -> bytes:
        """Text of the begin mark that tokenize(special=True) adds; empty when it adds none."""
        ...

    def decode(self, entries: Sequence[Entry]) -> None:
        """Evaluate at most BATCH_TOKENS tokens. Raises NoRoom, Aborted, or EngineError when it is broken."""
        ...

    def interrupt(self) -> None:
        """End the batch that runs with Aborted, if that can be; from any thread, at any time."""
        ...

    def logits(self, place: int) -> NDArray[np.float32]:
        """A copy of the logits of the entry at `place` of the last batch, [vocabulary]."""
        ...

    def keep(self, sequence: int, tokens: int) -> int:
        """Drop what `sequence` holds from position `tokens` on; returns what is left (some memories only drop all)."""
        ...

    def held(self, sequence: int) -> int:
        """Tokens of `sequence` in memory."""
        ...

    def clear(self) -> None:
        """Forget all sequences."""
        ...

    def tokenize(self, data: bytes, *, special: bool) -> tuple[int, ...]:
        """Ids of UTF-8 `data`; `special` adds the begin mark where the model wants one and reads control tokens."""
        ...

    def piece(self, token: int) -> bytes:
        """Raw bytes of a token, empty for control tokens; pieces of any length."""
        ...

    def ends(self, token: int) -> bool:
        """Whether this token is an end of generation."""
        ...

    def close(self) -> None:
        """Free everything; the object is of no use afterwards."""
        ...

"""What a sentence encoder says of an intent when the classifier in the path abstains: slower, and only then.

A linear head over sentence vectors, made by `python -m benchmarks.train_intents --sentences`. It is stored with the id
of the encoder that it was fitted on and is not used with another one.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Sequence
from functools import cache
from operator import mul
from pathlib import Path
from typing import Protocol

from attrs import field, frozen

from protocol.errors import ConfigError, MidstreamError

HEAD_FILE = Path(__file__).with_name("intents_sentences.json")

DEADLINE_S = 0.1
"""A request waits no longer than this for a second opinion."""

MAX_CHARACTERS = 400
"""Of a prompt that are read: the encoder reads few more, and takes longer the more there are."""


class Encoder(Protocol):
    """Texts to unit vectors; `id` names the weights."""

    @property
    def id(self) -> str: ...

    async def embed(self, texts: Sequence[str]) -> Sequence[Sequence[float]]: ...


@frozen
class SentenceHead:
    """names: of the intents; rows: a vector for each; encoder: whose vectors; threshold: least probability."""

    encoder: str
    names: tuple[str, ...]
    rows: tuple[tuple[float, ...], ...] = field(repr=False)
    threshold: float = 0.5


class SecondOpinion:
    """An embedder with a head that was fitted on it."""

    def __init__(self, embedder: Encoder, head: SentenceHead | None = None, deadline_s: float = DEADLINE_S) -> None:
        self._embedder = embedder
        self._head = default_head() if head is None else head
        self._deadline_s = deadline_s

    @property
    def usable(self) -> bool:
        """Whether the head was fitted on this very encoder."""
        return self._head.encoder == self._embedder.id

    async def intent(self, text: str) -> str | None:
        """The intent, or None: not sure either, too late, or the encoder fails."""
        if not self.usable or not text:
            return None
        try:
            async with asyncio.timeout(self._deadline_s):
                (vector,) = await self._embedder.embed([text[:MAX_CHARACTERS]])
        except (MidstreamError, TimeoutError):
            return None
        values = [float(value) for value in vector]
        logits = [sum(map(mul, row, values)) for row in self._head.rows]
        best = max(logits)
        probability = 1.0 / sum(math.exp(logit - best) for logit in logits)
        return self._head.names[logits.index(best)] if probability >= self._head.threshold else None


@cache
def default_head() -> SentenceHead:
    """The head that comes with the package. Raises ConfigError."""
    try:
        raw = json.loads(HEAD_FILE.read_bytes())
        rows = tuple(tuple(float(raw["unit"] * value) for value in row) for row in raw["rows"])
        return SentenceHead(raw["encoder"], tuple(raw["names"]), rows, float(raw["threshold"]))
    except (OSError, ValueError, KeyError, TypeError) as err:
        raise ConfigError(f"the head for sentences cannot be read: {err}", next_step="install midstream again") from err

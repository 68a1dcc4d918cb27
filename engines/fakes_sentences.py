"""In-tree fake of the sentence embedder: hashed words, so that texts with the same words lie together; no numpy."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

from protocol.errors import EngineError


class FakeEmbedder:
    """Unit vectors from the counts of words. `failing` makes every call fail; `calls` counts texts."""

    def __init__(self, dimensions: int = 64, name: str = "fake/1") -> None:
        self.id = name
        self.dimensions = dimensions
        self.failing = False
        self.calls = 0

    async def embed(self, texts: Sequence[str]) -> Sequence[Sequence[float]]:
        """float (n, dimensions), each of length 1."""
        self.calls += len(texts)
        if self.failing:
            raise EngineError("the fake embedder was told to fail")
        return [self._vector(text) for text in texts]

    def _vector(self, text: str) -> list[float]:
        sums = [0.0] * self.dimensions
        for word in text.lower().split() or [""]:
            digest = hashlib.sha256(word.encode("utf-8", "surrogatepass")).digest()
            place = int.from_bytes(digest[:4], "little") % self.dimensions
            sums[place] += 1.0 if digest[4] % 2 else -1.0
        length = math.sqrt(sum(value * value for value in sums))
        if not length:
            sums[0] = length = 1.0
        return [value / length for value in sums]

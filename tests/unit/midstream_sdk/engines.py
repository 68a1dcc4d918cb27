"""An engine of an app's own, for tests: says what it was told, fails when it was told."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from midstream_sdk import Completion
from protocol.errors import EngineError


class SayingEngine:
    """Streams `words`; `loads` counts models that were not in memory yet; `fails_after` pieces it breaks."""

    def __init__(self, *words: str, fails_after: int | None = None) -> None:
        self.words = words
        self.fails_after = fails_after
        self.loads: list[str] = []
        self.asked: list[tuple[str, Any]] = []
        self.closed = False

    async def stream(
        self, model: str, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
    ) -> AsyncIterator[Completion]:
        if model not in self.loads:
            self.loads.append(model)
        self.asked.append((model, messages[-1]["content"]))
        for place, word in enumerate(self.words):
            if place == self.fails_after:
                raise EngineError("this engine broke")
            yield Completion(word, "own")
        yield Completion("", "own", "stop")

    async def close(self) -> None:
        self.closed = True

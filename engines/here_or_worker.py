"""A text engine in this process or in a worker process, as its settings say."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from engines.port import Continuation, EngineLoad, TextEngine
from engines.worker import WorkerEngine
from protocol.text import TextCapabilities, TextRequest


class HereOrWorker:
    """TextEngine that passes everything on to the one it made.

    Args:
        target: "module:Class" of the engine, for the worker process.
        make: the same class, for this process.
        settings: its keyword arguments, as JSON can carry them.
        name: name of the model in messages.
        in_process: run here; a native crash then ends this process.
    """

    def __init__(
        self,
        target: str,
        make: Callable[..., TextEngine],
        settings: Mapping[str, Any],
        *,
        name: str,
        in_process: bool,
    ) -> None:
        self.model = name
        self._inner: TextEngine = make(**settings) if in_process else WorkerEngine(target, settings, name=name)

    async def capabilities(self) -> TextCapabilities:
        return await self._inner.capabilities()

    async def prepare(self, request: TextRequest, deadline_s: float) -> Continuation:
        return await self._inner.prepare(request, deadline_s)

    async def tokenize(self, data: bytes) -> tuple[int, ...]:
        return await self._inner.tokenize(data)

    async def embed(self, texts: Sequence[str]) -> Sequence[Sequence[float]]:
        return await self._inner.embed(texts)

    def load(self) -> EngineLoad:
        return self._inner.load()

    async def close(self) -> None:
        await self._inner.close()

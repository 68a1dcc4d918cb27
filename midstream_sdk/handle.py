"""One model as an app uses it: chat(), generate(), warm(), on whichever engine it is told to use."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Literal, overload

from attrs import frozen

from midstream_sdk.engines import Completion, Engine
from protocol.clock import Clock
from protocol.errors import BadRequest, MidstreamError

AUTO = "auto"
WARM_PROMPT = "Hi"


@frozen
class Warmth:
    """Milliseconds to the first token: of the first request after the load, and of the next one."""

    engine: str
    model: str
    cold_ttft_ms: float
    warm_ttft_ms: float


@frozen
class Ran:
    """One answer, as the gateway is told of it: numbers, and no word of it."""

    engine: str
    model: str
    pieces: int
    ttft_ms: float | None
    total_ms: float
    failed: str = ""


class ModelHandle:
    """A model by name. Made by Client.model().

    Args:
        model: read at each call; the gateway may have switched it.
        order: engines by name in the order in which they are tried; read at each call.
        ran: told of every answer.
    """

    def __init__(
        self,
        model: Callable[[], str],
        order: Callable[[], Sequence[str]],
        engines: Mapping[str, Engine],
        ran: Callable[[Ran], None] = lambda ran: None,
        clock: Clock = time.monotonic,
    ) -> None:
        self._model = model
        self._order = order
        self._engines = engines
        self._ran = ran
        self._clock = clock

    @property
    def model(self) -> str:
        """The model that the next call asks for."""
        return self._model()

    @overload
    async def chat(
        self, messages: Sequence[Mapping[str, Any]], *, stream: Literal[False] = False, **options: Any
    ) -> str: ...
    @overload
    async def chat(
        self, messages: Sequence[Mapping[str, Any]], *, stream: Literal[True], **options: Any
    ) -> AsyncGenerator[Completion, None]: ...

    async def chat(
        self, messages: Sequence[Mapping[str, Any]], *, stream: bool = False, **options: Any
    ) -> str | AsyncGenerator[Completion, None]:
        """The answer to a conversation, as text or as pieces.

        options: as in OpenAI's API (`max_tokens`, `temperature`, ...). Raises what the last engine raised.
        """
        pieces = self._pieces(messages, options)
        if stream:
            return pieces
        async with aclosing(pieces):
            return "".join([piece.text async for piece in pieces])

    async def generate(self, prompt: str, **options: Any) -> str:
        """The answer to one prompt."""
        answer: str = await self.chat([{"role": "user", "content": prompt}], **options)
        return answer

    async def warm(self, engine: str = "", model: str = "") -> Warmth:
        """Load the model and tell how long a first token takes, cold and warm. Raises what the engine raises."""
        name = engine or self._order()[0]
        chosen, wanted = self._engine(name), model or self._model()
        cold_ms = await self._first_token_ms(chosen, wanted)
        return Warmth(name, wanted, cold_ms, await self._first_token_ms(chosen, wanted))

    async def _first_token_ms(self, engine: Engine, model: str) -> float:
        begun_s = self._clock()
        messages = [{"role": "user", "content": WARM_PROMPT}]
        answer = engine.stream(model, messages, {"max_tokens": 1, "temperature": 0})
        first_s = None
        async for _ in answer:
            first_s = self._clock() if first_s is None else first_s
        return 1e3 * ((first_s or self._clock()) - begun_s)

    async def _pieces(
        self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
    ) -> AsyncGenerator[Completion, None]:
        """From the first engine that speaks; one that fails before its first piece lets the next one try."""
        names = self._order()
        for place, name in enumerate(names):
            answer = self._one(name, messages, options)
            try:
                first = await anext(answer, None)
            except MidstreamError:
                if place == len(names) - 1:
                    raise
                continue
            async with aclosing(answer):
                if first is not None:
                    yield first
                async for piece in answer:
                    yield piece
            return

    async def _one(
        self, name: str, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
    ) -> AsyncGenerator[Completion, None]:
        """One engine's answer, and a word about it when it is over."""
        model, begun_s = self._model(), self._clock()
        count, first_s, failed = 0, None, "cancelled"
        try:
            answer: AsyncIterator[Completion] = self._engine(name).stream(model, messages, options)
            async for piece in answer:
                first_s = self._clock() if first_s is None else first_s
                count += bool(piece.text)
                yield piece
            failed = ""
        except MidstreamError as err:
            failed = err.code
            raise
        finally:
            ttft_ms = None if first_s is None else 1e3 * (first_s - begun_s)
            self._ran(Ran(name, model, count, ttft_ms, 1e3 * (self._clock() - begun_s), failed))

    def _engine(self, name: str) -> Engine:
        engine = self._engines.get(name)
        if engine is None:
            known = ", ".join(self._engines)
            raise BadRequest(f"there is no engine {name[:64]!r}", next_step=f"known: {known}", field="engine")
        return engine

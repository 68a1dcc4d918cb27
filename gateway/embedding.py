"""One request for embeddings: one target makes all vectors, held to the bounds and the record of an answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from attrs import define, field

from gateway.context import RequestContext
from gateway.ports import Spent
from gateway.spending import Spending
from gateway.targets import Target, TargetBoard
from protocol.chat import EmbeddingsRequest
from protocol.clock import Clock
from protocol.errors import Full, LinkTimeout, MidstreamError, Unsupported
from protocol.events import Emit, TextDone

Hold = Callable[["EmbeddingRun"], Callable[[], None]]
"""Takes a place for what runs and returns the way to give it back; raises Full."""

Vectors = Sequence[Sequence[float]]


@define(eq=False)
class EmbeddingRun:
    """Call `vectors()` once; then `target` and `prompt_tokens` are settled.

    prompt_tokens stays 0 when the engine does not share its tokenizer: it is counted, never estimated.
    """

    context: RequestContext
    request: EmbeddingsRequest
    targets: Sequence[Target]
    board: TargetBoard
    hold: Hold
    clock: Clock
    emit: Emit
    spending: Spending
    target: str = field(default="", init=False)
    prompt_tokens: int = field(default=0, init=False)
    _aborted: str = field(default="", init=False)
    _limit: asyncio.Timeout | None = field(default=None, init=False)

    async def vectors(self) -> Vectors:
        """One vector per text. Raises Full, Unsupported, LinkTimeout at the deadline, and what the engine raises."""
        begun_s = self.clock()
        status = "cancelled"
        release: Callable[[], None] | None = None
        try:
            release = self.hold(self)
            made = await self._in_time()
            status = "ok"
            return made
        except MidstreamError as err:
            status = err.code
            raise
        finally:
            if release is not None:
                release()
            self._record(status, begun_s)
            paid = self.spending
            await paid.reservation.settle(Spent(prompt_tokens=self.prompt_tokens, money=paid.known, held=paid.held))

    @property
    def headers(self) -> dict[str, str]:
        """Of the response, once the vectors are there."""
        return {
            "x-midstream-target": self.target,
            "x-midstream-request-id": self.context.id,
            "x-midstream-trace-id": self.context.trace.trace_id,
            **self.spending.reservation.headers,
        }

    async def abort(self, reason: str) -> None:
        """End it from outside."""
        self._aborted = reason
        if self._limit is not None:
            self._limit.reschedule(asyncio.get_running_loop().time())

    async def _in_time(self) -> Vectors:
        try:
            async with asyncio.timeout(max(0.0, self.context.deadline_at_s - self.clock())) as self._limit:
                return await self._make()
        except TimeoutError as err:
            if self._aborted:
                raise Full(self._aborted, retry_after_s=5.0) from err
            raise LinkTimeout("the embeddings were not made within the request's deadline") from err

    async def _make(self) -> Vectors:
        target = await self._choose()
        self.target = target.name
        made = await self.spending.embed(target, self.request.texts)
        self.prompt_tokens = await self._count(target)
        return made

    async def _count(self, target: Target) -> int:
        """One text after the other: counting must not crowd out what the engine is for."""
        tokens = 0
        for text in self.request.texts:
            try:
                tokens += len(await target.engine.tokenize(text.encode("utf-8")))
            except Unsupported:
                return 0
        return tokens

    async def _choose(self) -> Target:
        """The first allowed target that makes embeddings, local ones before others."""
        model = self.context.model
        lost: MidstreamError | None = None
        for target in sorted(self.targets, key=lambda target: not target.local):
            try:
                capabilities = await self.board.capabilities(target, model)
            except MidstreamError as err:
                lost = err
                continue
            if capabilities.embeds:
                return target
        if lost is not None:
            raise lost
        raise Unsupported(
            f"model {model!r} does not make embeddings", next_step="name an embedding model", field="model"
        )

    def _record(self, status: str, begun_s: float) -> None:
        now_s = self.clock()
        self.emit(
            TextDone(
                at_s=now_s,
                request_id=self.context.id,
                model=self.context.model,
                status=status,
                prompt_tokens=self.prompt_tokens,
                completion_tokens=0,
                ttft_s=None,
                total_s=now_s - begun_s,
                reason=f"embeddings by {self.target}" if self.target else "embeddings",
                decided_s=self.context.decided_s,
                usd=self.spending.known,
                trace=self.context.trace,
            )
        )

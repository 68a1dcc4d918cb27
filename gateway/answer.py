"""One answer as text: the owner's tokens through the stop scanner; usage, finish reason and the record of the end."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from typing import Protocol

from attrs import define, evolve, field

from gateway.calls import Call, CallScanner, Part
from gateway.context import RequestContext
from gateway.ending import Ending, Made
from gateway.pacing import DeliveryMeter, gaps, metered, paced, reader_tokens_per_s
from gateway.ports import Restorer
from gateway.relay_plan import Relay
from gateway.stops import Owned, Piece, StopScanner
from protocol.chat import ChatRequest
from protocol.clock import Clock
from protocol.errors import MidstreamError
from protocol.events import Emit, TextDelivered, TextDone
from protocol.text import CallDelta, FinishReason, Message, Usage

Admit = Callable[["Answer"], Callable[[], None]]
"""Takes a place for a running answer and returns the way to give it back; raises Full."""


class Source(Protocol):
    """Where an answer's tokens come from: the owner of a stream, or an answer that was kept."""

    @property
    def prompt_tokens(self) -> int: ...

    @property
    def cached_tokens(self) -> int: ...

    @property
    def usage(self) -> Usage | None:
        """The count of whoever made all of it, once it ended; None where nobody told one."""
        ...

    @property
    def ttft_s(self) -> float | None: ...

    @property
    def finish(self) -> FinishReason | None: ...

    @property
    def sides(self) -> tuple[tuple[str, int], ...]: ...

    @property
    def losers(self) -> tuple[str, ...]: ...

    def tokens(self) -> AsyncGenerator[Owned, None]: ...

    async def abort(self, reason: str) -> None: ...


def _nobody(side: str) -> bool:
    return False


@define
class Answer:
    """Iterate `pieces()` once; then `finish` and `usage` are settled. Closing the iterator cancels the generation.

    Whoever was given an answer calls `aclose()` in the end, even if it was never begun: it holds a reservation.
    tells_calls: whether the target of a name tells tool calls apart from text by itself. stopped_by: the stop string
    that ended it. calls: its tool calls, where there are tools. relay: who may give it on in their own bytes.
    """

    context: RequestContext
    request: ChatRequest
    make_owner: Callable[[], Source]
    reason: str
    admit: Admit
    ending: Ending
    restorer: Restorer | None
    clock: Clock
    emit: Emit
    tells_calls: Callable[[str], bool] = _nobody
    relay: Relay | None = None
    finish: FinishReason | None = None
    stopped_by: str | None = field(default=None, init=False)
    calls: CallScanner | None = field(default=None, init=False)
    completion_tokens: int = field(default=0, init=False)
    _made: list[str] = field(factory=list, init=False)
    _shown: list[str] = field(factory=list, init=False)
    _shown_calls: list[Call] = field(factory=list, init=False)
    _in_text: bool = field(default=True, init=False)
    _over: bool = field(default=False, init=False)
    _owner: Source | None = field(default=None, init=False)

    @property
    def owner(self) -> Source:
        """Where its tokens come from; made when it is asked for, which an answer in a provider's bytes never is."""
        if self._owner is None:
            self._owner = self.make_owner()
        return self._owner

    @property
    def usage(self) -> Usage:
        """The maker's own count of a whole answer; else tokens taken from the engines and the first one's prompt."""
        if self.owner.usage is not None and self.stopped_by is None:
            return self.owner.usage
        return Usage(self.owner.prompt_tokens, self.completion_tokens, self.owner.cached_tokens)

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """Text as it settles. Raises what StreamOwner.tokens raises, and Full when the house is."""
        release: Callable[[], None] | None = None
        begun_s = self.clock()
        status = "cancelled"
        stream = self.owner.tokens()
        try:
            release = self.admit(self)
            async with aclosing(self._restored(self._called(self._scan(stream)))) as pieces:
                async for piece in pieces:
                    self._show(piece)
                    yield piece
            status = "ok"
        except MidstreamError as err:
            status = err.code
            raise
        finally:
            if release is not None:
                release()
            await stream.aclose()
            await self._end(status, self.clock() - begun_s)

    def _show(self, piece: Piece) -> None:
        if piece.text:
            self._shown.append(piece.text)
        for delta in piece.calls:
            if delta.id:
                self._shown_calls.append(Call(delta.id, delta.name))
            self._shown_calls[delta.index].arguments += delta.arguments

    async def delivered(self) -> AsyncGenerator[Piece, None]:
        """`pieces()` for a stream: at the pace that the policy sets, and counted as its reader sees them."""
        policy, context = self.context.policy, self.context
        meter = DeliveryMeter(reader_tokens_per_s(policy))
        deliver = metered if policy.delivery.mode == "raw" else paced
        try:
            async with aclosing(deliver(self.pieces(), meter, _tokens_of, self.clock)) as pieces:
                async for piece in pieces:
                    yield piece
        finally:
            self.emit(
                TextDelivered(
                    at_s=self.clock(),
                    request_id=context.id,
                    model=context.model,
                    mode=policy.delivery.mode,
                    tokens_per_s=meter.tokens_per_s,
                    tokens=meter.tokens,
                    delayed_tokens=meter.delayed_tokens,
                    raw=gaps(meter.raw_s),
                    paced=gaps(meter.paced_s),
                )
            )

    async def aclose(self) -> None:
        """The end of an answer that nobody began; after `pieces()` it does nothing."""
        await self._end("cancelled", 0.0)

    async def _called(self, pieces: AsyncGenerator[Piece, None]) -> AsyncGenerator[Piece, None]:
        """Tool calls apart from text; tokens go with what they settled."""
        async with aclosing(pieces):
            if not self.request.tools:
                async for piece in pieces:
                    yield piece
                return
            self.calls = scanner = CallScanner(self.request.tool_names, self._call_id)
            waiting: tuple[Owned, ...] = ()
            async for piece in pieces:
                waiting += piece.tokens
                for made in _parts(self._scanned(scanner, piece), waiting):
                    waiting = ()
                    yield made
                if self._enough(scanner):
                    break
            for made in _parts(scanner.flush(), waiting):
                waiting = ()
                yield made
            if waiting:
                yield Piece("", waiting)
            if scanner.calls and self.finish != "length":
                self.finish = "tool_calls"

    def _scanned(self, scanner: CallScanner, piece: Piece) -> list[Part]:
        told: list[Part] = [scanner.take(one.token.call) for one in piece.tokens if one.token.call is not None]
        if not piece.text:
            return told
        return [piece.text, *told] if self.tells_calls(piece.side) else [*scanner.feed(piece.text), *told]

    def _enough(self, scanner: CallScanner) -> bool:
        """Whether the client wanted no more than the call that is whole now."""
        one = self.request.tool_choice != "auto" or not self.request.parallel_tool_calls
        return one and bool(scanner.calls) and scanner.calls[0].whole

    def _call_id(self, number: int) -> str:
        return f"call_{self.context.id[:20]}{number:02d}"

    @property
    def message(self) -> Message:
        """The whole answer as a turn of the conversation, as the client saw it."""
        calls = tuple(call.message_call() for call in self.shown_calls)
        return Message("assistant", "".join(self._shown), tool_calls=calls)

    @property
    def shown_calls(self) -> tuple[Call, ...]:
        """Its tool calls as the client saw them."""
        return tuple(self._shown_calls)

    @property
    def broken_calls(self) -> tuple[int, ...]:
        """Tool calls whose arguments are no JSON object, as when the answer was cut in them."""
        return tuple(number for number, call in enumerate(self._shown_calls) if call.parsed() is None)

    async def _restored(self, pieces: AsyncGenerator[Piece, None]) -> AsyncGenerator[Piece, None]:
        """The pieces as the client may see them; text waits while a placeholder may have begun in it."""
        waiting: tuple[Owned, ...] = ()
        async with aclosing(pieces):
            async for piece in pieces:
                if piece.text:
                    self._made.append(piece.text)
                if self.restorer is None:
                    yield piece
                    continue
                waiting += piece.tokens
                shown = self._restore(self.restorer, piece)
                if shown.text or shown.calls or not piece.text:
                    yield evolve(shown, tokens=waiting)
                    waiting = ()
        rest = self.restorer.flush() if self.restorer is not None else ""
        if rest or waiting:
            calling = self._shown_calls and not self._in_text
            yield (
                Piece("", waiting, (CallDelta(len(self._shown_calls) - 1, arguments=rest),))
                if calling
                else Piece(rest, waiting)
            )

    def _restore(self, restorer: Restorer, piece: Piece) -> Piece:
        """One piece with the real words; what was held back goes out where text turns to a call, or to another one."""
        text = restorer.feed(piece.text) if piece.text else ""
        calls: list[CallDelta] = []
        for delta in piece.calls:
            if delta.id:
                rest = restorer.flush()
                if rest and self._in_text and not calls:
                    text += rest
                elif rest:
                    calls.append(CallDelta(delta.index - 1, arguments=rest))
                self._in_text = False
            arguments = restorer.feed(delta.arguments, in_json=True) if delta.arguments else ""
            if arguments or delta.id:
                calls.append(evolve(delta, arguments=arguments))
        return evolve(piece, text=text, calls=tuple(calls))

    async def _scan(self, stream: AsyncGenerator[Owned, None]) -> AsyncGenerator[Piece, None]:
        scanner = StopScanner(self.request.stop)
        async for owned in stream:
            self.completion_tokens += 1
            settled = scanner.feed(owned)
            if scanner.hit is not None:
                # The engine is freed before the client reads the last piece.
                await stream.aclose()
            for piece in settled:
                yield piece
            if scanner.hit is not None:
                self.finish, self.stopped_by = "stop", scanner.hit
                return
        for piece in scanner.flush():
            yield piece
        self.finish = self.owner.finish or "stop"

    async def _end(self, status: str, total_s: float) -> None:
        if self._over:
            return
        self._over = True
        owner = self.owner
        calls = tuple(call.message_call() for call in self.calls.calls) if self.calls is not None else ()
        made = Made(
            status=status,
            finish=self.finish,
            usage=self.usage,
            sides=owner.sides,
            losers=owner.losers,
            pieces=tuple(self._made),
            calls=calls,
            shown=self.message,
            ttft_s=owner.ttft_s,
            total_s=total_s,
        )
        await self.ended(made)

    async def ended(self, made: Made) -> None:
        """Tell what became of it, then the steps after an answer. Once; who makes it otherwise tells it here."""
        self._over = True
        self.emit(
            TextDone(
                at_s=self.clock(),
                request_id=self.context.id,
                model=self.context.model,
                status=made.status,
                prompt_tokens=made.usage.prompt_tokens,
                completion_tokens=made.usage.completion_tokens,
                ttft_s=made.ttft_s,
                total_s=made.total_s,
                sides=made.sides,
                losers=made.losers,
                reason=self.reason,
                level=self.ending.routed.level,
                decided_s=self.context.decided_s,
                usd=0.0 if self.ending.cached else self.ending.spending.known,
                cached=self.ending.cached,
                trace=self.context.trace,
            )
        )
        await self.ending.run(made)


def _parts(parts: Sequence[Part], tokens: tuple[Owned, ...]) -> Iterator[Piece]:
    """Text and calls as pieces; the tokens go with the first one."""
    for part in parts:
        yield Piece(part, tokens) if isinstance(part, str) else Piece("", tokens, (part,))
        tokens = ()


def _tokens_of(piece: Piece) -> int:
    return len(piece.tokens)

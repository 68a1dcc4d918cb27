"""Answers of providers given on as they are, where nobody else could answer and the client speaks their wire form.

The steps before and after are those of every answer; in between, bytes pass. Nothing is sent before some provider
spoke: one that fails is followed by the next. A stream that breaks later ends with an error, for where another target
could have continued it, the stream owner has it (gateway.stream).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from attrs import evolve

from engines.port import RelayingEngine
from gateway.answer import Answer
from gateway.ending import Made
from gateway.race import AllFailed, most_telling
from gateway.relay_events import RelayEvents, dump_text, renamed
from gateway.relay_plan import Relay
from gateway.settings import GatewaySettings
from gateway.spending import Charge, costs
from gateway.stream import AnswerCut
from gateway.surely import Once
from gateway.targets import Target
from gateway.wire import Wire
from links.patience import Patience
from links.port import Response
from links.resumable import Resumable
from protocol.errors import LinkClosed, LinkTimeout, MidstreamError, RejectedError
from protocol.sse import DONE
from protocol.text import CallDelta, FinishReason, Message, Usage
from protocol.upstream import UpstreamDelta

T = TypeVar("T")


async def whole(answer: Answer, relay: Relay) -> Response:
    """The answer in one body. Raises what every provider said."""
    run = _Run(answer, relay)
    async with run:
        body, delta, shared = await run.uncut(_first_whole(run))
        run.take(delta)
        if shared:
            # Whoever flew pays; the answer is as good as one that was kept.
            answer.ending = evolve(answer.ending, cached=True)
        return Response(200, {"content-type": "application/json", **run.headers()}, body)


async def _first_whole(run: _Run) -> tuple[bytes, UpstreamDelta, bool]:
    relay, answer = run.relay, run.answer
    errors: list[tuple[str, MidstreamError]] = []
    for target in relay.targets:
        engine = _engine(target)
        try:
            body, shared = await _asked(run, target)
            delta = engine.codec.whole(body)
        except MidstreamError as err:
            errors.append((target.name, err))
            run.failed(target, err)
            continue
        run.answered(target)
        if engine.codec.answers_name_models:
            body = renamed(body, dump_text(answer.request.model))
        return body, delta, shared
    raise most_telling(AllFailed(errors))


async def _asked(run: _Run, target: Target) -> tuple[bytes, bool]:
    relay, answer, engine = run.relay, run.answer, _engine(target)
    sampling, stop = relay.request.sampling, answer.request.stop

    async def ask() -> bytes:
        await run.pay(target, whole=True)
        return await engine.relayed(relay.request, stop, run.rest_s())

    if sampling.temperature > 0 and sampling.seed is None:
        return await ask(), False  # each client wants a draw of its own
    key = (
        id(engine),
        relay.request.tenant,
        engine.codec.call(engine.model, relay.request, stream=False, stop=stop).body,
    )
    return await relay.ports.flights.share(key, ask)


async def streamed(answer: Answer, relay: Relay, wire: Wire, settings: GatewaySettings) -> Response:
    """The answer as it comes. Waits up to `hold_headers_s` for the first word, so that a failure keeps its status."""
    body = RelayBody(_Run(answer, relay), wire, settings.ping_every_s)
    try:
        await body.first(settings.hold_headers_s)
    except BaseException:
        await body.aclose()
        raise
    return Response(200, {**wire.headers, **body.headers()}, body)


class RelayBody:
    """One stream. Closing it hangs up on the provider, even before a chunk was asked for."""

    def __init__(self, run: _Run, wire: Wire, ping_every_s: float) -> None:
        self._run = run
        self._wire = wire
        self._ping_every_s = ping_every_s
        self._events = run.events()
        self._coming: Resumable[bytes] | None = Resumable(self._run.uncut(anext(self._events)))
        self._over = False
        self._ending = Once()

    def headers(self) -> Mapping[str, str]:
        """Of the response."""
        return self._run.headers()

    async def first(self, hold_s: float) -> None:
        """Return when the first word is there or `hold_s` has passed. Raises what every provider said before it."""
        assert self._coming is not None
        await self._coming.within(hold_s)

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        if self._over:
            raise StopAsyncIteration
        try:
            coming = self._coming
            if coming is None:
                return await self._run.uncut(anext(self._events))
            if not await coming.within(self._ping_every_s):
                return self._wire.ping
            self._coming = None
            return coming.result
        except MidstreamError as err:
            # No finish reason and no end mark follow: a cut answer must not look complete.
            self._over = True
            await self._run.end(err.code)
            return self._wire.error(err)

    async def aclose(self) -> None:
        """Hang up; idempotent, and done even if whoever waits for it is cancelled."""
        await self._ending.run(self._close())

    async def _close(self) -> None:
        coming, self._coming = self._coming, None
        if coming is not None:
            await coming.drop()
        await self._events.aclose()
        await self._run.end("cancelled")


class _Run:
    """One relayed answer: its place, its times, and the record of its end."""

    def __init__(self, answer: Answer, relay: Relay) -> None:
        self.answer = answer
        self.relay = relay
        self._begun_s = answer.clock()
        self._ttft_s: float | None = None
        self._target: Target | None = None
        self._unnoted: Target | None = None
        self._release: Callable[[], None] | None = None
        self._delta = UpstreamDelta()
        self._charge: Charge | None = None
        self._pieces: tuple[str, ...] = ()
        self._cut = ""
        self._patience = Patience()
        self._ending = Once()

    async def __aenter__(self) -> _Run:
        try:
            self._release = self.relay.ports.hold(self)
        except MidstreamError as err:
            await self.end(err.code)  # nothing runs, but a reservation is held
            raise
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        await self.end(_status(error))

    async def abort(self, reason: str) -> None:
        """End it from outside: its reader gets AnswerCut with `reason`."""
        self._cut = reason
        self._patience.end()

    async def uncut(self, work: Awaitable[T]) -> T:
        """`work`, unless it is aborted meanwhile."""
        if self._cut:
            raise AnswerCut(f"the answer was cut: {self._cut}", next_step="ask again")
        try:
            return await self._patience.wait(work)
        except TimeoutError as err:
            raise AnswerCut(f"the answer was cut: {self._cut}", next_step="ask again") from err

    def rest_s(self) -> float:
        """Seconds left for the request."""
        return max(0.0, self.answer.context.deadline_at_s - self.answer.clock())

    def answered(self, target: Target) -> None:
        """The whole answer of `target` is here; when it began to speak is not known."""
        self._target = target
        self.relay.ports.board.answered(target, self.answer.context.model)

    def spoke(self, target: Target) -> None:
        """The first word of `target` is here."""
        self._target = self._unnoted = target
        self._ttft_s = self.answer.clock() - self._begun_s

    def _note(self) -> None:
        """For later decisions, when the first word has left: in a burst the others wait for what is done before.

        Before anything else becomes of the target: a failure that is told first would be forgotten with this.
        """
        target, self._unnoted = self._unnoted, None
        if target is not None and self._ttft_s is not None:
            self.relay.ports.board.started(target, self.answer.context.model, self._ttft_s, 0)

    async def pay(self, target: Target, *, whole: bool = False) -> None:
        """Before each attempt. Raises BudgetExceeded."""
        self._charge = None
        if costs(target):
            self._charge = await self.answer.ending.spending.begin(target, 0, self.relay.request.sampling.max_tokens)
            self._charge.whole = whole

    def failed(self, target: Target, err: MidstreamError) -> None:
        """`target` gave an error. It is left alone for a while, unless the fault was the request's."""
        if self._charge is not None and self._target is None:
            self._charge.asked = isinstance(err, LinkTimeout | LinkClosed)
        if not isinstance(err, RejectedError):
            board, spoke = self.relay.ports.board, self._target is not None
            board.failed(target, self.answer.context.model, self.answer.clock(), spoke=spoke)

    def take(self, delta: UpstreamDelta, pieces: tuple[str, ...] | None = None) -> None:
        """What the answer said."""
        self._delta = delta
        self._pieces = pieces if pieces is not None else ((delta.text,) if delta.text else ())
        if self._charge is not None:
            self._charge.ended = delta.finish is not None
            # A count that came before the end is not the whole one.
            self._charge.usage = delta.usage if delta.finish is not None else None
            self._charge.tokens = len(self._pieces)
            self._charge.most_made = sum(len(piece.encode("utf-8", "replace")) for piece in self._pieces)

    def headers(self) -> dict[str, str]:
        """Of the response; the target is known once it spoke."""
        answer = self.answer
        found = {
            "x-midstream-request-id": answer.context.id,
            "x-midstream-trace-id": answer.context.trace.trace_id,
            "x-midstream-reason": answer.reason,
            "x-midstream-max-tokens": str(answer.request.sampling.max_tokens),
            **answer.ending.reservation.headers,
        }
        if self._target is not None:
            found["x-midstream-target"] = self._target.name
        return found

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Bytes for the client, beginning with a first word. Raises most_telling() before it, the loss after it."""
        status = "cancelled"
        try:
            async with self:
                errors: list[tuple[str, MidstreamError]] = []
                for target in self.relay.targets:
                    engine, asked = _engine(target), self.answer.request
                    seen = RelayEvents(engine.codec, self.relay.request, asked.model, asked.include_usage)
                    held: list[bytes] = []
                    try:
                        await self.pay(target)
                        async with aclosing(engine.relayed_lines(self.relay.request, asked.stop)) as chunks:  # type: ignore[type-var]
                            async for chunk in chunks:
                                part, broken = self._told(seen, held, chunk, target)
                                if part is not None:
                                    yield part
                                    if self._unnoted is not None:
                                        self._note()
                                if broken is not None:
                                    raise broken
                                if seen.ended:
                                    break
                        if seen.finish is None:
                            raise LinkClosed(f"{target.name} ended the stream without a finish reason")
                        if not seen.ended and self.relay.dialect == "openai":
                            yield DONE
                        return
                    except MidstreamError as err:
                        self.failed(target, err)
                        if self._target is not None:
                            raise
                        errors.append((target.name, err))
                    finally:
                        self._keep(seen)
                raise most_telling(AllFailed(errors))
        except MidstreamError as err:
            status = err.code
            raise
        finally:
            await self.end(status)

    def _told(
        self, seen: RelayEvents, held: list[bytes], chunk: bytes, target: Target
    ) -> tuple[bytes | None, MidstreamError | None]:
        """What may go out after this chunk, and what is wrong with it. None: no word yet, and `held` waits for one."""
        if self.rest_s() <= 0:
            raise LinkTimeout("the request's deadline passed in the middle of the answer")
        broken: MidstreamError | None = None
        try:
            held.extend(seen.feed(chunk))
        except MidstreamError as err:
            broken = err
        if not seen.spoke:
            return None, broken
        if self._target is None:
            self.spoke(target)
        part = b"".join(held)
        held.clear()
        return part, broken

    def _keep(self, seen: RelayEvents) -> None:
        delta = UpstreamDelta("".join(seen.texts), finish=seen.finish, usage=seen.usage, calls=tuple(seen.calls))
        self.take(delta, tuple(seen.texts))

    async def end(self, status: str) -> None:
        """Give the place back, charge, record; once, and to the end even if whoever waits for it is cancelled."""
        await self._ending.run(self._end(status))

    async def _end(self, status: str) -> None:
        self._note()
        if self._release is not None:
            self._release()
        delta, answer = self._delta, self.answer
        usage = delta.usage or Usage(0, len(self._pieces))
        name = self._target.name if self._target is not None else None
        calls = _whole_calls(delta.calls)
        finish: FinishReason | None = delta.finish if status == "ok" else None
        await answer.ended(
            Made(
                status=status,
                finish=finish,
                usage=usage,
                sides=((name, usage.completion_tokens),) if name is not None else (),
                losers=(),
                pieces=self._pieces,
                calls=calls,
                shown=Message("assistant", delta.text, tool_calls=calls),
                ttft_s=self._ttft_s,
                total_s=answer.clock() - self._begun_s,
            )
        )


def _engine(target: Target) -> RelayingEngine:
    assert target.relay is not None, "relay_of looked"
    return target.relay


def _status(error: BaseException | None) -> str:
    if error is None:
        return "ok"
    return error.code if isinstance(error, MidstreamError) else "cancelled"


def _whole_calls(deltas: Sequence[CallDelta]) -> tuple[Mapping[str, Any], ...]:
    found: dict[int, dict[str, Any]] = {}
    for delta in deltas:
        call = found.setdefault(
            delta.index, {"id": delta.id, "type": "function", "function": {"name": delta.name, "arguments": ""}}
        )
        call["function"]["arguments"] += delta.arguments
    return tuple(found.values())

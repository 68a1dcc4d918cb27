"""The stream owner: one answer, one line of indices, whoever generates.

It opens the answer by race, lets a better target prefill ahead and cuts over to it, and when the generating side dies
or falls silent it goes on elsewhere from the last whole token. Every token leaves once and in order.
The law: the stream is the source's tokens up to the cut and what the target generates from that prefix.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from functools import partial
from math import floor

from attrs import evolve

from engines.port import Continuation
from gateway.ahead import Ahead
from gateway.attempt import Attempts, StreamPorts
from gateway.confidence import Judgement
from gateway.context import RequestContext
from gateway.dispatch import patience
from gateway.doubt import Doubt
from gateway.line import AnswerLine
from gateway.migration import Move, StreamView, batch_tokens, migrate
from gateway.pacing import reader_tokens_per_s
from gateway.race import AllFailed, Cleanup, Live, most_telling, race
from gateway.settings import GatewaySettings
from gateway.stops import Owned
from gateway.targets import Target, TargetView
from protocol.errors import EngineError, LinkTimeout, MidstreamError, ProtocolError, RejectedError
from protocol.events import HandedOver, SourceLost
from protocol.text import FinishReason, TextRequest, Token, Usage

SHORTEST_CUT_S = 1.0
"""A target that was prepared gets at least this long for its first token before the source goes on instead."""


class AnswerCut(EngineError):
    """The answer ended early: its engine was lost and no other one could continue."""

    http_status = 502
    code = "stream_truncated"


class StreamOwner:
    """Owns one answer. Iterate `tokens()` once; closing the iterator cancels everything it started.

    Args:
        starts: the plan: targets with the seconds after which they start.
        targets: every target that may ever see this request; nothing outside of it is touched.
    """

    def __init__(
        self,
        context: RequestContext,
        request: TextRequest,
        starts: Sequence[tuple[Target, float]],
        targets: Sequence[Target],
        ports: StreamPorts,
        settings: GatewaySettings,
        doubt: Doubt | None = None,
    ) -> None:
        self.finish: FinishReason | None = None
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.usage: Usage | None = None
        self.ttft_s: float | None = None
        self._context, self._request = context, request
        self._starts, self._targets = starts, targets
        self._ports, self._settings = ports, settings
        self._policy = evolve(context.policy.migration, consume_tokens_per_s=reader_tokens_per_s(context.policy))
        self._begun_s = ports.clock()
        self._line = AnswerLine()
        self._live: Live | None = None
        self._ahead: Ahead | None = None
        self._cleanup = Cleanup()
        self._attempts = Attempts(
            context, request, self._line, targets, ports, self._cleanup, settings.ahead_tokens, doubt is not None
        )
        self._moves, self._moved_at = 0, 0
        self._losses = 0
        self._failed: set[str] = set()
        self._asked: list[str] = []
        self._late: set[str] = set()
        self._aborted = ""
        self._doubt = doubt
        self._waited_s, self._waited_tokens, self._blocked_s = 0.0, 0, 0.0

    @property
    def sides(self) -> tuple[tuple[str, int], ...]:
        """(target, tokens) in order of delivery."""
        return self._line.sides

    @property
    def losers(self) -> tuple[str, ...]:
        """Targets that were asked for the first token and cancelled, because another one spoke or nobody waits."""
        return tuple(name for name in self._asked if name not in self._failed - self._late)

    async def tokens(self) -> AsyncGenerator[Owned, None]:
        """The answer's tokens, each once; `finish` is set when it ends by itself.

        A token is given when its characters are whole. Raises what refused the request before the first token, and
        AnswerCut or LinkTimeout after it.
        """
        try:
            await self._open()
            while self.finish is None:
                token = await self._next()
                if await self._cut_before(token):
                    continue
                self._accept(token)
                if not await self._believed():
                    continue
                while (owned := self._line.give(self.finish is not None)) is not None:
                    blocked_at_s = self._ports.clock()
                    yield owned
                    self._taken(owned, self._ports.clock() - blocked_at_s)
                if self.finish is None:
                    await self._steer()
        finally:
            await self._close()

    async def abort(self, reason: str) -> None:
        """End the answer from outside: its reader gets AnswerCut with `reason`."""
        self._aborted = reason
        if self._live is not None:
            await self._live.continuation.close()

    async def _open(self) -> None:
        failed_starts: list[tuple[Target, MidstreamError]] = []

        def failed_start(target: Target, err: MidstreamError) -> None:
            failed_starts.append((target, err))
            self._note_failure(target, err)

        def lost_race(target: Target, silent_s: float) -> None:
            if silent_s >= self._policy.stall_s:
                slow = LinkTimeout(f"{target.name} gave no first token within {silent_s:.1f} s")
                failed_starts.append((target, slow))
                self._late.add(target.name)
                # How long it was silent is remembered where the attempt ends.
                self._note_failure(target, slow, spoke=True)

        begin = partial(self._begin, at=0)
        try:
            live = await race(self._starts, begin, self._cleanup, failed_start, lost_race)
        except AllFailed as failed:
            raise most_telling(failed) from failed
        self._asked.remove(live.target.name)
        if failed_starts:
            # One record, whatever else failed on the way.
            self._tell_lost(*failed_starts[0], live.target, 0)
        self.prompt_tokens = live.continuation.prompt_tokens
        self.cached_tokens = live.continuation.cached_tokens
        self.ttft_s = self._ports.clock() - self._begun_s
        fresh = max(0, self.prompt_tokens - self.cached_tokens)
        self._ports.board.started(live.target, self._context.model, live.ttft_s, fresh, self.cached_tokens)
        self._ports.board.read(live.target, self._context.model, self._request.prompt)
        self._take(live)

    async def _begin(self, target: Target, at: int) -> Live:
        if self.ttft_s is None:
            self._asked.append(target.name)
        ahead = self._ahead
        if ahead is None or ahead.target is not target:
            return await self._attempts.begin(target, at)
        self._ahead = None
        return await self._attempts.begin(target, at, ahead)

    def _take(self, live: Live) -> None:
        """`live` generates from now on."""
        self._live = live
        self._waited_s, self._waited_tokens, self._blocked_s = 0.0, 0, 0.0
        if self._attempts.known(live.target) is None:
            self._cleanup.add(self._attempts.learn(live.target))

    def _source(self) -> Live:
        if self._live is None:
            raise RuntimeError("no engine generates")
        return self._live

    async def _next(self) -> Token:
        """The token at the next index, from whoever can make it."""
        while True:
            try:
                token = await self._pull(self._source())
            except MidstreamError as err:
                await self._fall_back(err)
                continue
            if token.index == self._line.next:
                return token
            if token.index > self._line.next:
                gap = ProtocolError(f"expected token {self._line.next}, got {token.index}", field="index")
                await self._fall_back(gap)

    async def _pull(self, live: Live) -> Token:
        if live.first is not None:
            token, live.first = live.first, None
            return token
        begun_s = self._ports.clock()
        # Without another engine there is nothing better to do than wait.
        alone = all(target is live.target for target in self._targets)
        limit_s = self._attempts.rest_s() if alone else min(self._policy.stall_s, self._attempts.rest_s())
        try:
            async with asyncio.timeout(limit_s):
                token = await anext(live.tokens)
        except StopAsyncIteration as err:
            raise EngineError(f"{live.target.name} ended without a finish reason") from err
        except TimeoutError as err:
            raise LinkTimeout(f"{live.target.name} was silent for {limit_s:.1f} s") from err
        self._waited_s += self._ports.clock() - begun_s
        self._waited_tokens += 1
        return token

    def _accept(self, token: Token) -> None:
        self._line.accept(token, self._source().target.name)
        self.finish = token.finish
        if self.finish is None and self._line.next >= self._request.sampling.max_tokens:
            self.finish = "length"
        if self._ahead is not None:
            self._ahead.news()
        if self._line.whole < self._line.next:
            # Held back for the rest of its character, which must not wait for the reader to take this part.
            self._source().continuation.acknowledge(token.index)

    def _taken(self, owned: Owned, blocked_s: float) -> None:
        self._blocked_s += blocked_s
        live = self._source()
        if owned.side == live.target.name:
            live.continuation.acknowledge(owned.token.index)

    # Doubt.

    async def _believed(self) -> bool:
        """Whether the answer so far may be given; False while it is held back, and when it was begun anew."""
        doubt, source = self._doubt, self._source()
        if doubt is None:
            return True
        if not source.target.local or self._line.called:
            self._doubt = None
            return True
        found = doubt.look(source.target, self._context.model, self._line.made, self.finish is not None)
        if found.act == "wait":
            return False
        self._doubt = None
        return found.act == "keep" or not await self._begin_anew(doubt, found)

    async def _begin_anew(self, doubt: Doubt, found: Judgement) -> bool:
        """Let a better target make the whole answer; True when it has begun. Nobody has seen a token of the old one."""
        source = self._source()
        held = self._line.take_back()
        starts = [(target, place * self._policy.stall_s) for place, target in enumerate(doubt.better.targets)]
        try:
            live = await race(starts, partial(self._begin, at=0), self._cleanup, self._note_failure)
        except AllFailed:
            self._line.put_back(held)
            return False
        if self._ahead is not None:
            self._give_up_ahead(None)
        self._stop_source(source)
        self.finish = None
        self._take(live)
        self._tell_moved(source.target, live.target, 0, found.reason)
        return True

    # Planned moves.

    async def _steer(self) -> None:
        """Let the pure decision look at the stream after a token, and do what it says."""
        if len(self._targets) < 2 or (self._ahead is None and self._moves >= self._policy.max_moves):
            return
        if self._ahead is not None and self._ahead.error is not None:
            self._give_up_ahead(self._ahead.error)
        ahead = self._ahead
        by_ids = ahead is not None and self._attempts.by_ids(ahead.target)
        safe = by_ids and self._line.may_cut(None, by_ids=True)
        await self._do(self._decide(self._line.next if safe else None))

    async def _cut_before(self, token: Token) -> bool:
        """The text path cuts in front of a token that begins a word; that token is then made anew by the target."""
        ahead = self._ahead
        if ahead is None or not ahead.ready or token.finish is not None or self._attempts.by_ids(ahead.target):
            return False
        if not self._line.may_cut(token.data, by_ids=False):
            return False
        return await self._do(self._decide(self._line.next))

    def _decide(self, safe_at: int | None) -> Move:
        now_s = self._ports.clock()
        allowed = [target for target in self._targets if target.name not in self._failed or self._is_source(target)]
        views = [self._ports.priced(self._view_of(target), self._context.policy.dispatch) for target in allowed]
        return migrate(self._view(safe_at, now_s), views, self._ports.rtt_s(), self._policy)

    def _is_source(self, target: Target) -> bool:
        return target is self._source().target

    def _view(self, safe_at: int | None, now_s: float) -> StreamView:
        ahead = self._ahead
        generated = self._line.next
        read_s = now_s - self._begun_s - (self.ttft_s or 0.0)
        return StreamView(
            generated=generated,
            consumed=min(generated, 1 + floor(read_s * self._policy.consume_tokens_per_s)),
            safe_at=safe_at,
            source=self._source().target.name,
            remaining_tokens=self._ports.lengths.remaining_tokens(generated, self._request.sampling.max_tokens),
            moves=self._moves,
            moved_at=self._moved_at,
            preparing=ahead.target.name if ahead else None,
            prepared=ahead.target.name if ahead and ahead.ready else None,
            lag_tokens=ahead.lag_tokens if ahead else 0,
            read_s=ahead.read_s(self._ports.rtt_s().get(ahead.target.name, 0.0)) if ahead else 0.0,
            prompt_tokens=self.prompt_tokens,
            source_tokens_per_s=self._rate(),
        )

    def _rate(self) -> float | None:
        if self._waited_tokens < 4 or self._waited_s <= 0:
            return None
        return self._waited_tokens / self._waited_s

    async def _do(self, move: Move) -> bool:
        """True when the answer moved."""
        if move.act == "prepare":
            target = next(target for target in self._targets if target.name == move.target)
            self._ahead = Ahead(
                target,
                self._prepare_ahead,
                self._attempts.tokens_for,
                lambda: self._line.whole,
                # Asked each time, as preparing it tells what it can do.
                lambda: batch_tokens(self._view_of(target), self._policy),
                self._ports.clock,
            )
        elif move.act == "drop":
            self._give_up_ahead(None)
        elif move.act == "cut" and self._ahead is not None:
            return await self._cut_over(self._ahead, move)
        return False

    def _view_of(self, target: Target) -> TargetView:
        return self._ports.board.view(target, self._context.model, self._ports.clock())

    async def _prepare_ahead(self, target: Target, count: int) -> Continuation:
        await self._attempts.learn(self._source().target)
        return await self._attempts.prepare(target, count)

    def _give_up_ahead(self, error: MidstreamError | None) -> None:
        ahead, self._ahead = self._ahead, None
        if ahead is None:
            return
        if error is not None:
            self._note_failure(ahead.target, error)
        self._cleanup.add(ahead.close())

    async def _cut_over(self, ahead: Ahead, move: Move) -> bool:
        """Start the target at the cut. A source that costs nothing runs on until the target spoke, and goes on if it
        does not; another one stops at the cut and is revived then. True when somebody else generates now.
        """
        source = self._source()
        at = self._line.next
        if not move.keep_source:
            self._stop_source(source)
        try:
            async with asyncio.timeout(max(SHORTEST_CUT_S, self._policy.stall_s / 2)):
                live = await self._begin(ahead.target, at)
            self._check_first(live, at)
        except (TimeoutError, MidstreamError) as err:
            silent = LinkTimeout(f"{ahead.target.name} was silent at the cut-over")
            error = err if isinstance(err, MidstreamError) else silent
            self._note_failure(ahead.target, error)
            if move.keep_source:
                return False
            await self._go_on(ahead.target, error, at, source.target)
            return True
        if move.keep_source:
            self._stop_source(source)
        self._take(live)
        self._moves, self._moved_at = self._moves + 1, at
        self._tell_moved(source.target, live.target, at, move.reason)
        return True

    def _stop_source(self, source: Live) -> None:
        self._live = None
        self._settle(source)
        self._cleanup.add(source.close())

    def _tell_moved(self, source: Target, target: Target, at: int, reason: str) -> None:
        self._ports.emit(
            HandedOver(
                at_s=self._ports.clock(),
                request_id=self._context.id,
                source=source.name,
                target=target.name,
                index=at,
                local=target.local,
                reason=reason,
            )
        )

    def _check_first(self, live: Live, at: int) -> None:
        if live.first is None or live.first.index != at:
            self._cleanup.add(live.close())
            raise ProtocolError(f"{live.target.name} did not start at token {at}", field="index")

    # Losses.

    async def _fall_back(self, err: MidstreamError) -> None:
        """Go on elsewhere from the last whole token; the part of a character that the lost side left is made anew."""
        lost = self._source()
        self._note_failure(lost.target, err, spoke=True)
        self._stop_source(lost)
        await self._go_on(lost.target, err, self._line.drop_part())

    async def _go_on(self, lost: Target, err: MidstreamError, at: int, first: Target | None = None) -> None:
        """Let somebody make the tokens from `at` on: `first`, if there is one, before all others."""
        self._losses += 1
        starts = self._fallback_starts(lost, at, first)
        if self._aborted:
            raise AnswerCut(f"the answer was cut at token {at}: {self._aborted}", next_step="ask again") from err
        if self._line.called or self._losses > self._settings.max_losses or self._attempts.rest_s() <= 0:
            raise self._cut_error(at, err) from err
        try:
            live = await race(starts, partial(self._begin, at=at), self._cleanup, self._note_failure)
        except AllFailed as failed:
            raise self._cut_error(at, err) from failed
        if self._ahead is not None:
            self._give_up_ahead(None)
        self._take(live)
        self._tell_lost(lost, err, live.target, at)

    def _tell_lost(self, lost: Target, err: MidstreamError, target: Target, at: int) -> None:
        self._ports.emit(
            SourceLost(
                at_s=self._ports.clock(),
                request_id=self._context.id,
                source=lost.name,
                target=target.name,
                index=at,
                reason=str(err),
            )
        )

    def _fallback_starts(self, lost: Target, at: int, first: Target | None) -> list[tuple[Target, float]]:
        """The prepared target first, then others (local ones before), those that failed already, the lost one last."""
        first = self._ahead.target if first is None and self._ahead is not None else first

        def place(target: Target) -> tuple[bool, bool, bool, bool]:
            return target is lost, target is not first, target.name in self._failed, not target.local

        starts, after_s = [], 0.0
        now_s = self._ports.clock()
        for target in sorted(self._targets, key=place):
            starts.append((target, after_s))
            view = self._ports.board.view(target, self._context.model, now_s)
            after_s += patience(view, self.prompt_tokens + at, self._policy.stall_s)
        return starts

    def _cut_error(self, at: int, err: MidstreamError) -> MidstreamError:
        if self._attempts.rest_s() <= 0:
            return LinkTimeout(f"the answer was cut at token {at}: the request's deadline passed")
        return AnswerCut(f"the answer was cut at token {at}: {err.message}", next_step="ask again")

    def _note_failure(self, target: Target, err: MidstreamError, *, spoke: bool = False) -> None:
        self._failed.add(target.name)
        if not isinstance(err, RejectedError):
            self._ports.board.failed(target, self._context.model, self._ports.clock(), spoke=spoke)

    def _settle(self, live: Live) -> None:
        """Take the source's own count; remember its decode rate, unless the reader was what held it back."""
        self._recount(live)
        if self._waited_s > self._blocked_s:
            self._ports.board.decoded(live.target, self._context.model, self._waited_tokens, self._waited_s)

    def _recount(self, live: Live) -> None:
        """Some sources count their prompt only when they end, and some count tokens that are not shown."""
        continuation = live.continuation
        if not self.prompt_tokens:
            self.prompt_tokens, self.cached_tokens = continuation.prompt_tokens, continuation.cached_tokens
        usage = getattr(continuation, "usage", None)
        if isinstance(usage, Usage) and self.finish is not None and not (self._moves or self._losses):
            self.usage = usage

    async def _close(self) -> None:
        live, self._live = self._live, None
        if self._ahead is not None:
            self._give_up_ahead(None)
        if live is not None:
            self._settle(live)
            self._cleanup.add(live.close())
        if self.finish is not None:
            self._ports.lengths.add(self._line.next)
        await self._cleanup.drain()

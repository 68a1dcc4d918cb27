"""The money of one request: an attempt is reserved before it begins and charged by what its upstream counted.

Every attempt at a target that costs money counts: those that lost a race, fell silent, or only prefilled ahead. What an
upstream never said stays reserved at the most it can have been, so that a budget holds by the upstream's own ledger.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

from attrs import define, field, frozen

from engines.port import Continuation
from engines.wrapping import WrappedContinuation
from gateway.ports import Reservation
from gateway.prices import most_prompt_tokens
from gateway.targets import Target
from protocol.chat import ChatRequest, prompt_bytes, tools_bytes
from protocol.errors import BudgetExceeded, LinkClosed, LinkTimeout, MidstreamError
from protocol.text import ImagePart, Message, TextRequest, Token, Usage

BYTES_PER_TOKEN = 4
"""Of a usual text, for what is told and billed while the upstream's count is not known."""

MOST_IMAGE_TOKENS = 4096
"""A picture counts as at most this many tokens at any vendor."""

CUT_SLACK_TOKENS = 256
"""Tokens that may have been made beyond those that came, when a stream was cut: what buffers on the way hold."""

LAST_WORD_S = 0.5
"""After the last token that was asked for, the upstream gets this long to say what it took."""

ROUNDING = 1e-12


@frozen
class PromptSize:
    """Tokens of a prompt before anybody counted them. most: no tokenizer makes more of it."""

    likely_tokens: int
    most_tokens: int


def prompt_size(chat: ChatRequest) -> PromptSize:
    """Of the whole request: turns, tools and pictures."""
    size_bytes = prompt_bytes(chat.prompt) + tools_bytes(chat.tools)
    turns = 1 if isinstance(chat.prompt, str) else len(chat.prompt)
    pictures = sum(_pictures(turn) for turn in chat.prompt) if chat.has_images else 0
    likely = size_bytes // BYTES_PER_TOKEN + 1
    return PromptSize(likely, most_prompt_tokens(size_bytes, turns) + pictures * MOST_IMAGE_TOKENS)


def _pictures(turn: object) -> int:
    parts = turn.parts if isinstance(turn, Message) else ()
    return sum(isinstance(part, ImagePart) for part in parts)


def most_money(chat: ChatRequest, prompt: PromptSize, targets: Sequence[Target]) -> float:
    """The most that one attempt can cost at the dearest of these targets."""
    answer = 0 if chat.endpoint == "embedding" else chat.sampling.max_tokens
    return max((prompt.most_tokens * t.price_in + answer * t.price_out for t in targets), default=0.0)


@define(eq=False)
class Charge:
    """One attempt. asked: the upstream may have begun; ended: it said by itself that it was done.

    tokens: pieces that came of the answer; most_made: tokens that they can have been. whole: it comes in one body, so
    nothing is known of it before its end.
    """

    target: Target
    prefix_tokens: int
    answer_tokens: int
    size: PromptSize
    tokens: int = 0
    most_made: int = 0
    whole: bool = False
    asked: bool = True
    ended: bool = False
    usage: Usage | None = None

    @property
    def most(self) -> float:
        return self._money(self.size.most_tokens + self.prefix_tokens, self.answer_tokens)

    @property
    def known(self) -> float:
        """What it took, as counted by the upstream, or as seen from here."""
        if self.usage is not None:
            return self._money(self.usage.prompt_tokens, self.usage.completion_tokens, self.usage.cached_tokens)
        if not self.asked:
            return 0.0
        return self._money(self.size.likely_tokens + self.prefix_tokens, self.tokens)

    @property
    def held(self) -> float:
        """The most that it can have taken, by what is known now."""
        if self.usage is not None or not self.asked:
            return self.known
        made = self.answer_tokens
        if self.ended or not self.whole:
            slack = 0 if self.ended else CUT_SLACK_TOKENS
            made = min(made, max(self.tokens, self.most_made) + slack)
        return max(self.known, self._money(self.size.most_tokens + self.prefix_tokens, made))

    def _money(self, prompt_tokens: int, answer_tokens: int, cached_tokens: int = 0) -> float:
        target, cached = self.target, min(cached_tokens, prompt_tokens)
        cached_price = target.price_in if target.price_cached_in is None else target.price_cached_in
        money = (prompt_tokens - cached) * target.price_in + cached * cached_price
        return money + answer_tokens * target.price_out


@define(eq=False)
class Spending:
    """All attempts of one request. reserved: what its reservation holds at the beginning."""

    reservation: Reservation
    reserved: float
    size: PromptSize
    charges: list[Charge] = field(factory=list, init=False)

    async def prepare(self, target: Target, request: TextRequest, deadline_s: float, *, resends: bool) -> Continuation:
        """`target.engine.prepare`, paid for. Raises BudgetExceeded instead of asking for what cannot be paid.

        resends: the target reads the whole prompt again, at its price, whenever it is extended.
        """
        if not costs(target):
            return await target.engine.prepare(request, deadline_s)
        charge = await self.begin(target, len(request.prefix), request.sampling.max_tokens)
        try:
            inner = await target.engine.prepare(request, deadline_s)
        except MidstreamError as err:
            charge.asked = isinstance(err, LinkTimeout | LinkClosed)
            raise
        return PaidContinuation(self, charge, inner, resends)

    async def embed(self, target: Target, texts: Sequence[str]) -> Sequence[Sequence[float]]:
        """`target.engine.embed`, paid for by the size of the texts, for vectors come without a count."""
        if not costs(target):
            return await target.engine.embed(texts)
        charge = await self.begin(target, 0, 0)
        try:
            vectors = await target.engine.embed(texts)
        except MidstreamError as err:
            charge.asked = isinstance(err, LinkTimeout | LinkClosed)
            raise
        charge.ended = True
        return vectors

    async def begin(self, target: Target, prefix_tokens: int, max_tokens: int) -> Charge:
        """Reserve one attempt. Raises BudgetExceeded."""
        charge = Charge(target, prefix_tokens, max(0, max_tokens - prefix_tokens), self.size)
        missing = sum(one.held for one in self.charges) + charge.most - self.reserved
        if missing > ROUNDING:
            if not await self.reservation.extend(missing):
                raise BudgetExceeded(
                    f"another attempt, at {target.name}, may cost more than is left of the budget",
                    next_step="ask for a model of this machine, or have the budget raised",
                )
            self.reserved += missing
        self.charges.append(charge)
        return charge

    @property
    def known(self) -> float:
        """What the request took."""
        return sum(charge.known for charge in self.charges)

    @property
    def held(self) -> float:
        """What the budget must go on holding for it."""
        return sum(charge.held for charge in self.charges)


def costs(target: Target) -> bool:
    """Whether asking this target costs money."""
    return target.price_in > 0.0 or target.price_out > 0.0


class PaidContinuation(WrappedContinuation):
    """A continuation whose tokens and end are noted in its charge."""

    def __init__(self, spending: Spending, charge: Charge, inner: Continuation, resends: bool) -> None:
        self._spending = spending
        super().__init__(inner)
        self._charge = charge
        self._resends = resends

    @property
    def usage(self) -> Usage | None:
        """The upstream's own count, once it has told it."""
        self._note_usage()
        return self._charge.usage

    async def extend(self, tokens: Sequence[Token]) -> None:
        old = self._charge
        prefix_tokens = old.prefix_tokens + len(tokens)
        if self._resends:
            self._note_usage()
            limit_tokens = old.prefix_tokens + old.answer_tokens
            self._charge = await self._spending.begin(old.target, prefix_tokens, limit_tokens)
        else:
            old.prefix_tokens = prefix_tokens
        await self._inner.extend(tokens)

    def start(self, at: int, ahead_tokens: int) -> AsyncIterator[Token]:
        return self._counted(self._inner.start(at, ahead_tokens))

    def acknowledge(self, index: int) -> None:
        self._inner.acknowledge(index)

    async def close(self) -> None:
        self._note_usage()
        await self._inner.close()

    async def _counted(self, tokens: AsyncIterator[Token]) -> AsyncIterator[Token]:
        charge = self._charge
        try:
            async for token in tokens:
                charge.tokens += bool(token.data) or token.finish is None
                # A piece without an id may have been a token a byte.
                charge.most_made += len(token.data) if token.id is None else bool(token.data)
                last = await self._last_word(tokens) if self._is_last(token) else None
                if token.finish is not None or (last is not None and last.finish is not None):
                    charge.ended = True
                    self._note_usage()
                yield token
                if last is not None:
                    yield last
        finally:
            aclose: Any = getattr(tokens, "aclose", None)
            if aclose is not None:
                await aclose()

    def _is_last(self, token: Token) -> bool:
        return token.finish is None and self._charge.tokens == self._charge.answer_tokens

    async def _last_word(self, tokens: AsyncIterator[Token]) -> Token | None:
        """Whoever reads stops at the bound; the finish mark, which brings the usage, comes right behind it."""
        coming = asyncio.ensure_future(_next(tokens))
        await asyncio.wait({coming}, timeout=LAST_WORD_S)
        if coming.done():
            return coming.result()
        coming.cancel()
        await asyncio.wait({coming})
        return None if coming.cancelled() else coming.result()

    def _note_usage(self) -> None:
        usage = getattr(self._inner, "usage", None)
        if isinstance(usage, Usage):
            self._charge.usage = usage


async def _next(tokens: AsyncIterator[Token]) -> Token | None:
    return await anext(tokens, None)

"""What one request spends: attempts are reserved before they begin, and held for what their upstream did not tell."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping

import pytest
from attrs import define, evolve, field

from engines.fakes_text import Failure, FakeTextEngine
from engines.port import Continuation
from gateway.ports import Spent
from gateway.spending import CUT_SLACK_TOKENS, PaidContinuation, PromptSize, Spending, most_money, prompt_size
from gateway.targets import Target
from protocol.chat import ChatRequest
from protocol.errors import BudgetExceeded, EngineError, LinkTimeout, MidstreamError
from protocol.text import ImagePart, Message, Sampling, TextPart, TextRequest, Token, Usage

SIZE = PromptSize(likely_tokens=10, most_tokens=50)
REQUEST = TextRequest("m", "hello", Sampling(max_tokens=20))
IN, OUT = 1e-6, 1e-5


@define(eq=False)
class Purse:
    """A reservation with so much more money to give."""

    more: float = 0.0
    degrade: bool = False
    headers: Mapping[str, str] = field(factory=dict)

    async def extend(self, money: float) -> bool:
        if money > self.more:
            return False
        self.more -= money
        return True

    async def settle(self, spent: Spent) -> None: ...

    async def release(self) -> None: ...


class Counting(FakeTextEngine):
    """An engine whose generations tell a usage when they ended, as HTTP upstreams do."""

    async def prepare(self, request: TextRequest, deadline_s: float) -> Continuation:  # type: ignore[override]
        return _Counted(await super().prepare(request, deadline_s))


class _Counted:
    def __init__(self, inner: Continuation) -> None:
        self._inner = inner
        self.usage: Usage | None = None

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    async def start(self, at: int, ahead_tokens: int) -> AsyncIterator[Token]:
        made = 0
        async for token in self._inner.start(at, ahead_tokens):
            made += bool(token.data)
            if token.data:
                yield evolve(token, finish=None)
            if token.finish is not None:
                self.usage = Usage(12, made + 100)  # tokens that nobody sees count as well
                yield Token(index=at + made, id=None, data=b"", finish=token.finish)


def target(engine: FakeTextEngine | None = None, **changes: object) -> Target:
    made = Target(
        "cloud", False, engine or FakeTextEngine(answer_tokens=5), frozenset({"m"}), price_in=IN, price_out=OUT
    )
    return evolve(made, **changes)  # type: ignore[arg-type]


def spending(reserved: float = 1.0, more: float = 0.0) -> Spending:
    return Spending(Purse(more), reserved, SIZE)


async def run(paid: Spending, where: Target, request: TextRequest = REQUEST, stop_after: int = 99) -> int:
    continuation = await paid.prepare(where, request, 5.0, resends=True)
    tokens, seen = continuation.start(len(request.prefix), 32), 0
    async for token in tokens:
        seen += 1
        continuation.acknowledge(token.index)
        if seen == stop_after:
            break
    await tokens.aclose()  # type: ignore[attr-defined]
    await continuation.close()
    return seen


async def test_an_attempt_costs_what_its_upstream_counted() -> None:
    paid = spending()
    await run(paid, target(Counting(answer_tokens=5)))
    assert paid.known == paid.held == pytest.approx(12 * IN + 105 * OUT)


async def test_without_a_count_the_budget_holds_the_most_that_the_prompt_can_be() -> None:
    paid = spending()
    await run(paid, target())
    assert paid.known == pytest.approx(10 * IN + 5 * OUT)
    assert paid.held == pytest.approx(50 * IN + 5 * OUT)


async def test_a_piece_without_an_id_may_have_been_a_token_a_byte() -> None:
    paid = spending()
    await run(paid, target(FakeTextEngine(says=[b"one", b" two"])))
    assert paid.held == pytest.approx(50 * IN + 7 * OUT)


async def test_an_answer_that_comes_whole_may_have_been_made_whole_when_it_was_cut() -> None:
    paid = spending()
    charge = await paid.begin(target(), 0, 2000)
    assert charge.held == pytest.approx(50 * IN + CUT_SLACK_TOKENS * OUT)
    charge.whole = True
    assert charge.held == pytest.approx(50 * IN + 2000 * OUT)


async def test_a_stream_that_was_cut_may_have_made_more_than_came() -> None:
    paid = spending()
    await run(
        paid, target(Counting(answer_tokens=500)), evolve(REQUEST, sampling=Sampling(max_tokens=400)), stop_after=3
    )
    assert paid.known == pytest.approx(10 * IN + 3 * OUT)
    assert paid.held == pytest.approx(50 * IN + (3 + CUT_SLACK_TOKENS) * OUT)


async def test_a_bound_that_is_met_still_hears_the_count() -> None:
    """Readers stop at max_tokens; the usage comes with the mark behind the last token."""
    paid = spending()
    request = evolve(REQUEST, sampling=Sampling(max_tokens=5))
    await run(paid, target(Counting(answer_tokens=5)), request, stop_after=5)
    assert paid.known == pytest.approx(12 * IN + 105 * OUT)


@pytest.mark.parametrize(("error", "asked"), [(EngineError("refused"), False), (LinkTimeout("silence"), True)])
async def test_a_refusal_costs_nothing_and_a_silence_may(error: MidstreamError, asked: bool) -> None:
    paid = spending()
    with pytest.raises(type(error)):
        await run(paid, target(FakeTextEngine(failures=[Failure("prepare", error)])))
    assert paid.held == pytest.approx(50 * IN + 20 * OUT if asked else 0.0)
    assert paid.known == pytest.approx(10 * IN if asked else 0.0)


async def test_another_attempt_is_reserved_before_it_is_asked() -> None:
    one = 50 * IN + 20 * OUT
    paid = spending(reserved=one, more=one / 2)
    silent, next_ = FakeTextEngine(failures=[Failure("prepare", LinkTimeout("silence"))]), FakeTextEngine()
    with pytest.raises(LinkTimeout):
        await run(paid, target(silent))
    with pytest.raises(BudgetExceeded):
        await run(paid, target(next_))
    assert next_.prepared == []
    rich = spending(reserved=one, more=one)
    for engine in (FakeTextEngine(failures=[Failure("prepare", LinkTimeout("silence"))]), next_):
        try:
            await run(rich, target(engine))
        except LinkTimeout:
            continue
    assert len(next_.prepared) == 1


async def test_a_prompt_that_is_sent_again_is_paid_again() -> None:
    for resends, attempts in ((True, 3), (False, 1)):
        paid = spending(reserved=10.0)
        continuation = await paid.prepare(target(), REQUEST, 5.0, resends=resends)
        made = FakeTextEngine(answer_tokens=5)
        for index in range(2):
            await continuation.extend([made.said("hello", index)])
        await continuation.close()
        assert len(paid.charges) == attempts
        assert paid.charges[-1].prefix_tokens == 2


async def test_what_costs_nothing_is_not_looked_at() -> None:
    paid = spending(reserved=0.0)
    continuation = await paid.prepare(target(price_in=0.0, price_out=0.0), REQUEST, 5.0, resends=True)
    assert not isinstance(continuation, PaidContinuation) and paid.charges == []
    await continuation.close()


async def test_vectors_are_paid_by_the_size_of_their_texts() -> None:
    paid = spending()
    await paid.embed(target(), ["a"])
    assert (paid.known, paid.held) == (pytest.approx(10 * IN), pytest.approx(50 * IN))


def test_the_bound_counts_turns_tools_and_pictures() -> None:
    turn = Message("user", "four", parts=(TextPart("four"), ImagePart(data=b"x", media_type="image/png")))
    plain = ChatRequest("m", (Message("user", "four"),), Sampling(max_tokens=10))
    with_picture = evolve(plain, prompt=(turn,))
    assert prompt_size(plain).most_tokens >= 4 + 16
    assert prompt_size(with_picture).most_tokens == prompt_size(plain).most_tokens + 4096
    assert most_money(plain, SIZE, [target(), target(price_out=0.0)]) == pytest.approx(50 * IN + 10 * OUT)
    assert most_money(evolve(plain, endpoint="embedding"), SIZE, [target()]) == pytest.approx(50 * IN)
    assert most_money(plain, SIZE, []) == 0.0

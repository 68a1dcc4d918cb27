"""What every TextEngine must do, checked on all of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import pytest
from attrs import evolve

from engines.port import Continuation, SpokenContinuation
from protocol.errors import BadRequest, ContextOverflow, Full, Unsupported
from protocol.text import Message, Prompt, Sampling, TextRequest, Token
from tests.contract.text_engines import ENGINES, Made

PROMPT = "Once upon a time"
COUNT = 10


@pytest.fixture(params=list(ENGINES))
async def made(request: pytest.FixtureRequest, model_file: Callable[[str], Path]) -> AsyncIterator[Made]:
    async with ENGINES[request.param](model_file) as found:
        yield found


def ask(prompt: Prompt = PROMPT, count: int = COUNT, prefix: Sequence[Token] = (), **sampling: int) -> TextRequest:
    return TextRequest("m", prompt, Sampling(max_tokens=count, **sampling), prefix=tuple(prefix))


async def take(continuation: Continuation, at: int = 0, count: int = 1000, acknowledge: bool = True) -> list[Token]:
    """Up to `count` tokens of a started continuation."""
    taken: list[Token] = []
    async for token in continuation.start(at, 1000):
        taken.append(token)
        if acknowledge:
            continuation.acknowledge(token.index)
        if len(taken) == count:
            break
    await continuation.close()
    return taken


def folded(made: Made, tokens: list[Token]) -> list[Token]:
    """The tokens with a mark of a full answer put onto the last one, where an engine gives it by itself."""
    if made.by_text and tokens[-1].finish == "length" and not tokens[-1].data and len(tokens) > 1:
        return [*tokens[:-2], evolve(tokens[-2], finish="length")]
    return tokens


async def test_indices_are_contiguous_and_the_last_token_ends_the_answer(made: Made) -> None:
    continuation = await made.engine.prepare(ask(logprobs=2), 20)
    assert made.by_text or continuation.prompt_tokens >= 4
    tokens = folded(made, await take(continuation))
    assert continuation.prompt_tokens >= 4
    assert [token.index for token in tokens] == list(range(COUNT))
    assert [token.finish for token in tokens] == [None] * (COUNT - 1) + ["length"]
    assert all(token.data and (made.by_text or token.id is not None) for token in tokens)
    assert all(token.logprob is None or token.logprob <= 0 for token in tokens)
    if (await made.engine.capabilities()).logprobs:
        assert all(token.alternatives for token in tokens if token.logprob is not None)
    assert made.engine.load().running == 0


async def test_an_answer_that_ends_by_itself_says_stop(made: Made) -> None:
    question = (Message("user", "What is the capital of France? One word."),)
    tokens = await take(await made.engine.prepare(ask(question, 100), 20))
    assert tokens[-1].finish == "stop"
    assert tokens[-1].data == b""
    assert [token.index for token in tokens] == list(range(len(tokens)))
    assert len(tokens) < 100


@pytest.mark.parametrize("by", ["ids", "ids alone", "text"])
async def test_an_answer_goes_on_from_a_prefix_and_what_extends_it(made: Made, by: str) -> None:
    whole = folded(made, await take(await made.engine.prepare(ask(), 20)))
    given = whole if by == "ids" else [evolve(token, id=None, logprob=None, margin=None) for token in whole]
    if by == "ids alone":
        if (await made.engine.capabilities()).vocabulary is None:
            pytest.skip("ids cross to an engine whose vocabulary is known")
        given = [Token(index=token.index, id=token.id, data=b"") for token in whole]
    continuation = await made.engine.prepare(ask(prefix=given[:3]), 20)
    await continuation.extend(given[3:5])
    await continuation.extend(given[5:6])
    rest = folded(made, await take(continuation, 6))
    assert [token.index for token in rest] == list(range(6, COUNT))
    assert rest[-1].finish == "length"
    if made.exact:
        assert [token.data for token in rest] == [token.data for token in whole[6:]]


async def test_generation_pauses_ahead_of_the_consumer(made: Made) -> None:
    continuation = await made.engine.prepare(ask(count=30), 20)
    stream = continuation.start(0, 3)
    taken = [await anext(stream) for _ in range(3)]
    waiting = asyncio.ensure_future(anext(stream))
    done, _ = await asyncio.wait([waiting], timeout=0.3)
    assert not done, "a fourth token came without credit"
    continuation.acknowledge(0)
    taken.append(await waiting)
    continuation.acknowledge(3)
    async for token in stream:
        continuation.acknowledge(token.index)
        taken.append(token)
    assert [token.index for token in folded(made, taken)] == list(range(30))
    await continuation.close()


async def test_a_token_that_is_told_before_the_start_is_the_first_one(made: Made) -> None:
    continuation = await made.engine.prepare(ask(), 20)
    told = continuation.spoken() if isinstance(continuation, SpokenContinuation) else None
    first, *_ = await take(continuation, count=1)
    if told is not None:
        assert (told.index, told.id, told.data) == (0, first.id, first.data)
        continuation = await made.engine.prepare(ask(), 20)
        assert isinstance(continuation, SpokenContinuation)
        await continuation.extend([first])
        after = continuation.spoken()
        assert after is None or after.index == 1
        assert (await take(continuation, 1, 1))[0].index == 1


async def test_closing_one_generation_leaves_the_other_alone(made: Made) -> None:
    first, second = await made.engine.prepare(ask(count=400), 20), await made.engine.prepare(ask(count=12), 20)
    waiting = [asyncio.ensure_future(made.engine.prepare(ask(), 20)) for _ in range(made.room)]
    await asyncio.sleep(0)
    with pytest.raises(Full) as full:
        await made.engine.prepare(ask(), 20)
    assert full.value.retry_after_s > 0
    for one in waiting:
        one.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    stream = first.start(0, 500)
    await anext(stream)
    await first.close()
    await first.close()
    assert [token.index async for token in stream][3:] == [], "tokens came after close"
    assert len(folded(made, await take(second))) == 12
    assert made.engine.load().running == 0


async def test_cancelling_a_prepare_frees_its_place(made: Made) -> None:
    await made.engine.capabilities()
    preparing = asyncio.ensure_future(made.engine.prepare(ask("word " * 400), 20))
    await asyncio.sleep(0.02)
    preparing.cancel()
    await asyncio.wait([preparing])
    if not preparing.cancelled():
        await preparing.result().close()
    both = [await made.engine.prepare(ask(count=2), 20) for _ in range(made.slots)]
    assert [len(folded(made, await take(one))) for one in both] == [2] * made.slots


async def test_an_overlong_prompt_is_refused_with_its_numbers(made: Made) -> None:
    context_tokens = (await made.engine.capabilities()).context_tokens
    with pytest.raises(ContextOverflow) as overflow:
        await made.engine.prepare(ask("word " * (context_tokens + 10)), 20)
    assert overflow.value.context_tokens == context_tokens
    assert overflow.value.prompt_tokens > context_tokens
    assert made.engine.load().running == 0


async def test_max_tokens_counts_the_prefix(made: Made) -> None:
    whole = folded(made, await take(await made.engine.prepare(ask(count=4), 20)))
    prefix = [evolve(token, finish=None) for token in whole]
    rest = await take(await made.engine.prepare(ask(count=4, prefix=prefix), 20), 4)
    assert [(token.index, token.data, token.finish) for token in rest] == [(4, b"", "length")]


async def test_a_start_at_another_index_is_refused(made: Made) -> None:
    continuation = await made.engine.prepare(ask(), 20)
    with pytest.raises(BadRequest) as refused:
        continuation.start(2, 10)
    assert refused.value.field == "at"
    await continuation.close()


async def test_tokenize_is_repeatable(made: Made) -> None:
    if made.by_text:
        with pytest.raises(Unsupported):
            await made.engine.tokenize(b"hello world")
        return
    ids = await made.engine.tokenize(b"hello world")
    assert ids and ids == await made.engine.tokenize(b"hello world")

"""Asking an engine once more for what it made: what it reads, in which pieces, and that nothing else passes for it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from attrs import define, field

from benchmarks.handoff_again import (
    FORGETTING,
    Heard,
    Read,
    _Listening,
    as_reads,
    made_again,
    own_between,
    read_alike,
    shared,
)
from benchmarks.handoff_law import verdict
from benchmarks.handoff_plan import GEMMA, PROMPTS, SMOL
from benchmarks.handoff_score import NATS, Suspect
from benchmarks.handoff_stage import Actor, Binding
from protocol.text import TextRequest, Token


@define
class Rounding:
    """An engine whose next token depends on the prefix and on how many tokens of it were evaluated at once."""

    model: str = "m"
    slots: int = 2
    cache: tuple[int, ...] = ()
    pieces: tuple[int, ...] = ()
    read: list[tuple[int, ...]] = field(factory=list)

    async def prepare(self, request: TextRequest, deadline_s: float) -> Running:
        ids = tuple(part for part in request.prompt if isinstance(part, int))
        self.read.append(ids)
        kept = 0
        while kept < min(len(ids) - 1, len(self.cache)) and ids[kept] == self.cache[kept]:
            kept += 1
        self.pieces = (*self.pieces[:kept], *([len(ids) - kept] * (len(ids) - kept)))
        self.cache = ids
        return Running(self, request.sampling.max_tokens)

    def next(self) -> int:
        return 10 + (sum(self.cache) + 7 * sum(self.pieces)) % 89


@define
class Running:
    engine: Rounding
    count: int
    prompt_tokens: int = 0
    cached_tokens: int = 0

    async def start(self, at: int, ahead_tokens: int) -> AsyncIterator[Token]:
        for index in range(self.count):
            made = self.engine.next()
            yield Token(index, made, b"%d " % made)
            if index < self.count - 1:
                self.engine.cache += (made,)
                self.engine.pieces += (1,)

    async def extend(self, tokens: Sequence[Token]) -> None:
        raise AssertionError("each read is a request of its own")

    def acknowledge(self, index: int) -> None:
        return

    async def close(self) -> None:
        return


async def answer(engine: Rounding, ids: Sequence[int], count: int) -> list[int]:
    running = Running(engine, count)
    engine.cache, engine.pieces = tuple(ids), tuple([len(ids)] * len(ids))
    return [token.id or 0 async for token in running.start(0, count)]


async def test_what_was_read_in_pieces_is_made_again_in_these_pieces_alone() -> None:
    engine = Rounding()
    own = await answer(engine, (1, 2, 3), 3)
    # Two more tokens of the source's come: the first of them is what the engine had made and evaluated itself.
    given = (1, 2, 3, own[0], 4, 5)
    engine.cache, engine.pieces = given, (3, 3, 3, 1, 2, 2)
    made = [token.id or 0 async for token in Running(engine, 4).start(0, 4)]
    reads = [Read(1, (1, 2, 3), 0), Read(1, given, 4)]
    for place in range(4):
        assert await made_again(Rounding(), reads, (*given, *made[:place]), made[place])
    assert not await made_again(Rounding(), [Read(1, given, 0)], given, made[0]), "in one go it is another token"
    assert not await made_again(Rounding(), reads, given, made[0] + 1)
    assert not await made_again(Rounding(), reads, (*given, made[0] + 1), made[1]), "nor behind another answer"
    assert not await made_again(Rounding(), [], given, made[0]), "it was given nothing of the kind"


async def test_an_engine_that_tells_nothing_of_its_cache_had_made_the_first_token_or_not() -> None:
    assert own_between([Read(1, (1,)), Read(1, (1, 2)), Read(1, (1, 2, 3))]) == [[1, 1], [0, 0]]
    assert own_between([Read(1, (1,), 0), Read(1, (1, 2, 3), 2), Read(1, (1, 2, 3, 4), 1)]) == [[1, 0]]
    assert own_between([Read(1, (1,))]) == [[]]
    engine = Rounding()
    own = await answer(engine, (1, 2, 3), 1)
    given = (1, 2, 3, own[0], 4)
    for pieces in ((3, 3, 3, 1, 1), (3, 3, 3, 2, 2)):
        engine.cache, engine.pieces = given, pieces
        assert await made_again(Rounding(), [Read(1, (1, 2, 3)), Read(1, given)], given, engine.next())


async def test_nothing_of_an_answer_is_in_the_cache_when_it_is_made_again() -> None:
    engine = Rounding()
    await made_again(engine, [Read(1, (1, 2))], (1, 2), 9)
    assert engine.read == [(FORGETTING,), (FORGETTING + 1,), (1, 2)]


@define
class Losing(Rounding):
    """An engine that loses the first new token whenever it goes on from a prefix that its cache has."""

    told: tuple[int, ...] = ()

    async def prepare(self, request: TextRequest, deadline_s: float) -> Running:
        ids = tuple(part for part in request.prompt if isinstance(part, int))
        kept = shared(ids[:-1], self.told)
        self.told, self.pieces = ids, ()
        self.cache = ids[:kept] + ids[kept + (kept > 0) :]
        return Running(self, request.sampling.max_tokens)


async def test_an_engine_that_loses_a_token_each_time_is_not_excused_by_losing_it_again() -> None:
    given = (1, 2, 3, 4, 5, 6)
    reads = (Read(1, (1, 2, 3), 0), Read(1, given, 3))
    wrong = 10 + sum(given[:3] + given[4:]) % 89
    assert await made_again(Losing(), reads, given, wrong)
    again, nats = await verdict(Losing(), Suspect("m", given, wrong, b"%d " % wrong, 7.5, reads))
    assert not again and nats > NATS
    rounding = Suspect("m", given, wrong, b"%d " % wrong, 0.3, reads)
    assert await verdict(Losing(), rounding) == (True, 0.3), "what lies as near as rounding goes is"


def test_what_is_read_alike_ends_with_the_last_beginning_and_leaves_out_what_was_never_read() -> None:
    ids = (1, 2, 3, 4, 5, 6)
    first, overtaken, last = Read(7, (1, 2), 0), Read(7, (1, 2, 3), 2), Read(7, (1, 2, 3, 4), 2)
    later, other, dead = Read(7, (*ids, 7, 8), 6), Read(7, (1, 2, 9), 2), Read(6, (1, 2), 0)
    assert read_alike([dead, first, overtaken, last, later], ids) == [first, last]
    assert read_alike([first, other, last], ids) == [first, other, last], "it stood in the cache for a while"
    assert read_alike([other, later], ids) == []


def test_what_was_heard_is_told_in_ids() -> None:
    heard = [Heard(1, "a text", (5, 6), 0), Heard(1, (7, 8), ()), Heard(2, "a text", (Token(0, 9, b"x"),), 3)]
    reads = as_reads(heard, (1, 2), lambda part: [one if isinstance(one, int) else one.id or 0 for one in part])
    assert reads == (Read(1, (1, 2, 5, 6), 0), Read(1, (7, 8)), Read(2, (1, 2, 9), 3))


class Server:
    """Streams one report and one token."""

    async def complete(self, body: Mapping[str, Any]) -> AsyncGenerator[Mapping[str, Any], None]:
        yield {"prompt_progress": {"total": 5, "cache": 3, "processed": 5, "time_ms": 1}}
        yield {"content": "x", "tokens": [4], "stop": False}

    async def call(self, path: str, body: Mapping[str, Any] | None, deadline_s: float) -> Mapping[str, Any]:
        return {}


@pytest.mark.parametrize(("prompt", "heard"), [
    ("a text", ("a text", ())), (["a text", 4, 5], ("a text", (4, 5))), ([4, 5], ((4, 5), ()))
])  # fmt: skip
async def test_a_servers_requests_are_heard_with_what_it_had_cached(prompt: Any, heard: tuple[Any, Any]) -> None:
    kept: list[Heard] = []
    chunks = [raw async for raw in _Listening(Server(), 11, kept).complete({"prompt": prompt})]
    assert len(chunks) == 2 and kept == [Heard(11, *heard, 3)]


@pytest.mark.llama_native
@pytest.mark.parametrize("model", [SMOL, GEMMA])
@pytest.mark.parametrize("binding", ["llama_server", "llama_cpp"])
async def test_a_real_engine_makes_its_answer_again_token_by_token(
    binding: Binding, model: str, model_file: Any
) -> None:
    file: Path = model_file(model)
    actor = Actor(binding, model, file)
    try:
        await actor.forget()
        made = [token.id or 0 for token in (await actor.run(PROMPTS[0], 16))[0] if token.data]
        heard = list(actor.heard)
        head = await _ids(actor, PROMPTS[0])
        reads = as_reads(heard, head, lambda part: [one for one in part if isinstance(one, int)])
        for place in (0, 7, len(made) - 1):
            assert await made_again(actor, reads, (*head, *made[:place]), made[place])
        assert not await made_again(actor, reads, (*head, *made[:7]), made[7] + 1)
    finally:
        await actor.close()


async def _ids(actor: Actor, prompt: str) -> Sequence[int]:
    """Of a prompt, with the begin mark that Gemma wants and SmolLM2 does not."""
    ids = await actor.tokenize(prompt.encode())
    return (2, *ids) if actor.model == GEMMA else ids

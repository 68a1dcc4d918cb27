"""What an engine of the handoff bench was asked for, and asking it for the same once more.

llama.cpp rounds by how many tokens it evaluates at once, and always alike for the same ones; so what an engine makes of
a prefix depends, by fractions of a nat, on the pieces in which it read it and on what its cache still had. Each engine
of the bench therefore begins every answer with nothing of it in its cache, and what it is asked for is kept. A token
that a one-shot pass would not have chosen is then made once more: the same engine, with an empty cache again, reads the
answer that the reader got in the pieces in which it was read, and goes on by itself. The token that comes out where the
other stood is what this engine generates from exactly this prefix, or it is not.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from itertools import pairwise, takewhile
from typing import Any, Protocol

from attrs import define, frozen

from engines.llama_server_child import ChildLlamaServer
from engines.llama_server_stream import NativeServer
from engines.llama_server_wire import read_chunk
from engines.port import Continuation
from protocol.errors import Full
from protocol.text import Sampling, TextRequest, Token

AGAIN_S = 30.0
FREE_S, FREE_TRIES = 0.02, 100


@define
class Heard:
    """One thing that an engine was given to read: a prompt, and the answer so far as ids or as tokens.

    process_id: of the process that read it, whose cache ends with it. cached: how many tokens of both it still had, if
    it tells; beyond what it had read, only what it had made itself can be among them.
    """

    process_id: int | None
    prompt: str | tuple[int, ...]
    answer: tuple[int | Token, ...]
    cached: int | None = None


@frozen
class Read:
    """The same in ids of the engine's vocabulary, prompt and answer."""

    process_id: int | None
    ids: tuple[int, ...]
    cached: int | None = None


class Engine(Protocol):
    """An engine with the name of its model, and how many answers it makes at once."""

    model: str
    slots: int

    async def prepare(self, request: TextRequest, deadline_s: float) -> Continuation:
        """As of TextEngine."""
        ...


class HeardLlamaServer(ChildLlamaServer):
    """Keeps in `heard` what its server was given to read. Args as ChildLlamaServer."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.heard: list[Heard] = []

    async def _native(self) -> NativeServer:
        return _Listening(await super()._native(), self.process_id, self.heard)


class _Listening:
    """NativeServer over another one."""

    def __init__(self, inner: NativeServer, process_id: int | None, heard: list[Heard]) -> None:
        self._inner, self._process_id, self._heard = inner, process_id, heard
        self.call = inner.call

    async def complete(self, body: Mapping[str, Any]) -> AsyncGenerator[Mapping[str, Any], None]:
        heard = self._keep(body["prompt"])
        async with aclosing(self._inner.complete(body)) as chunks:
            async for raw in chunks:
                if heard.cached is None and "error" not in raw:
                    heard.cached = read_chunk(raw).cached
                yield raw

    def _keep(self, prompt: str | Sequence[str | int]) -> Heard:
        """Of a request's prompt: a text, or a list that may begin with one."""
        parts = [prompt] if isinstance(prompt, str) else list(prompt)
        ids = tuple(one for one in parts if isinstance(one, int))
        text = parts[0] if parts and isinstance(parts[0], str) else None
        heard = Heard(self._process_id, ids, ()) if text is None else Heard(self._process_id, text, ids)
        self._heard.append(heard)
        return heard


FORGETTING = 300
"""The first of some tokens that no prompt of the bench begins with."""


async def forget(engine: Engine) -> None:
    """Have nothing in the engine's cache that an answer begins with: each slot gets a token of its own to read.

    Raises Full where somebody else's answer does not end.
    """
    requests = [_asking(engine, (FORGETTING + slot,), 1) for slot in range(engine.slots)]
    for continuation in await asyncio.gather(*(_prepared(engine, one) for one in requests)):
        await continuation.close()


async def _prepared(engine: Engine, request: TextRequest) -> Continuation:
    """When a slot is free: the answer before was ended, which its engine may learn a moment later."""
    for _ in range(FREE_TRIES):
        try:
            return await engine.prepare(request, AGAIN_S)
        except Full:
            await asyncio.sleep(FREE_S)
    return await engine.prepare(request, AGAIN_S)


def as_reads(
    heard: Iterable[Heard], head: Sequence[int], ids_of: Callable[[Sequence[int | Token]], Sequence[int]]
) -> tuple[Read, ...]:
    """In ids. head: those of the prompt's text. ids_of: an answer so far in ids, as the engine takes them."""
    return tuple(
        Read(one.process_id, (*(head if isinstance(one.prompt, str) else one.prompt), *ids_of(one.answer)), one.cached)
        for one in heard
    )


def read_alike(reads: Sequence[Read], ids: Sequence[int]) -> list[Read]:
    """What is to be read before the token behind `ids` is made: what the process was given up to the last beginning of
    `ids` among it, apart from what it had not read when more came.
    """
    last = max((n for n, one in enumerate(reads) if one.ids == tuple(ids[: len(one.ids)])), default=None)
    if last is None:
        return []
    same = [one for one in reads[: last + 1] if one.process_id == reads[last].process_id]
    return [*(one for one, more in pairwise(same) if not _overtaken(one, more)), same[-1]]


def _overtaken(one: Read, more: Read) -> bool:
    """Whether the engine had less of `one` than could serve for what came next, of which it has to read a token."""
    return more.cached is not None and more.cached < min(shared(one.ids, more.ids), len(more.ids) - 1)


def shared(left: Sequence[int], right: Sequence[int]) -> int:
    """Length of the beginning that both have."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False)))


def own_between(alike: Sequence[Read]) -> list[list[int]]:
    """How many tokens of its own the engine had evaluated behind each read before the next one, which found them in its
    cache: one way of it where that is told, else two, since the first token is made with the prefill.
    """
    told = [max(0, more.cached - len(one.ids)) for one, more in pairwise(alike) if more.cached is not None]
    if len(told) == len(alike) - 1:
        return [told]
    return [[1] * (len(alike) - 1), [0] * (len(alike) - 1)]


async def made_again(engine: Engine, reads: Sequence[Read], ids: Sequence[int], token: int) -> bool:
    """Whether the engine makes `token` behind `ids` when it reads alike, with nothing of it in its cache.

    What it makes behind the last read must be the rest of `ids` before it is the token.
    """
    alike = read_alike(reads, ids)
    for way in own_between(alike) if alike else ():
        await forget(engine)
        for one, own in zip(alike, way, strict=False):
            await going_on(engine, one.ids, own + 1)
        begun = len(alike[-1].ids)
        if await going_on(engine, alike[-1].ids, len(ids) - begun + 1) == [*ids[begun:], token]:
            return True
    return False


async def going_on(engine: Engine, ids: Sequence[int], count: int) -> list[int]:
    """At most so many tokens that the engine makes behind `ids`, without an end mark; the last one is not evaluated."""
    continuation = await engine.prepare(_asking(engine, tuple(ids), count), AGAIN_S)
    made: list[int] = []
    try:
        async for one in continuation.start(0, count + 1):
            continuation.acknowledge(one.index)
            if one.id is not None and one.data:
                made.append(one.id)
    finally:
        await continuation.close()
    return made


def _asking(engine: Engine, ids: tuple[int, ...], count: int) -> TextRequest:
    return TextRequest(engine.model, ids, Sampling(max_tokens=count))

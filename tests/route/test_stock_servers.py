"""Moves to servers that speak no handoff: what each can do is asked, never assumed.

llama-server runs for real: by token ids over its own API, and by `continue_final_message` over OpenAI's. vLLM is a
faithful fake (tests/route/vllm_server.py), beside two servers of the same API that ignore or refuse the wish.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from engines.fakes_text import FakeTextEngine
from engines.llama_server import EmbeddedLlamaServer, LlamaServerEngine, LlamaServerUrlEngine
from engines.port import TextEngine
from engines.upstream import UpstreamEngine
from gateway.targets import Target
from links.http import HttpLink
from protocol.events import HandedOver, SourceLost
from protocol.openai_upstream import OpenAICodec
from protocol.policy import MigrationPolicy
from protocol.text import Message, Prompt
from protocol.vendors import VENDORS
from tests.route.flaky_text import FlakyTextEngine
from tests.route.test_move_by_ids import Watched
from tests.route.vllm_server import Flavour, VllmServer, vllm_server
from tests.unit.gateway.streams import Rig, collect, rig

COUNT = 48
QUESTION: Prompt = (Message("user", "Tell me about the river Rhine, from its spring to the sea."),)
MODEL = "smollm2-135m"


def moving(at: int) -> MigrationPolicy:
    return MigrationPolicy(min_tokens=at, min_remaining_tokens=1, consume_tokens_per_s=0.001, stall_s=10.0)


def asked(device: TextEngine, stock: TextEngine, at: int = 8, count: int = COUNT) -> Rig:
    """An answer of the device that moves to the stock server as soon as it can."""
    targets = [
        Target("device", True, device, frozenset({"fake"})),
        Target("stock", False, stock, frozenset({"fake"}), tokens_per_s=1e9),
    ]
    return rig(targets, migration=moving(at), max_tokens=count, after_s=30.0, prompt=QUESTION)


@asynccontextmanager
async def counting(flavour: Flavour) -> AsyncIterator[tuple[VllmServer, UpstreamEngine]]:
    """The server and an engine that reaches it."""
    async with vllm_server(flavour) as server:
        link = HttpLink("stock", server.url)
        engine = UpstreamEngine(link, "counting", codec=OpenAICodec(VENDORS["vllm"]))
        yield server, engine
        await engine.close()
        await link.close()


@pytest.mark.parametrize(
    ("flavour", "continues"), [("vllm", "text"), ("prefills", "text"), ("ignores", "no"), ("refuses", "no")]
)
async def test_what_a_server_can_do_is_asked(flavour: Flavour, continues: str) -> None:
    async with counting(flavour) as (server, engine):
        found = await engine.capabilities()
        assert (found.continues, found.vocabulary, found.tools) == (continues, None, False)
        assert found.context_tokens == 2048
        assert any(chat.get("continue_final_message") for chat in server.chats), "nobody asked"
        plain = [chat for chat in server.chats if not chat.get("continue_final_message")]
        assert plain, "there was nothing to compare with"


async def test_an_answer_moves_to_vllm_with_the_very_text_so_far() -> None:
    device = FakeTextEngine(name="device", tokens_per_s=300)
    async with counting("vllm") as (server, engine):
        await engine.capabilities()
        begun = len(server.chats)
        made = asked(device, engine)
        owned = await collect(made.owner)
        [moved] = made.of(HandedOver)
        assert isinstance(moved, HandedOver)
        answer = b"".join(one.token.data for one in owned).decode()
        before = b"".join(one.token.data for one in owned[: moved.index]).decode()
        assert [one.token.index for one in owned] == list(range(COUNT))
        assert made.owner.sides == (("device", moved.index), ("stock", COUNT - moved.index))
        last = server.chats[-1]
        assert last["messages"][-1] == {"role": "assistant", "content": before}
        assert (last["continue_final_message"], last["add_generation_prompt"]) == (True, False)
        # Nothing was trimmed off by the template, and the model went on from there.
        assert server.rendered[-1].endswith(before)
        assert answer == before + "".join(f" w{number}" for number in range(COUNT - moved.index))
        assert last.get("max_tokens", last.get("max_completion_tokens")) == COUNT - moved.index
        # It reads everything again at each change: it was asked when it was prepared and at the cut, not in between.
        assert len(server.chats) - begun <= 2
    assert device.load().running == 0


@pytest.mark.parametrize("flavour", ["ignores", "refuses"])
async def test_an_answer_never_moves_to_a_server_that_cannot_continue_it(flavour: Flavour) -> None:
    """And when the device is lost, that is told: words of a new turn are no continuation."""
    device = FakeTextEngine(name="device", tokens_per_s=300)
    async with counting(flavour) as (server, engine):
        await engine.capabilities()
        begun = len(server.chats)
        made = asked(device, engine)
        owned = await collect(made.owner)
        assert made.owner.sides == (("device", COUNT),)
        assert len(owned) == COUNT and made.of(HandedOver) == []
        assert len(server.chats) == begun


async def test_a_lost_device_is_followed_by_vllm() -> None:
    device = FakeTextEngine(name="device", tokens_per_s=2000)
    async with counting("vllm") as (server, engine):
        await engine.capabilities()
        made = rig(
            [Target("device", True, device, frozenset({"fake"})), Target("stock", False, engine, frozenset({"fake"}))],
            max_tokens=COUNT,
            after_s=30.0,
            prompt=QUESTION,
        )
        owned = await collect(made.owner, lambda one: device.kill() if one.token.index == 20 else None)
        [lost] = made.of(SourceLost)
        assert isinstance(lost, SourceLost) and (lost.source, lost.target) == ("device", "stock")
        assert [one.token.index for one in owned] == list(range(COUNT))
        before = b"".join(one.token.data for one in owned[: lost.index]).decode()
        assert server.chats[-1]["messages"][-1]["content"] == before


@asynccontextmanager
async def stock_llama_server(path: Path) -> AsyncIterator[tuple[HttpLink, str]]:
    """A llama-server of somebody else: link and key."""
    inner = EmbeddedLlamaServer(path, context_tokens=512, slots=2, threads=1, listen_port=0)
    link = HttpLink("stock", await inner.url(), keep_idle_s=1.0)
    try:
        yield link, await inner.api_key()
    finally:
        await link.close()
        await inner.close()


@pytest.fixture
async def device(model_file: Callable[[str], Path]) -> AsyncIterator[FlakyTextEngine]:
    """Held back a little, so that the other side has the time to prepare."""
    engine = LlamaServerEngine(model_file(MODEL), model=MODEL, context_tokens=512, threads=1)
    await engine.capabilities()
    yield FlakyTextEngine(engine, 0.02)
    await engine.close()


async def test_llama_server_takes_an_answer_over_by_ids_or_by_text(
    model_file: Callable[[str], Path], device: FlakyTextEngine
) -> None:
    """By ids where the model's file is here too, else as text through its own OpenAI front."""
    path = model_file(MODEL)
    async with stock_llama_server(path) as (link, key):
        native = LlamaServerUrlEngine(link, api_key=key, model_file=path)
        chat = UpstreamEngine(link, MODEL, key, codec=OpenAICodec(VENDORS["llama_server"]))
        assert (await native.capabilities()).vocabulary == (await device.capabilities()).vocabulary
        assert (await chat.capabilities()).continues == "text"
        alone = b"".join(one.token.data for one in await collect(asked(device, native, at=1000).owner))
        for stock, by_ids in ((native, True), (chat, False)):
            watched = Watched(stock)
            made = asked(device, watched, at=6)
            owned = await collect(made.owner)
            [moved] = made.of(HandedOver)
            assert isinstance(moved, HandedOver)
            assert [one.token.index for one in owned] == list(range(len(owned)))
            assert watched.given and all((token.id is not None) is by_ids for token in watched.given)
            answer = b"".join(one.token.data for one in owned)
            before = b"".join(one.token.data for one in owned[: moved.index])
            # The same weights go on as they would have without a move, for the first words at least.
            assert alone.startswith(before)
            assert answer[len(before) :].split()[:2] == alone[len(before) :].split()[:2]
        await native.close()
        await chat.close()

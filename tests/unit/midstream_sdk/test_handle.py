"""ModelHandle: which engine answers, what an app sees of one that fails, and what is told of it."""

from __future__ import annotations

import pytest

from midstream_sdk import Client, ModelHandle
from midstream_sdk.handle import Ran
from protocol.control_frames import Instruction
from protocol.errors import BadRequest, EngineError
from tests.unit.midstream_sdk.engines import SayingEngine


def handle(order: list[str], told: list[Ran] | None = None, **engines: SayingEngine) -> ModelHandle:
    return ModelHandle(lambda: "m", lambda: order, engines, (told if told is not None else []).append)


async def test_the_first_engine_answers_in_text_and_in_pieces() -> None:
    told: list[Ran] = []
    one = handle(["a", "b"], told, a=SayingEngine("Hel", "lo"), b=SayingEngine("other"))
    assert await one.generate("hi") == "Hello"
    pieces = [piece.text async for piece in await one.chat([{"role": "user", "content": "hi"}], stream=True)]
    assert pieces == ["Hel", "lo", ""]
    assert [(ran.engine, ran.pieces, ran.failed) for ran in told] == [("a", 2, ""), ("a", 2, "")]


async def test_an_engine_that_fails_before_its_first_piece_lets_the_next_one_try() -> None:
    told: list[Ran] = []
    one = handle(["a", "b"], told, a=SayingEngine("x", fails_after=0), b=SayingEngine("yes"))
    assert await one.generate("hi") == "yes"
    assert [(ran.engine, bool(ran.failed)) for ran in told] == [("a", True), ("b", False)]


async def test_an_engine_that_fails_later_is_not_replaced_in_silence() -> None:
    one = handle(["a", "b"], a=SayingEngine("x", "y", fails_after=1), b=SayingEngine("yes"))
    with pytest.raises(EngineError, match="broke"):
        await one.generate("hi")


async def test_the_last_engines_failure_is_raised() -> None:
    with pytest.raises(EngineError, match="broke"):
        await handle(["a"], a=SayingEngine("x", fails_after=0)).generate("hi")


async def test_a_reader_that_leaves_ends_the_answer() -> None:
    told: list[Ran] = []
    pieces = await handle(["a"], told, a=SayingEngine("x", "y")).chat([{"role": "user", "content": "?"}], stream=True)
    assert (await anext(pieces)).text == "x"
    await pieces.aclose()
    assert [ran.failed for ran in told] == ["cancelled"]


async def test_warming_tells_both_times() -> None:
    engine = SayingEngine("x")
    warmth = await handle(["a"], a=engine).warm()
    assert (warmth.engine, warmth.model) == ("a", "m")
    assert warmth.cold_ttft_ms >= 0 and warmth.warm_ttft_ms >= 0 and len(engine.asked) == 2


async def test_instructions_change_what_auto_means_and_load_nothing_twice() -> None:
    engine, other = SayingEngine("edge"), SayingEngine("far")
    async with Client(None, engines={"device": engine, "cloud": other}, model="m") as client:
        one = client.model()
        assert await one.generate("?") == "edge"
        await client._obey(Instruction(id="1", do="route", target="cloud"))
        assert await one.generate("?") == "far"
        assert (await client._obey(Instruction(id="2", do="switch", model="m")))["changed"] is False
        await client._obey(Instruction(id="3", do="route", target="edge"))
        assert await one.generate("?") == "edge"
        assert engine.loads == ["m"]
        await client._obey(Instruction(id="4", do="switch", model="n"))
        assert one.model == "n" and client.model("fixed").model == "fixed"
        with pytest.raises(BadRequest, match="no engine for"):
            await client._obey(Instruction(id="5", do="route", target="nowhere-known"))
    assert engine.closed and other.closed


def test_an_unknown_engine_or_none_at_all_is_said_at_once() -> None:
    with pytest.raises(BadRequest, match="no engine"):
        Client(None)
    client = Client(None, engines={"mine": SayingEngine("x")})
    with pytest.raises(BadRequest, match="mine"):
        client.model("m", "yours")
    with pytest.raises(BadRequest, match="no model is named"):
        _ = client.model().model

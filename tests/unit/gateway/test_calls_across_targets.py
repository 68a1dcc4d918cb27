"""Tool calls and answers under a schema when their engine is lost: gone on with where that can be, else cut."""

from __future__ import annotations

import pytest
from attrs import evolve

from engines.fakes_text import FakeTextEngine
from gateway.answer import Answer
from gateway.pipeline import TextWay
from gateway.settings import GatewayPorts, GatewaySettings
from gateway.stream import AnswerCut
from gateway.targets import Target
from protocol.chat import ChatRequest, tool_definition
from protocol.errors import LinkClosed
from protocol.policy import DispatchPolicy, MigrationPolicy, Policy
from protocol.text import CallDelta, Message, Sampling

CALL = b'ok <tool_call>{"name": "f", "arguments": {"city": "Bern"}}</tool_call>'
PIECES = [CALL[at : at + 4] for at in range(0, len(CALL), 4)]
TOLD: list[bytes | CallDelta] = [
    b"ok ",
    CallDelta(0, "c", "f"),
    CallDelta(0, arguments='{"a"'),
    CallDelta(0, arguments=": 1}"),
]
ASKED = ChatRequest("m", (Message("user", "hi"),), Sampling(max_tokens=64), tools=(tool_definition("f", "", None),))
STAY = Policy(dispatch=DispatchPolicy(start="device"), migration=MigrationPolicy(enabled=False, stall_s=0.5))


def two(first: FakeTextEngine, second: FakeTextEngine) -> TextWay:
    targets = [
        Target("device", True, first, frozenset({"m"})),
        Target("cloud", False, second, frozenset({"m"})),
    ]
    return TextWay(GatewaySettings(max_losses=1), GatewayPorts(lambda: targets, lambda: STAY))


async def read(way: TextWay, asked: ChatRequest = ASKED) -> Answer:
    answer = await way.answer(asked)
    try:
        async for _ in answer.pieces():
            pass
    finally:
        await answer.aclose()
    return answer


def lost_at(engine: FakeTextEngine, index: int) -> FakeTextEngine:
    """It loses this token, and refuses to begin again."""
    engine.fail("token", LinkClosed("gone"), index=index)
    return engine


@pytest.mark.parametrize("index", [1, 4, 5, 9, 12, 16])
async def test_a_call_that_is_text_goes_on_at_another_engine_that_writes_text(index: int) -> None:
    second = FakeTextEngine(says=PIECES)
    answer = await read(two(lost_at(FakeTextEngine(says=PIECES), index), second))
    [call] = answer.shown_calls
    assert (call.name, call.parsed(), answer.finish) == ("f", {"city": "Bern"}, "tool_calls")
    assert answer.message.content == "ok "
    assert dict(answer.owner.sides) == {"device": index, "cloud": len(PIECES) - index}


async def test_a_call_that_was_begun_as_text_is_not_given_to_an_engine_that_tells_calls_apart() -> None:
    """It would see half a call in its own turn, and write a text that nobody reads as one."""
    first, second = FakeTextEngine(says=PIECES, continues="no"), FakeTextEngine(says=TOLD, tools=True)
    with pytest.raises(AnswerCut, match="cut at token 6"):
        await read(two(lost_at(first, 6), second))
    assert all(not request.prefix for request in second.prepared)


async def test_a_call_that_an_engine_told_apart_is_not_gone_on_with() -> None:
    first, second = FakeTextEngine(says=TOLD, tools=True), FakeTextEngine(says=TOLD, tools=True)
    with pytest.raises(AnswerCut, match="cut at token 3"):
        await read(two(lost_at(first, 3), second))
    assert second.prepared == []
    before = await read(two(lost_at(FakeTextEngine(says=TOLD, tools=True), 1), second))
    assert [call.parsed() for call in before.shown_calls] == [{"a": 1}], "before the call it may be made elsewhere"


@pytest.mark.parametrize("goes_on", [True, False])
async def test_an_answer_that_is_held_to_a_schema_goes_on_where_the_rest_can_be_told(goes_on: bool) -> None:
    """A server that takes formats by itself would begin a second object; one that takes grammars gets what is left."""
    asked = evolve(ASKED, tools=(), response_format={"type": "json_object"})
    first, second = (FakeTextEngine(says=[b'{"a"', b": 1", b"}"], grammar=goes_on, tools=not goes_on) for _ in range(2))
    way = two(lost_at(first, 2), second)
    if goes_on:
        assert (await read(way, asked)).message.content == '{"a": 1}'
        return
    with pytest.raises(AnswerCut):
        await read(way, asked)
    assert second.prepared == []


async def test_every_target_is_told_in_its_own_way() -> None:
    """Of a race, one engine knows tools and the other does not."""
    native, plain = FakeTextEngine(says=TOLD, tools=True), FakeTextEngine(says=PIECES)
    racing = evolve(STAY, dispatch=DispatchPolicy(start="race"))
    targets = [Target("device", True, plain, frozenset({"m"})), Target("cloud", False, native, frozenset({"m"}))]
    way = TextWay(GatewaySettings(), GatewayPorts(lambda: targets, lambda: racing))
    await read(way)
    assert [tool["function"]["name"] for tool in native.prepared[0].tools] == ["f"]
    assert plain.prepared[0].tools == ()
    assert "<tools>" in str(plain.prepared[0].prompt)

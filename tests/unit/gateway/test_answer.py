"""One answer: private values come back in its text and its calls, reservations end, what is kept can be given again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from attrs import evolve

from engines.fakes_text import FakeTextEngine
from gateway.answer import Answer
from gateway.context import LOCAL, Caller
from gateway.pipeline import TextWay
from gateway.ports import CachedAnswer, CacheKey, Estimate, Findings, Invocation, Redaction, Reservation, Spent
from gateway.redaction import StreamRestorer
from gateway.settings import GatewayPorts, GatewaySettings
from gateway.stops import Piece
from gateway.targets import Target
from protocol.chat import ChatRequest, tool_definition
from protocol.errors import Full, LinkClosed, MidstreamError, NotFound
from protocol.events import RecordingEmit, TextDone
from protocol.policy import Policy
from protocol.text import CallDelta, FinishReason, Message, Sampling

HERS = 'a"b@example.org'
ASKED = ChatRequest("m", (Message("user", f"mail {HERS}"),), Sampling(max_tokens=64))
PLAIN = evolve(ASKED, prompt=(Message("user", "tell me of the river"),))
TOOL = tool_definition("send", "", None)


class Hiding:
    """Privacy that knows one address."""

    def inspect(self, chat: ChatRequest, caller: Caller, policy: Policy) -> Findings:
        return Findings()

    def redact(self, chat: ChatRequest, findings: Findings) -> Redaction:
        [turn] = chat.messages
        hidden = (Message(turn.role, turn.content.replace(HERS, "EMAIL_ABCDEFG2")),)
        return Redaction(evolve(chat, prompt=hidden), StreamRestorer({"EMAIL_ABCDEFG2": HERS}))


class Keeping:
    """A cache without bounds; conversations and an audit that keep what they are told."""

    def __init__(self) -> None:
        self.kept: list[tuple[CacheKey, CachedAnswer]] = []
        self.closed_with: list[tuple[Message, FinishReason | None]] = []
        self.records: list[Invocation] = []

    async def find(self, key: CacheKey) -> CachedAnswer | None:
        return next((answer for one, answer in self.kept if one == key), None)

    async def store(self, key: CacheKey, answer: CachedAnswer) -> None:
        self.kept.append((key, answer))

    def invocation(self, record: Invocation) -> None:
        self.records.append(record)


class Counted:
    """Limits that count how reservations end."""

    degrade = False
    headers: dict[str, str] = {}  # noqa: RUF012

    def __init__(self, *, degrade: bool = False) -> None:
        self.ends: list[str] = []
        self.degrade = degrade

    async def reserve(self, caller: Caller, estimate: Estimate) -> Reservation:
        return self

    async def extend(self, money: float) -> bool:
        return True

    async def settle(self, spent: Spent) -> None:
        self.ends.append(f"settled {spent.completion_tokens}")

    async def release(self) -> None:
        self.ends.append("released")


def way_of(engine: FakeTextEngine, *, local: bool = True, **ports: Any) -> TextWay:
    target = Target("device" if local else "cloud", local, engine, frozenset({"m"}))
    return TextWay(GatewaySettings(drain_s=0.1), GatewayPorts(lambda: [target], Policy, **ports))


async def read(answer: Answer) -> list[Piece]:
    try:
        return [piece async for piece in answer.pieces()]
    finally:
        await answer.aclose()


def text_of(pieces: Sequence[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


def arguments_of(pieces: Sequence[Piece]) -> list[str]:
    found: dict[int, str] = {}
    for piece in pieces:
        for call in piece.calls:
            found[call.index] = found.get(call.index, "") + call.arguments
    return list(found.values())


@pytest.mark.parametrize("size", [1, 4, 100])
async def test_values_come_back_in_text_and_in_the_json_of_calls(size: int) -> None:
    """Across every border: between pieces, between text and call, between two calls."""
    raw = 'to EMAIL_ABCDEFG2 <tool_call>{"name": "send", "arguments": {"to": "EMAIL_ABCDEFG2"}}</tool_call>'
    raw += '<tool_call>{"name": "send", "arguments": {"cc": "x EMAIL_ABCDEFG2"}}</tool_call>'
    engine = FakeTextEngine(says=[raw[at : at + size].encode() for at in range(0, len(raw), size)])
    way = way_of(engine, local=False, privacy=Hiding())
    answer = await way.answer(evolve(ASKED, tools=(TOOL,), sampling=Sampling(max_tokens=500)))
    pieces = await read(answer)
    assert text_of(pieces) == f"to {HERS} "
    assert [json.loads(one) for one in arguments_of(pieces)] == [{"to": HERS}, {"cc": f"x {HERS}"}]
    assert [call.parsed() for call in answer.shown_calls] == [{"to": HERS}, {"cc": f"x {HERS}"}]
    [prepared] = engine.prepared
    assert "EMAIL_ABCDEFG2" in str(prepared.prompt)
    assert HERS not in str(prepared.prompt)


async def test_the_beginning_of_a_placeholder_at_the_end_is_text() -> None:
    way = way_of(FakeTextEngine(says=[b"see ", b"EMA"]), local=False, privacy=Hiding())
    assert text_of(await read(await way.answer(ASKED))) == "see EMA"


async def test_nothing_is_hidden_from_targets_of_this_machine() -> None:
    engine = FakeTextEngine(says=[b"ok"])
    await read(await way_of(engine, privacy=Hiding()).answer(ASKED))
    assert HERS in str(engine.prepared[0].prompt)


async def test_an_answer_that_was_kept_is_given_again_in_its_shape_and_calls_nobody() -> None:
    keeping, emit = Keeping(), RecordingEmit()
    says: list[bytes | CallDelta] = [b"one ", b"two", CallDelta(0, "c", "send", '{"a":1}')]
    engine = FakeTextEngine(says=says, tools=True)
    way = way_of(engine, cache=keeping, audit=keeping, emit=emit)
    asked = evolve(PLAIN, tools=(TOOL,))
    first, again = await read(await way.answer(asked)), await read(await way.answer(asked))
    assert [piece.text for piece in again if piece.text] == [piece.text for piece in first if piece.text]
    assert arguments_of(again) == ['{"a":1}']
    assert len(engine.prepared) == 1
    assert [record.cached for record in keeping.records] == [False, True]
    assert keeping.records[1].spent == Spent()
    assert [done.sides for done in emit.events if isinstance(done, TextDone)] == [(("device", 3),), (("cache", 3),)]


@pytest.mark.parametrize(
    ("max_tokens", "fails", "kept"),
    [(64, False, 1), (2, False, 0), (64, True, 0)],
)
async def test_cut_and_failed_answers_are_not_kept(max_tokens: int, fails: bool, kept: int) -> None:
    keeping = Keeping()
    engine = FakeTextEngine(answer_tokens=6)
    way = TextWay(
        GatewaySettings(max_losses=0),
        GatewayPorts(lambda: [Target("device", True, engine, frozenset({"m"}))], Policy, cache=keeping),
    )
    if fails:
        engine.fail("token", LinkClosed("gone"), index=3)
    answer = await way.answer(evolve(PLAIN, sampling=Sampling(max_tokens=max_tokens)))
    try:
        await read(answer)
    except MidstreamError:
        assert fails
    assert len(keeping.kept) == kept


async def test_a_reservation_ends_once_whatever_happens() -> None:
    counted = Counted()
    way = way_of(FakeTextEngine(answer_tokens=3), limits=counted)
    await read(await way.answer(ASKED))
    with pytest.raises(NotFound):
        await way.answer(evolve(ASKED, model="no"))
    never_begun = await way.answer(ASKED)
    await never_begun.aclose()
    await never_begun.aclose()
    half = await way.answer(ASKED)
    pieces = half.pieces()
    await anext(pieces)
    await pieces.aclose()
    await half.aclose()
    await way.stop()
    with pytest.raises(Full):
        await read(await way.answer(ASKED))
    assert counted.ends == ["settled 3", "released", "settled 0", "settled 1", "settled 0"]


async def test_at_the_cost_cap_only_this_machine_answers() -> None:
    device, cloud = FakeTextEngine(says=[b"here"]), FakeTextEngine(says=[b"there"])
    targets = [Target("cloud", False, cloud, frozenset({"m"})), Target("device", True, device, frozenset({"m"}))]
    ports = GatewayPorts(lambda: targets, Policy, limits=Counted(degrade=True))
    answer = await TextWay(GatewaySettings(), ports).answer(ASKED, LOCAL)
    assert text_of(await read(answer)) == "here"
    assert answer.context.constraints.local_only
    assert cloud.prepared == []

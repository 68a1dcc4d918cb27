"""Answers under a schema that stand still, move, or lose their engine in the middle: one valid document comes out."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import pytest
from attrs import evolve

from engines.llama_server import LlamaServerEngine
from gateway.attempt import StreamPorts
from gateway.context import Constraints, RequestContext
from gateway.settings import GatewaySettings
from gateway.stops import Owned
from gateway.stream import StreamOwner
from gateway.targets import AnswerLengths, Target, TargetBoard
from protocol.events import HandedOver, RecordingEmit, SourceLost
from protocol.policy import MigrationPolicy, Policy
from protocol.text import Message, Sampling, TextRequest
from tests.route.flaky_text import FlakyTextEngine

MODEL = "smollm2-135m"
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 30},
        "river": {"enum": ["Rhine", "Danube", "Elbe"]},
        "bridges": {"type": "array", "items": {"type": "string", "maxLength": 12}, "minItems": 2, "maxItems": 3},
        "old": {"type": "boolean"},
    },
    "required": ["city", "river", "bridges", "old"],
    "additionalProperties": False,
}
ASKED = TextRequest(
    MODEL, (Message("user", "Describe a city at a river as JSON."),), Sampling(max_tokens=120, json_schema=SCHEMA)
)


@pytest.fixture
async def pair(model_file: Callable[[str], Path]) -> AsyncIterator[tuple[FlakyTextEngine, FlakyTextEngine]]:
    """Two engines of the same model; the first is slow enough to be left."""
    made = [LlamaServerEngine(model_file(MODEL), model=MODEL, context_tokens=512, threads=1) for _ in range(2)]
    for engine in made:
        await engine.capabilities()
    yield FlakyTextEngine(made[0], 0.02), FlakyTextEngine(made[1])
    for engine in made:
        await engine.close()


async def answer(
    targets: Sequence[Target],
    migration: MigrationPolicy,
    *,
    ahead_tokens: int = 32,
    lose_at: int | None = None,
    stops_at: tuple[int, ...] = (),
) -> tuple[str, StreamOwner, RecordingEmit]:
    """The whole answer. Its reader stops for a while at `stops_at`; the first target dies after token `lose_at`."""
    emit = RecordingEmit()
    ports = StreamPorts(TargetBoard(), AnswerLengths(), time.monotonic, emit, dict)
    policy = evolve(Policy(), migration=migration)
    context = RequestContext("req-1", MODEL, time.monotonic() + 60, policy, Constraints())
    starts = [(target, 30.0 * place) for place, target in enumerate(targets)]
    owner = StreamOwner(context, ASKED, starts, targets, ports, GatewaySettings(ahead_tokens=ahead_tokens))
    owned: list[Owned] = []
    async for one in owner.tokens():
        owned.append(one)
        await asyncio.sleep(1.0 if one.token.index in stops_at else 0.0)
        if one.token.index == lose_at:
            targets[0].engine.die()  # type: ignore[attr-defined]
    return b"".join(one.token.data for one in owned).decode(), owner, emit


def check(text: str) -> None:
    found = json.loads(text)
    assert list(found) == list(SCHEMA["properties"])  # type: ignore[call-overload]
    assert found["river"] in ("Rhine", "Danube", "Elbe") and 2 <= len(found["bridges"]) <= 3
    assert isinstance(found["old"], bool)


def target(name: str, engine: FlakyTextEngine, tokens_per_s: float | None = None) -> Target:
    return Target(name, name == "device", engine, frozenset({MODEL}), tokens_per_s=tokens_per_s)


STAY = MigrationPolicy(enabled=False, stall_s=20.0)


@pytest.mark.slow
async def test_a_document_whose_reader_is_slow_is_one_document(pair: tuple[FlakyTextEngine, FlakyTextEngine]) -> None:
    """However far its reader falls behind."""
    text, owner, _ = await answer([target("device", pair[1])], STAY, ahead_tokens=1, stops_at=(4, 13, 22))
    assert owner.finish == "stop"
    check(text)


@pytest.mark.parametrize(
    "lose_at", [pytest.param(2, marks=pytest.mark.slow), 11, pytest.param(23, marks=pytest.mark.slow)]
)
async def test_a_document_survives_the_loss_of_its_engine(
    pair: tuple[FlakyTextEngine, FlakyTextEngine], lose_at: int
) -> None:
    text, owner, emit = await answer([target("device", pair[0]), target("cloud", pair[1])], STAY, lose_at=lose_at)
    assert [type(event) for event in emit.events] == [SourceLost]
    assert [side for side, _ in owner.sides] == ["device", "cloud"]
    check(text)


async def test_a_document_moves_by_plan(pair: tuple[FlakyTextEngine, FlakyTextEngine]) -> None:
    policy = MigrationPolicy(min_tokens=5, min_remaining_tokens=1, consume_tokens_per_s=0.001, stall_s=20.0)
    text, owner, emit = await answer([target("device", pair[0]), target("cloud", pair[1], 1e9)], policy)
    assert [type(event) for event in emit.events] == [HandedOver]
    assert [side for side, _ in owner.sides] == ["device", "cloud"]
    check(text)

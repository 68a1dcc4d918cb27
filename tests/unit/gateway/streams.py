"""Builds stream owners over fake engines for the tests of this room."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from attrs import evolve, frozen

from engines.fakes_text import FakeTextEngine, fake_token
from engines.port import TextEngine
from gateway.attempt import StreamPorts
from gateway.context import Constraints, RequestContext
from gateway.settings import GatewaySettings
from gateway.stops import Owned
from gateway.stream import StreamOwner
from gateway.targets import AnswerLengths, Target, TargetBoard, TargetView
from protocol.events import Event, RecordingEmit
from protocol.policy import DispatchPolicy, MigrationPolicy, Policy
from protocol.text import Prompt, Sampling, TextRequest, Token

MODEL = "fake"
PROMPT = "tell me of the river"
STAY = MigrationPolicy(enabled=False, stall_s=0.2)


@frozen
class Rig:
    """An owner with what it emitted and remembers."""

    owner: StreamOwner
    emit: RecordingEmit
    board: TargetBoard

    def of(self, kind: type[Event]) -> list[Event]:
        """Events of one kind, in order."""
        return [event for event in self.emit.events if isinstance(event, kind)]


def target(name: str, engine: TextEngine, *, local: bool | None = None, tokens_per_s: float | None = None) -> Target:
    """A target for the fake model; `device` is local."""
    return Target(
        name, name == "device" if local is None else local, engine, frozenset({MODEL}), tokens_per_s=tokens_per_s
    )


def rig(
    targets: Sequence[Target],
    *,
    migration: MigrationPolicy = STAY,
    max_tokens: int = 48,
    after_s: float = 0.2,
    deadline_s: float = 20.0,
    settings: GatewaySettings | None = None,
    logprobs: int = 0,
    prompt: Prompt = PROMPT,
    priced: Callable[[TargetView, DispatchPolicy], TargetView] = lambda view, policy: view,
) -> Rig:
    """An owner that starts `targets` in order, each `after_s` seconds after the one before."""
    emit, board = RecordingEmit(), TargetBoard()
    ports = StreamPorts(board, AnswerLengths(), time.monotonic, emit, dict, priced=priced)
    context = RequestContext(
        "req-1", MODEL, time.monotonic() + deadline_s, evolve(Policy(), migration=migration), Constraints()
    )
    request = TextRequest(MODEL, prompt, Sampling(max_tokens=max_tokens, logprobs=logprobs))
    starts = [(one, place * after_s) for place, one in enumerate(targets)]
    owner = StreamOwner(context, request, starts, targets, ports, settings or GatewaySettings())
    return Rig(owner, emit, board)


async def collect(owner: StreamOwner, after_each: Callable[[Owned], None] | None = None) -> list[Owned]:
    """All tokens; `after_each` sees each one before the next is asked for."""
    owned: list[Owned] = []
    async for one in owner.tokens():
        owned.append(one)
        if after_each is not None:
            after_each(one)
    return owned


def expected(count: int, answer_tokens: int = 64) -> list[Token]:
    """The tokens that every fake makes for the prompt."""
    return [fake_token(PROMPT, index, answer_tokens) for index in range(count)]


def assert_law(owned: Sequence[Owned], count: int) -> None:
    """0 lost, 0 doubled, and each token is what an uninterrupted engine would have made."""
    assert [one.token.index for one in owned] == list(range(count))
    assert [one.token.data for one in owned] == [token.data for token in expected(count)]


def assert_all_closed(*engines: FakeTextEngine) -> None:
    """No engine still generates for anybody."""
    assert [engine.load().running for engine in engines] == [0] * len(engines)

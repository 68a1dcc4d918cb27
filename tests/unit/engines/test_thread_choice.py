"""Fewer threads while other programs keep the cores busy: the decision, and the engine that follows it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.fakes_text import FakeTextEngine
from engines.rethreaded import RethreadedTextEngine
from engines.thread_choice import ANSWERS, HOLD_S, ThreadChoice
from protocol.errors import EngineError
from protocol.text import Sampling, TextRequest, Token

IDLE_S = {4: 0.010, 2: 0.018, 1: 0.035}


def run(choice: ThreadChoice, now_s: float, token_s: Callable[[int], float], answers: int = ANSWERS) -> list[int]:
    """Answers one after the other, 10 s apart; the threads of each."""
    found = []
    for turn in range(answers):
        found.append(choice.choice.threads)
        choice.answered(token_s(choice.choice.threads), now_s + 10 * turn)
    return found


def idle(threads: int) -> float:
    return IDLE_S[threads]


def busy(threads: int) -> float:
    """Every core has another program on it: the more threads, the slower."""
    return {4: 0.25, 2: 0.12, 1: 0.07}[threads]


def test_an_idle_machine_keeps_the_measured_threads() -> None:
    choice = ThreadChoice(4, IDLE_S)
    assert set(run(choice, 0.0, idle, 50)) == {4}


def test_a_busy_machine_decodes_with_fewer_and_goes_back_when_it_is_free() -> None:
    choice = ThreadChoice(4, IDLE_S)
    seen = run(choice, 0.0, busy, 20)
    assert seen[0] == 4 and seen[-1] == 1 and 2 in seen
    assert sum(busy(threads) for threads in seen[-5:]) < 0.5 * 5 * busy(4)
    assert set(run(choice, 300.0, busy, 20)) == {1}, "it stays there"
    assert run(choice, 1000.0, idle, 30)[-1] == 4


def test_a_change_that_does_not_pay_is_taken_back_and_seldom_tried_again() -> None:
    choice = ThreadChoice(2, IDLE_S)
    seen = run(choice, 0.0, lambda threads: 0.1, 400)
    changes = sum(one != other for one, other in pairwise(seen))
    assert seen.count(1) < 0.15 * len(seen) and 2 <= changes <= 16


def test_without_a_measurement_the_first_answers_are_the_measure() -> None:
    choice = ThreadChoice(2)
    assert set(run(choice, 0.0, idle, 6)) == {2}
    assert run(choice, 100.0, busy, 8)[-1] == 1


def test_a_measure_that_was_taken_on_a_busy_machine_does_not_lead_back_to_it() -> None:
    choice = ThreadChoice(2, {2: 0.12})
    assert run(choice, 0.0, lambda threads: {2: 0.25, 1: 0.03}[threads], 100)[-90:] == [1] * 90


def test_one_slow_answer_changes_nothing() -> None:
    choice = ThreadChoice(4, IDLE_S)
    for turn in range(30):
        assert choice.answered(0.3 if turn % 3 == 0 else 0.01, 10.0 * turn).threads == 4


@given(st.lists(st.floats(0.001, 1.0), max_size=60), st.integers(1, 8))
def test_the_choice_stays_within_its_bounds_and_changes_no_faster_than_it_may(rates: list[float], usual: int) -> None:
    choice = ThreadChoice(usual, {usual: 0.01})
    changed_at_s, threads = -HOLD_S, usual
    for turn, token_s in enumerate(rates):
        chosen = choice.answered(token_s, float(turn)).threads
        assert 1 <= chosen <= usual
        if chosen < threads:
            assert turn - changed_at_s >= HOLD_S
        if chosen != threads:
            changed_at_s, threads = float(turn), chosen


class Machine:
    """Makes fakes whose speed depends on their threads and on who else computes."""

    def __init__(self) -> None:
        self.made: list[int] = []
        self.rate: Callable[[int], float] = idle
        self.engines: list[FakeTextEngine] = []

    def make(self, threads: int) -> FakeTextEngine:
        self.made.append(threads)
        self.engines.append(FakeTextEngine(tokens_per_s=1 / self.rate(threads), answer_tokens=14))
        return self.engines[-1]


def ask() -> TextRequest:
    return TextRequest("m", "p", Sampling(max_tokens=14))


async def answer(engine: RethreadedTextEngine) -> Sequence[Token]:
    continuation = await engine.prepare(ask(), 5)
    return [token async for token in continuation.start(0, 100)]


async def test_the_engine_is_made_anew_between_answers_and_requests_wait_for_it() -> None:
    machine, now_s = Machine(), [0.0]
    # Made on an idle machine that is busy now.
    engine = RethreadedTextEngine(machine.make, ThreadChoice(2, {2: 0.001}), clock=lambda: now_s[0])
    for _ in range(ANSWERS):
        assert len(await answer(engine)) == 14
    assert len(await answer(engine)) == 14
    assert machine.made == [2, 1] and engine.threads == 1
    assert len(machine.engines[0].prepared) == ANSWERS and len(machine.engines[1].prepared) == 1
    assert engine.load().running == 0
    await engine.close()
    with pytest.raises(EngineError):
        await engine.prepare(ask(), 5)


async def test_answers_that_share_the_engine_are_no_contention() -> None:
    machine = Machine()
    engine = RethreadedTextEngine(machine.make, ThreadChoice(2, {2: 0.001}))
    for _ in range(ANSWERS + 1):
        await asyncio.gather(answer(engine), answer(engine))
    assert machine.made == [2]
    await engine.close()


async def test_an_engine_that_runs_is_never_replaced() -> None:
    machine = Machine()
    engine = RethreadedTextEngine(machine.make, ThreadChoice(2, {2: 0.001}))
    for _ in range(ANSWERS - 1):
        await answer(engine)
    last = await engine.prepare(ask(), 5)
    tokens = [token async for token in last.start(0, 100)]
    other = await engine.prepare(ask(), 5)
    await asyncio.sleep(0.01)
    assert len(tokens) == 14 and machine.made[:1] == [2]
    assert len([token async for token in other.start(0, 100)]) == 14
    await engine.close()

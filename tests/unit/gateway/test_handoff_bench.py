"""The judge of the handoff bench: it passes what keeps the law and sees each way of breaking it."""

from __future__ import annotations

import random

from attrs import evolve

from benchmarks.handoff_plan import PHASES, VICTIMS, plans
from benchmarks.handoff_score import judge, text_bytes
from benchmarks.handoff_stage import Batch, Generation
from gateway.stops import Owned
from protocol.handoff import Extend, encode
from protocol.text import Token


def tokens(first: int, *ids: int) -> list[Token]:
    return [Token(index=first + place, id=one, data=b"t%d " % one) for place, one in enumerate(ids)]


def owned(side: str, made: list[Token]) -> list[Owned]:
    return [Owned(token, side) for token in made]


SOURCE = tokens(0, 1, 2, 3, 4, 5)
TARGET = tokens(3, 14, 15, 16)
ANSWER = owned("device", SOURCE[:3]) + owned("cloud", TARGET)
BY_SIDE = {"device": [Generation([], SOURCE)], "cloud": [Generation(SOURCE[:3], TARGET)]}


def violations(answer: list[Owned], by_side: dict[str, list[Generation]]) -> int:
    return len(judge(answer, by_side, True, 6).violations)


def test_a_move_by_the_law_has_no_fault() -> None:
    judged = judge(ANSWER, BY_SIDE, True, 6)
    assert (judged.lost, judged.doubled, judged.violations) == (0, 0, ())
    ids_alone = [evolve(token, data=b"") for token in SOURCE[:3]]
    assert violations(ANSWER, {**BY_SIDE, "cloud": [Generation(ids_alone, TARGET)]}) == 0
    as_text = [evolve(token, id=None) for token in SOURCE[:3]]
    assert violations(ANSWER, {**BY_SIDE, "cloud": [Generation(as_text, TARGET)]}) == 0


def test_an_engine_that_is_taken_up_again_may_repeat_what_it_had_made_ahead_and_then_differ() -> None:
    again = tokens(3, 4, 25, 26)
    by_side = {"device": [Generation([], SOURCE), Generation(SOURCE[:3], again)]}
    assert violations(owned("device", SOURCE[:3] + again), by_side) == 0


def test_each_way_of_breaking_the_law_is_seen() -> None:
    other = [evolve(SOURCE[0], id=9, data=b"t9 "), *SOURCE[1:3]]
    assert violations(ANSWER, {**BY_SIDE, "cloud": [Generation(other, TARGET)]}) == 3
    assert violations(ANSWER, {**BY_SIDE, "cloud": [Generation(SOURCE[:2], tokens(2, 13, *(14, 15, 16)))]}) > 0
    changed = [*ANSWER[:4], Owned(evolve(TARGET[1], id=99), "cloud"), ANSWER[5]]
    assert violations(changed, BY_SIDE) > 0
    assert violations(owned("device", SOURCE[:3]) + owned("device", TARGET), BY_SIDE) > 0
    assert judge(ANSWER[:2] + ANSWER[3:], BY_SIDE, True, 6).lost == 1
    assert judge([*ANSWER, ANSWER[-1]], BY_SIDE, True, 6).doubled == 1
    assert judge(ANSWER[:4], BY_SIDE, False, 6).lost == 2


def test_bytes_are_compared_in_the_same_frame() -> None:
    batch = Batch(tuple(SOURCE), 0, True, b"".join(token.data for token in SOURCE))
    assert text_bytes(batch) == 22 + 3 + 1 + len(batch.text)
    assert text_bytes(evolve(batch, alone=False)) == 1 + len(batch.text)
    alone = tuple(evolve(token, data=b"") for token in SOURCE)
    assert len(encode(bytes(16), 1, Extend(0, alone))) == 22 + 3 + len(alone)


def test_the_whole_bench_kills_everybody_in_every_phase_and_moves_both_ways() -> None:
    found = plans(False, random.Random(1))
    for phase in PHASES:
        struck = [plan for plan in found if plan.phase == phase]
        assert len(struck) >= 20 and {plan.victim for plan in struck} == set(VICTIMS)
    clean = [plan for plan in found if plan.moves and plan.victim is None]
    assert len(clean) == 100
    assert {plan.to_cloud for plan in clean} == {True, False}
    assert {plan.rtt_s for plan in clean} == {0.02, 0.06, 0.15}
    assert {plan.pair.crosses for plan in clean} == {"ids", "text", "other model"}
    assert all(plan.max_tokens <= 64 for plan in found)

"""The judge of the handoff bench: it passes what keeps the law and sees each way of breaking it."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from attrs import define, evolve, field

from benchmarks.handoff_law import Law, chosen_for_alone
from benchmarks.handoff_plan import (
    PHASES,
    PROMPTS,
    QUICK_PROMPTS,
    REMADE_RATIO,
    VICTIMS,
    Crossing,
    Pace,
    Plan,
    plans,
)
from benchmarks.handoff_report import Likelihood, Outcome, answer_keys
from benchmarks.handoff_score import Judged, Scored, Suspect, judge, own_pass, text_bytes
from benchmarks.handoff_stage import Actor, Batch, Counted, Generation
from gateway.pacing import DeliveryMeter
from gateway.stops import Owned
from links.memory import memory_stream_pair
from protocol.handoff import Extend, Prepare
from protocol.handoff_headers import HandoffWriter
from protocol.text import TextRequest, Token


def tokens(first: int, *ids: int) -> list[Token]:
    return [Token(index=first + place, id=one, data=b"t%d " % one) for place, one in enumerate(ids)]


def owned(side: str, made: list[Token]) -> list[Owned]:
    return [Owned(token, side) for token in made]


SOURCE = tokens(0, 1, 2, 3, 4, 5)
TARGET = tokens(3, 14, 15, 16)
ANSWER = owned("device", SOURCE[:3]) + owned("cloud", TARGET)
BY_SIDE = {"device": [Generation([], SOURCE)], "cloud": [Generation(SOURCE[:3], TARGET)]}


@define
class Scripted:
    """An engine that answers everything with one token."""

    token: Token
    model: str = "m"
    requests: list[TextRequest] = field(factory=list)

    async def prepare(self, request: TextRequest, deadline_s: float) -> Scripted:
        self.requests.append(request)
        return self

    async def start(self, at: int, ahead_tokens: int) -> AsyncIterator[Token]:
        yield self.token

    async def close(self) -> None:
        return


def plan_of(crosses: Crossing) -> Plan:
    return next(plan for plan in plans(False, random.Random(1)) if plan.pair.crosses == crosses and plan.moves)


def moved(
    plan: Plan, batches: list[Batch] | None = None, whole: Likelihood | None = None, rest: Likelihood | None = None
) -> Outcome:
    plan = evolve(plan, victim=None, phase=None)
    meter = DeliveryMeter(1.0)
    return Outcome(plan, 1.0, [], meter, Judged(0, 0, ()), True, batches=batches or [], whole=whole, rest=rest)


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
    alone = tuple(evolve(token, data=b"") for token in SOURCE)
    text = b"".join(token.data for token in SOURCE)
    batch = Batch(alone, 2 + 3 + len(alone), 2, text=text)
    assert text_bytes(batch) == 2 + 3 + 1 + len(text)
    whole_header = evolve(batch, frame_bytes=batch.frame_bytes + 21, header_bytes=23)
    assert text_bytes(whole_header) == 21 + text_bytes(batch)
    with_prompt = evolve(batch, frame_bytes=batch.frame_bytes + 300, request_bytes=300)
    assert text_bytes(with_prompt) == 300 + text_bytes(batch)
    outcome = moved(plan_of("ids"), [batch, with_prompt])
    keys = answer_keys([outcome])
    assert keys["id_bytes_ratio"] == pytest.approx(batch.frame_bytes / text_bytes(batch))
    assert keys["id_bytes_ratio_whole_frames"] == pytest.approx(
        (2 * batch.frame_bytes + 300) / (2 * text_bytes(batch) + 300)
    )


async def test_what_crosses_is_counted_as_it_crosses() -> None:
    """Headers as this connection has them, the text in the very same ones; what carries no answer is not counted."""
    here, there = memory_stream_pair()
    batches: list[Batch] = []
    counted, writer, crossed = Counted(here, batches), HandoffWriter(), list[bytes]()
    alone = tuple(evolve(token, data=b"") for token in SOURCE)
    request = TextRequest("m", "a prompt", prefix=alone[:2])
    frames = [Prepare(evolve(request, prefix=())), Prepare(request), Extend(2, alone[2:4]), Extend(4, alone[4:])]
    for epoch, frame in zip((1, 2, 2, 2), frames, strict=True):
        await counted.send(writer.encode(bytes(range(16)), epoch, frame))
        writer.sent()
        crossed.append(await there.receive() or b"")
    assert [batch.frame_bytes for batch in batches] == [len(data) for data in crossed[1:]]
    assert [batch.header_bytes for batch in batches] == [5, 2, 2], "the connection knows the stream's beginning already"
    assert [batch.tokens for batch in batches] == [alone[:2], alone[2:4], alone[4:]]
    first = evolve(batches[0], text=b"t1 t2 ")
    assert first.frame_bytes - first.request_bytes == 5 + 3 + 2
    assert text_bytes(first) - first.request_bytes == 5 + 3 + 1 + 6


def test_likelihood_is_told_of_all_pairs_and_of_each() -> None:
    own = moved(plan_of("ids"), whole=Likelihood(1.0, 1.0), rest=Likelihood(1.0, 1.0))
    other = moved(plan_of("other model"), whole=Likelihood(3.0, 1.0), rest=Likelihood(1.2, 1.0))
    keys = answer_keys([own, other])
    assert (keys["nll_ratio"], keys["nll_ratio_whole"]) == (1.1, 2.0)
    assert keys["nll_ratio_by_pair"] == {"ids": 1.0, "text": None, "other model": 1.2}


def test_a_token_is_a_violation_when_its_engine_neither_makes_it_again_nor_has_it_near_its_best() -> None:
    pair = plan_of("ids").pair
    actors = {name: Actor("llama_cpp", name.split(":")[1], Path("model.gguf")) for name in (pair.device, pair.cloud)}
    law, outcome = Law(actors, {}), moved(plan_of("ids"))
    suspect = Suspect(pair.cloud, (1, 2), 3, b"t3 ", 0.4)
    law.judge(outcome, suspect, False, 0.1)
    law.judge(outcome, suspect, True, 0.4)
    law.judge(None, suspect, True, 0.4)
    assert outcome.judged.violations == () and law.keys()["own_law_violations"] == 0
    assert (law.keys()["made_again"], law.keys()["own_made_again"]) == (1, 1)
    law.judge(outcome, suspect, False, 0.3)
    law.judge(None, suspect, False, 0.3)
    assert len(outcome.judged.violations) == 1 and pair.cloud in outcome.judged.violations[0]
    assert (law.keys()["over_in_own_pass"], law.keys()["own_law_violations"]) == (1, 1)
    assert law.keys()["nats_worst"] == {pair.cloud: 0.4}


def test_only_tokens_beyond_the_laws_distance_are_asked_about() -> None:
    scored = Scored(nll=(1.0,) * 4, nats=(0.1, 0.26, 0.25), head=(7, 8))
    assert scored.suspects("llama_cpp:m", [1], TARGET) == [Suspect("llama_cpp:m", (7, 8, 1, 14), 15, b"t15 ", 0.26)]


async def test_the_engine_itself_tells_how_far_below_its_best_a_token_lies() -> None:
    """Asked with the ids of the prefix, as a prompt that is read in one go."""
    best = Token(0, 5, b"five", logprob=-0.5, alternatives=((b"five", -0.5), (b"six", -0.7), (b"six", -3.0)))
    engine = Scripted(best)
    assert await own_pass(engine, Suspect("a", (1, 2), 5, b"five", 0.3)) == 0.0
    assert await own_pass(engine, Suspect("a", (1, 2), 6, b"six", 0.3)) == pytest.approx(0.2)
    assert await own_pass(engine, Suspect("a", (1, 2), 9, b"nine", 0.3)) == float("inf")
    assert [request.prompt for request in engine.requests] == [(1, 2)] * 3


def test_the_last_seam_is_where_the_side_changed_last() -> None:
    back = evolve(moved(plan_of("ids")), owned=[*ANSWER, *owned("device", tokens(6, 27, 28))])
    assert [[token.id for token in part] for part in back.at_last_seam()] == [[1, 2, 3, 14, 15, 16], [27, 28]]
    assert [len(part) for part in evolve(back, owned=owned("device", SOURCE)).at_last_seam()] == [0, 5]
    assert [len(part) for part in evolve(back, owned=[]).at_last_seam()] == [0, 0]


def test_targets_are_asked_alone_for_each_pair_and_way_in_turn() -> None:
    found = [plan for plan in plans(False, random.Random(1)) if plan.moves and plan.victim is None]
    outcomes = [evolve(moved(plan), owned=ANSWER) for plan in found]
    chosen = chosen_for_alone([*outcomes, moved(plan_of("other model"))], most=8)
    assert {outcome.plan.pair.crosses for outcome in chosen} == {"other model"} and len(chosen) == 8
    ways = [(outcome.plan.pair, outcome.plan.to_cloud) for outcome in chosen]
    assert len(set(ways[:4])) == 4 and ways[:4] == ways[4:]


def test_what_the_handoff_adds_is_told_beside_what_the_models_differ_by() -> None:
    """Of two answers that both were made alone as well; the third was not."""
    pair = [evolve(moved(plan_of("other model"), rest=Likelihood(rest, 1.0)), alone_rest=Likelihood(alone, 1.0))
            for rest, alone in ((1.3, 1.2), (1.1, 1.2))]  # fmt: skip
    keys = answer_keys([*pair, moved(plan_of("other model"), rest=Likelihood(9.0, 1.0))])
    told = (keys["nll_ratio_unmoved_same_prefix"], keys["nll_ratio_to_same_prefix"], keys["same_prefix_answers"])
    assert told == (1.2, 1.0, 2)


def test_an_answer_that_ended_early_is_made_again_with_each_other_prompt() -> None:
    plan = evolve(plan_of("ids"), stall=(0.1, 0.2))
    attempts = [plan]
    for _ in PROMPTS[1:]:
        attempts.append(attempts[-1].again())
    assert {attempt.prompt for attempt in attempts} == set(PROMPTS)
    assert [attempt.attempt for attempt in attempts] == list(range(len(PROMPTS)))
    assert [attempt.stall is not None for attempt in attempts] == [True] * 3 + [False] * (len(PROMPTS) - 3)
    assert {(one.pair, one.to_cloud, one.rtt_s, one.victim, one.phase) for one in attempts} == {
        (plan.pair, plan.to_cloud, plan.rtt_s, plan.victim, plan.phase)
    }
    assert not evolve(moved(plan), moved=False).done and moved(plan).done


def test_the_whole_bench_kills_everybody_in_every_phase_and_moves_both_ways() -> None:
    found = plans(False, random.Random(1))
    for phase in PHASES:
        struck = [plan for plan in found if plan.phase == phase]
        assert len(struck) >= 20 and {plan.victim for plan in struck} == set(VICTIMS)
    clean = [plan for plan in found if plan.moves and plan.victim is None]
    assert len(clean) == 100
    assert all(plan.victim for plan in found[-20:]), "what may be missing when the time is over comes last"
    for phase in PHASES:
        assert sum(plan.phase == phase for plan in found[:-20]) >= 20
    assert {plan.to_cloud for plan in clean} == {True, False}
    assert {plan.rtt_s for plan in clean} == {0.02, 0.06, 0.15}
    assert {plan.pair.crosses for plan in clean} == {"ids", "text", "other model"}
    assert all(plan.max_tokens <= 64 for plan in found)


def test_answers_are_as_long_as_the_time_and_the_readers_pace_allow() -> None:
    pace = Pace((40, 64), ahead_tokens=10, beside_s=0.0)
    assert pace.longest([20.0], 100, 3600.0) == 64
    assert pace.longest([5.0, 5.0], 100, 0.0) == 40
    assert pace.longest([5.0, 10.0], 100, 100 * REMADE_RATIO * 6.01) == 10 + 40


def test_what_answers_take_beside_their_reading_is_learnt() -> None:
    pace = Pace((40, 64), ahead_tokens=10, beside_s=1.0)
    for _ in range(200):
        pace.took(seconds=10.0, tokens=50, reader_tokens_per_s=5.0)
    assert pace.beside_s == pytest.approx(2.0, abs=0.01)
    assert pace.longest([5.0], 10, 10 * REMADE_RATIO * 10.01) == 50
    pace.took(seconds=0.1, tokens=50, reader_tokens_per_s=5.0)
    assert pace.beside_s > 1.9, "no answer takes less than nothing beside"


def test_a_short_answer_may_move_while_enough_of_it_is_left() -> None:
    plan = evolve(plan_of("ids"), max_tokens=64, min_tokens=28)
    assert plan.of_length(80) == plan
    assert [plan.of_length(size).min_tokens for size in (64, 40, 32)] == [28, 28, 20]


def test_a_quick_run_has_each_phase_once_and_moves_of_both_kinds() -> None:
    found = plans(True, random.Random(1))
    assert {plan.phase for plan in found if plan.victim} == set(PHASES) and len(found) <= 10
    clean = [plan for plan in found if plan.moves and plan.victim is None]
    assert {"ids", "other model"} == {plan.pair.crosses for plan in clean}
    assert any(plan.pair.crosses == "ids" and plan.to_cloud for plan in clean), "ids cross as frames that are counted"
    assert {plan.prompt for plan in found} == set(PROMPTS[:QUICK_PROMPTS])

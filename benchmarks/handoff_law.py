"""The law in numbers, over all answers of the handoff bench: first one pass for all, then the engines themselves.

A one-shot pass by one build of llama.cpp judges what several builds made in other pieces; each rounds in its own way.
So a token that lies too far below the best one there goes to the engine that made it (benchmarks/handoff_again.py). One
that the engine does not make again, and that lies too far below in its own one-shot pass as well, is a violation.
Answers that nobody moved are judged alike, and so are answers that break the law on purpose.

What the target writes behind a seam is its own greedy continuation of a text that another model wrote. `alone` has the
target continue the same text, as its prompt and moved by nobody: what `nll_ratio` is more than that is the handoff's.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from statistics import fmean

from attrs import evolve

from benchmarks.handoff_again import Engine, Read, as_reads, forget, made_again
from benchmarks.handoff_plan import PROMPTS, Pair
from benchmarks.handoff_report import Likelihood, Outcome
from benchmarks.handoff_score import NATS, Oracle, Own, OwnAnswer, Scored, Suspect, own_pass
from benchmarks.handoff_stage import CONTEXT_TOKENS, Actor
from protocol.text import Token

ORACLE_S = 4.0
"""Less than this is too little to load a model and score with it."""

ASKING_SHARE = 0.3
"""Of the time for scoring, kept for asking the engines; a token takes some 0.3 s on a quiet machine."""

ALONE_SHARE = 0.2
"""Of the time for scoring, at most, to have targets go on from prompts, about a second each on a quiet machine."""

MOST_CONTROLS = 6
"""Of each engine: answers that are held against a prefix that lacks a token."""

ROUNDING_NATS = 0.6
"""Valid passes over one text differ by up to 0.45 (docs/migration.md); what differs by more is no rounding."""

CONTROL_SUSPECTS = 3
"""Tokens of such an answer that are asked about, at most."""

CONTROL_TOKENS = 8
"""Fewer tokens behind the seam say little."""

MOST_ALONE = 24
"""Of all answers that moved between two models; in turns of the pairs and of both ways."""


class Law:
    """Scores answers in `score`, then asks engines in `ask`.

    Args:
        actors: by name.
        own: answers that nobody moved, by actor and number of the prompt.
    """

    def __init__(self, actors: Mapping[str, Actor], own: Mapping[tuple[str, int], OwnAnswer]) -> None:
        self.notes: list[str] = []
        self.complete = True
        self._actors, self._own = actors, own
        self._suspects: list[tuple[Outcome | None, Suspect]] = []
        self._worst: dict[bool, dict[str, float]] = {True: {}, False: {}}
        self._made_again: dict[bool, list[float]] = {True: [], False: []}
        self._over = {True: 0, False: 0}
        self._controls: dict[str, list[list[Suspect]]] = {}
        self._controls_seen: list[bool] = []

    def keys(self) -> dict[str, object]:
        """Worst distances in nats by engine and model, and what came of those too far below."""
        first = sum(outcome is not None for outcome, _ in self._suspects)
        return {
            "over_in_first_pass": first,
            "made_again": len(self._made_again[True]),
            "made_again_nats_worst": round(max(self._made_again[True], default=0.0), 3),
            "over_in_own_pass": self._over[True],
            "own_over_in_first_pass": len(self._suspects) - first,
            "own_made_again": len(self._made_again[False]),
            "own_law_violations": self._over[False],
            "controls": len(self._controls_seen),
            "control_seen_ratio": fmean(self._controls_seen) if self._controls_seen else None,
            "nats_worst": {name: round(nats, 3) for name, nats in sorted(self._worst[True].items())},
            "nats_worst_own": {name: round(nats, 3) for name, nats in sorted(self._worst[False].items())},
        }

    async def alone(self, outcomes: Sequence[Outcome], end_s: float) -> None:
        """Have targets that another model's answer moved to go on from the same text as their prompt."""
        end_s -= (1 - ALONE_SHARE) * max(0.0, end_s - time.monotonic())
        for outcome in chosen_for_alone(outcomes):
            if time.monotonic() > end_s:
                self.notes.append("there was no time for all answers that were to go on from their prompts")
                return
            before, after = outcome.at_last_seam()
            prompt = outcome.plan.prompt + _text_of(before)
            made, _ = await self._last_actor(outcome).run(prompt, len(after))
            outcome.alone = [token for token in made if token.data and token.id is not None]

    def score(self, outcomes: Sequence[Outcome], files: Mapping[str, Path], end_s: float) -> None:
        """Likelihoods of all answers, and the tokens that are to be asked about; blocks."""
        end_s -= ASKING_SHARE * max(0.0, end_s - time.monotonic())
        for model, file in files.items():
            if end_s - time.monotonic() < ORACLE_S:
                self._cut_short(f"there was no time to score what {model} made")
                continue
            oracle = Oracle(file, CONTEXT_TOKENS // 2)
            try:
                self._score_model(Own(oracle, model, self._own), outcomes, end_s)
            finally:
                oracle.close()

    async def ask(self, end_s: float) -> None:
        """Put what lies too far below before the engines themselves, each in a new process, and the controls."""
        for name, actor in self._actors.items():
            asked = [(outcome, suspect) for outcome, suspect in self._suspects if suspect.actor == name]
            controls = self._controls.get(name, [])
            if not asked and not controls:
                continue
            actor.kill()
            await actor.revive()
            for outcome, suspect in asked:
                if time.monotonic() > end_s:
                    self._cut_short(f"there was no time to ask {name} about all tokens; the first pass counts")
                    self.judge(outcome, suspect, False, suspect.nats)
                else:
                    self.judge(outcome, suspect, *await verdict(actor, suspect))
            for control in controls:
                if time.monotonic() > end_s:
                    self.notes.append(f"there was no time for all controls of {name}")
                    break
                self._controls_seen.append(await _seen(actor, control))

    def _cut_short(self, note: str) -> None:
        self.complete = False
        if note not in self.notes:
            self.notes.append(note)

    def _score_model(self, own: Own, outcomes: Sequence[Outcome], end_s: float) -> None:
        self._suspects += [(None, suspect) for suspect in own.suspects]
        for name, nats in own.nats.items():
            self._seen(None, name, nats)
        for outcome in outcomes:
            if time.monotonic() > end_s:
                self._cut_short("the time was over before all answers were scored")
                return
            if not (outcome.moved or outcome.lost_sides):
                continue  # one engine made it, as it makes the answers of `own`
            actor = self._last_actor(outcome)
            if actor.model == own.model and any(one.token.data for one in outcome.owned):
                self._score_one(own, outcome, actor)

    def _last_actor(self, outcome: Outcome) -> Actor:
        """Who made the end of an answer."""
        pair = outcome.plan.pair
        side = outcome.owned[-1].side if outcome.owned else "device"
        return self._actors[pair.device if side == "device" else pair.cloud]

    def _score_one(self, own: Own, outcome: Outcome, actor: Actor) -> None:
        read_tokens, after = outcome.at_last_seam()
        ids_of = own.oracle.answer_ids if outcome.plan.pair.crosses == "ids" else own.oracle.answer_text_ids
        before = ids_of(read_tokens)
        scored = own.oracle.score(outcome.plan.prompt, before, [t.id for t in after if t.id is not None])
        reads = as_reads(outcome.heard, scored.head, ids_of)
        self._suspects += [(outcome, suspect) for suspect in scored.suspects(actor.name, before, after, reads)]
        self._seen(outcome, actor.name, max((nats for nats in scored.nats if nats <= NATS), default=0.0))
        if outcome.clean and outcome.moved and after:
            self._keep_control(own.oracle, actor.name, outcome, before, after)
            _compare(own, outcome, scored, len(before))
            _compare_alone(own, outcome, read_tokens, len(before))

    def _keep_control(
        self, oracle: Oracle, name: str, outcome: Outcome, before: Sequence[int], after: Sequence[Token]
    ) -> None:
        """An answer without the token before its seam: what was made behind it must not pass for right."""
        kept = self._controls.setdefault(name, [])
        if outcome.plan.pair.crosses != "ids" or not before or len(kept) >= MOST_CONTROLS:
            return
        made = [token.id for token in after if token.id is not None]
        if len(made) >= CONTROL_TOKENS:
            scored = oracle.score(outcome.plan.prompt, before[:-1], made)
            reads = (Read(None, (*scored.head, *before[:-1])),)
            kept.append(scored.suspects(name, before[:-1], after, reads)[:CONTROL_SUSPECTS])

    def judge(self, outcome: Outcome | None, suspect: Suspect, again: bool, nats: float) -> None:
        """What the engine itself says; without an outcome it is of an answer that nobody moved.

        Args:
            again: it made the token once more.
            nats: how far the token lies below, in the nearest one-shot pass.
        """
        moved = outcome is not None
        self._seen(outcome, suspect.actor, nats)
        self._made_again[moved] += [nats] * again
        if again or nats <= NATS:
            return
        self._over[moved] += 1
        wrong = f"{suspect.actor} does not make its token {len(suspect.ids)} again, {nats:.2f} nats below its best one"
        if outcome is None:
            self.notes.append(f"in an answer that nobody moved {wrong}")
        else:
            outcome.judged = evolve(outcome.judged, violations=(*outcome.judged.violations, wrong))

    def _seen(self, outcome: Outcome | None, actor: str, nats: float) -> None:
        worst = self._worst[outcome is not None]
        worst[actor] = max(worst.get(actor, 0.0), nats)


async def verdict(actor: Engine, suspect: Suspect) -> tuple[bool, float]:
    """Whether the engine makes the token again, and how far the token lies below in the nearest one-shot pass.

    Further than rounding goes nothing is excused by being made again: an engine that loses a token of what it goes on
    from loses it each time.
    """
    near = suspect.nats <= ROUNDING_NATS
    if near and await made_again(actor, suspect.reads, suspect.ids, suspect.token):
        return True, suspect.nats
    await forget(actor)
    return False, min(suspect.nats, await own_pass(actor, suspect))


async def _seen(actor: Engine, control: Sequence[Suspect]) -> bool:
    """Whether one of these tokens is found to be a violation."""
    for suspect in control:
        again, nats = await verdict(actor, suspect)
        if not again and nats > NATS:
            return True
    return False


def _compare(own: Own, outcome: Outcome, scored: Scored, at: int) -> None:
    """How likely a stitched answer and its end are, beside the target's own answers."""
    number, size = outcome.plan.number % len(PROMPTS), len(scored.nll)
    for first in (0, at):
        own_nll = own.nll(number, first, size)
        if own_nll is None:
            continue
        part = scored.nll[first:]
        likelihood = Likelihood(sum(part) / len(part), own_nll)
        if first:
            outcome.rest = likelihood
        else:
            outcome.whole = likelihood


def _compare_alone(own: Own, outcome: Outcome, before: Sequence[Token], at: int) -> None:
    """The same of what the target made of the same text as its prompt."""
    if not outcome.alone:
        return
    prompt = outcome.plan.prompt + _text_of(before)
    scored = own.oracle.score(prompt, [], [token.id for token in outcome.alone if token.id is not None])
    own_nll = own.nll(outcome.plan.number % len(PROMPTS), at, at + len(scored.nll))
    if own_nll is not None:
        outcome.alone_rest = Likelihood(sum(scored.nll) / len(scored.nll), own_nll)


def _text_of(tokens: Sequence[Token]) -> str:
    return b"".join(token.data for token in tokens).decode("utf-8", "replace")


def chosen_for_alone(outcomes: Sequence[Outcome], most: int = MOST_ALONE) -> list[Outcome]:
    """Clean moves between two models, each pair and way in its turn, at most so many; none whose seam divides a
    character, since what stands before it is no text.
    """
    by_way: dict[tuple[Pair, bool], list[Outcome]] = {}
    for outcome in outcomes:
        before, after = outcome.at_last_seam()
        if not (outcome.clean and outcome.moved and after and outcome.plan.pair.crosses == "other model"):
            continue
        if "\ufffd" not in _text_of(before):
            by_way.setdefault((outcome.plan.pair, outcome.plan.to_cloud), []).append(outcome)
    turns = zip_longest(*by_way.values())
    return [outcome for turn in turns for outcome in turn if outcome is not None][:most]

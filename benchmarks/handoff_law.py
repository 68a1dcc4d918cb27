"""The law in numbers, over all answers of the handoff bench: first one pass for all, then the engines themselves.

A one-shot pass by one build of llama.cpp judges what several builds made; each rounds in its own way. So a token that
lies too far below the best one there goes to the engine that made it, freshly started, which reads the same prefix in
one go, and then through passes in other micro-batches (benchmarks/handoff_passes.py). One that lies too far below in
each of them is a violation. Answers that nobody moved are measured alike: they tell what rounding alone does.

One that lies too far below in its engine's pass is also read as it went: the prefix up to the seam as the engine was
given it, then the engine's own tokens one by one. llama.cpp rounds differently by how many tokens it reads at once,
always the same for the same: a token that is the best one there is what the engine makes of exactly this prefix. What
it still had of the beginning is not known, so that a few ways are tried.

What the target writes behind a seam is its own greedy continuation of a text that another model wrote. `alone` has the
target continue the same text, as its prompt and moved by nobody: what `nll_ratio` is more than that is the handoff's.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import takewhile, zip_longest
from pathlib import Path
from statistics import fmean

from attrs import evolve

from benchmarks.handoff_passes import Question, put
from benchmarks.handoff_plan import PROMPTS, Pair
from benchmarks.handoff_report import Likelihood, Outcome
from benchmarks.handoff_score import NATS, Oracle, Own, Scored, Suspect, as_it_went, own_pass
from benchmarks.handoff_stage import CONTEXT_TOKENS, Actor
from protocol.text import Token

ORACLE_S = 4.0
"""Less than this is too little to load a model and score with it."""

OWN_PASSES_SHARE = 0.25
"""Of the time for scoring, kept for the engines' own passes; each takes some 50 ms on a quiet machine."""

ALONE_SHARE = 0.2
"""Of the time for scoring, at most, to have targets go on from prompts, about a second each on a quiet machine."""

MOST_CONTROLS = 12
"""Of each model: answers that are held against a prefix that lacks a token."""

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

    def __init__(self, actors: Mapping[str, Actor], own: Mapping[tuple[str, int], Sequence[Token]]) -> None:
        self.notes: list[str] = []
        self.complete = True
        self._actors, self._own = actors, own
        self._suspects: list[tuple[Outcome | None, Suspect]] = []
        self._worst: dict[bool, dict[str, float]] = {True: {}, False: {}}
        self._over: list[tuple[Outcome | None, Suspect]] = []
        self._own_violations = 0
        self._went: list[tuple[bool, float]] = []
        self._controls: dict[str, list[Question]] = {}
        self._controls_seen: list[bool] = []

    def keys(self) -> dict[str, object]:
        """Worst distances in nats by engine and model, and how often somebody was asked twice."""
        return {
            "over_in_first_pass": sum(outcome is not None for outcome, _ in self._suspects),
            "own_over_in_first_pass": sum(outcome is None for outcome, _ in self._suspects),
            "over_in_own_pass": sum(outcome is not None for outcome, _ in self._over),
            "own_over_in_own_pass": sum(outcome is None for outcome, _ in self._over),
            "own_law_violations": self._own_violations,
            "controls": len(self._controls_seen),
            "control_seen_ratio": fmean(self._controls_seen) if self._controls_seen else None,
            "over_as_it_went": sum(moved and nats > NATS for moved, nats in self._went),
            "own_over_as_it_went": sum(not moved and nats > NATS for moved, nats in self._went),
            "nats_worst_as_it_went": max((round(nats, 3) for _, nats in self._went), default=None),
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
        end_s -= OWN_PASSES_SHARE * max(0.0, end_s - time.monotonic())
        for model, file in files.items():
            if end_s - time.monotonic() < ORACLE_S:
                self._cut_short(f"there was no time to score what {model} made")
                continue
            oracle = Oracle(file, CONTEXT_TOKENS // 2)
            try:
                self._score_model(Own(oracle, model, self._own), outcomes, end_s)
            finally:
                oracle.close()

    async def ask(self, files: Mapping[str, Path], end_s: float) -> None:
        """Put what lies too far below before the engines themselves, each in a new process: nothing is cached; then
        through the other passes.
        """
        for name in sorted({suspect.actor for _, suspect in self._suspects}):
            actor = self._actors[name]
            actor.kill()
            await actor.revive()
            for outcome, suspect in self._suspects:
                if suspect.actor != name:
                    continue
                if time.monotonic() > end_s:
                    self._cut_short(f"there was no time to ask {name} about all tokens; the first pass counts")
                in_time = time.monotonic() <= end_s
                self.settle(outcome, suspect, await own_pass(actor, suspect) if in_time else suspect.nats)
        await asyncio.to_thread(self._pass_again, files, end_s)
        for outcome, suspect in self._over:
            await self._read_again(outcome, suspect, end_s)

    def _pass_again(self, files: Mapping[str, Path], end_s: float) -> None:
        """The verdict on what lay too far below in its engine's own pass, and the controls; blocks."""
        for model, file in files.items():
            over = [(one, suspect) for one, suspect in self._over if self._actors[suspect.actor].model == model]
            asked = [Question(suspect.ids, (suspect.token,), [suspect.nats]) for _, suspect in over]
            if not put(asked, partial(Oracle, file, CONTEXT_TOKENS // 2), NATS, end_s):
                self._cut_short("there was no time for all passes over tokens beyond the bound")
            for (outcome, suspect), question in zip(over, asked, strict=True):
                self.judge(outcome, suspect, question.nats[0])
        for model, file in files.items():
            controls = self._controls.get(model, [])
            if put(controls, partial(Oracle, file, CONTEXT_TOKENS // 2), NATS, end_s):
                self._controls_seen += [max(control.nats) > NATS for control in controls]
            else:
                self.notes.append(f"there was no time for the controls of {model}")

    async def _read_again(self, outcome: Outcome | None, suspect: Suspect, end_s: float) -> None:
        """In the ways it may have gone, each by a new process, until the token is the best one; what there was no time
        for counts as over the bound.
        """
        actor, nearest, tried = self._actors[suspect.actor], suspect.nats, 0
        for way in suspect.ways():
            if time.monotonic() > end_s:
                self._cut_short("there was no time to read again all prefixes of tokens over the bound")
                break
            actor.kill()
            await actor.revive()
            nearest, tried = min(nearest, await as_it_went(actor, suspect, way)), tried + 1
            if nearest <= 0.0:
                break
        self._went.append((outcome is not None, nearest))
        self.notes.append(
            f"{suspect.nats:.2f} nats below in the first pass, {suspect.actor}: {nearest:.3f} as it went "
            f"({tried} ways tried), {len(suspect.ids) - suspect.given} tokens of its own behind {suspect.given}"
        )

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
        before = _before(own.oracle, outcome, read_tokens)
        scored = own.oracle.score(outcome.plan.prompt, before, [t.id for t in after if t.id is not None])
        read = _read(own.oracle, outcome, read_tokens, before)
        self._suspects += [(outcome, suspect) for suspect in scored.suspects(actor.name, before, after, read)]
        self._seen(outcome, actor.name, max((nats for nats in scored.nats if nats <= NATS), default=0.0))
        if outcome.clean and outcome.moved and after:
            self._keep_control(own.model, outcome, scored.head, before, after)
            _compare(own, outcome, scored, len(before))
            _compare_alone(own, outcome, read_tokens, len(before))

    def _keep_control(
        self, model: str, outcome: Outcome, head: Sequence[int], before: Sequence[int], after: Sequence[Token]
    ) -> None:
        """An answer without the token before its seam: what was made behind it must not pass for right."""
        kept = self._controls.setdefault(model, [])
        made = tuple(token.id for token in after if token.id is not None)
        if outcome.plan.pair.crosses == "ids" and before and len(made) >= CONTROL_TOKENS and len(kept) < MOST_CONTROLS:
            kept.append(Question((*head, *before[:-1]), made, [float("inf")] * len(made)))

    def settle(self, outcome: Outcome | None, suspect: Suspect, nats: float) -> None:
        """What the engine itself says of a token; without an outcome it is of an answer that nobody moved."""
        if nats <= NATS:
            self._seen(outcome, suspect.actor, nats)
        else:
            self._over.append((outcome, evolve(suspect, nats=min(nats, suspect.nats))))

    def judge(self, outcome: Outcome | None, suspect: Suspect, nats: float) -> None:
        """What all passes say: the least distance is the token's."""
        self._seen(outcome, suspect.actor, nats)
        if nats <= NATS:
            return
        wrong = f"a token of {suspect.actor} lies {nats:.2f} nats and more below the best one of each pass"
        if outcome is None:
            self._own_violations += 1
            self.notes.append(f"in an answer that nobody moved {wrong}")
        else:
            outcome.judged = evolve(outcome.judged, violations=(*outcome.judged.violations, wrong))

    def _seen(self, outcome: Outcome | None, actor: str, nats: float) -> None:
        worst = self._worst[outcome is not None]
        worst[actor] = max(worst.get(actor, 0.0), nats)


def _before(oracle: Oracle, outcome: Outcome, tokens: Sequence[Token]) -> list[int]:
    """The answer before the last seam in the target's ids."""
    if outcome.plan.pair.crosses == "ids":
        return [token.id for token in tokens if token.id is not None]
    return oracle.ids(b"".join(token.data for token in tokens)) if tokens else []


def _read(oracle: Oracle, outcome: Outcome, tokens: Sequence[Token], before: Sequence[int]) -> list[int]:
    """Where in `before` the target had read it up to when it was given more."""
    found = []
    for count in outcome.reads:
        part = _before(oracle, outcome, tokens[:count])
        found.append(sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(part, before, strict=False))))
    return found


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

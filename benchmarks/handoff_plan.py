"""What the handoff bench does: pairs of engines, answers to make, and who is killed when."""

from __future__ import annotations

import random
from collections.abc import Sequence
from statistics import mean
from typing import Literal

from attrs import define, evolve, frozen

from benchmarks.handoff_stage import Phase

SMOL, GEMMA = "smollm2-135m", "gemma3-270m"
RTTS_S = (0.02, 0.06, 0.15)
REMADE_RATIO = 1.1
"""Answers to make over those that were planned: some end before their move or kill."""

TOKENS, QUICK_TOKENS = (32, 64), (18, 24)
"""An answer has so many tokens at least and at most, as time allows."""

LEFT_TOKENS = 12
"""Tokens that a short answer has left when it may move first."""

CLEAN, KILLS, ALONE = 100, 100, 24
"""Answers that move and nobody is killed, in which somebody is, and that stay."""

QUICK_CLEAN, QUICK_KILLS, QUICK_ALONE = 3, 4, 1
QUICK_PROMPTS = 2
KILLS_FIRST_RATIO = 0.8
"""Of the kills, those that are needed for 20 in each phase: with the clean moves they come before the others."""

PROMPTS = (
    "Once upon a time, in a land of rivers and mills, there lived an old woman who",
    "The history of the city begins with a small harbour. In the early days, the people",
    "To bake a good loaf of bread you need flour, water, salt and time. First,",
    "The train left the station in the morning, and the children looked out of the window. They",
    "A lighthouse keeper writes in his diary: Today the wind came from the north and",
    "The most important thing to know about bees is that they",
    "In the middle of the forest stood a house made of stone. Nobody knew who",
    "Our school has a garden where every class grows something. The first class",
)

Crossing = Literal["ids", "text", "other model"]
CROSSINGS: tuple[Crossing, ...] = ("ids", "text", "other model")
Victim = Literal["source", "target", "link"]
PHASES: tuple[Phase, ...] = ("prepare", "extend", "cut-over", "after")
VICTIMS: tuple[Victim, ...] = ("source", "target", "link")


@frozen
class Pair:
    """Two actors and how an answer crosses between them."""

    device: str
    cloud: str
    crosses: Crossing


def pairs(quick: bool) -> tuple[Pair, ...]:
    """The pairs of the bench: (device, cloud)."""
    server, cpp = "llama_server", "llama_cpp"
    found = (
        Pair(f"{server}:{SMOL}", f"{cpp}:{SMOL}", "ids"),
        Pair(f"{server}:{SMOL}", f"{cpp}:{GEMMA}", "other model"),
        Pair(f"{cpp}:{GEMMA}", f"{server}:{GEMMA}", "ids"),
        Pair(f"{cpp}:{SMOL}", f"{server}:{SMOL}", "text"),
        Pair(f"{cpp}:{GEMMA}", f"{server}:{SMOL}", "other model"),
    )
    return found[:2] if quick else found


@frozen
class Plan:
    """One answer to make. A kill strikes in its phase, `late_s` after the phase was entered."""

    number: int
    pair: Pair
    to_cloud: bool
    rtt_s: float
    max_tokens: int
    min_tokens: int
    moves: bool = True
    victim: Victim | None = None
    phase: Phase | None = None
    late_s: float = 0.0
    stall: tuple[float, float] | None = None
    attempt: int = 0

    def again(self) -> Plan:
        """The same with another prompt, to move as early as it may: for an answer that ended before its move or kill.

        The next prompt of all in turn, so that each attempt is another text. After three attempts the link no longer
        stalls: on a fast machine an answer of 64 tokens is over within some stalls, whatever its text.
        """
        stall = self.stall if self.attempt < 2 else None
        return evolve(self, number=self.number + 3, min_tokens=4, attempt=self.attempt + 1, stall=stall)

    def of_length(self, tokens: int) -> Plan:
        """The same with so many tokens at most, which moves while enough of them are left."""
        tokens = min(self.max_tokens, tokens)
        return evolve(self, max_tokens=tokens, min_tokens=min(self.min_tokens, tokens - LEFT_TOKENS))

    @property
    def prompt(self) -> str:
        return PROMPTS[self.number % len(PROMPTS)]


def plans(quick: bool, draw: random.Random) -> list[Plan]:
    """Clean moves, kills and answers that stay, mixed; the same for the same seed. What may be missing when the time is
    over, some of the kills, comes last.
    """
    clean, kills, alone = (QUICK_CLEAN, QUICK_KILLS, QUICK_ALONE) if quick else (CLEAN, KILLS, ALONE)
    rtts_s = (0.06,) if quick else RTTS_S
    combos = [(pair, to_cloud, rtt_s) for rtt_s in rtts_s for pair in pairs(quick) for to_cloud in (True, False)]
    strikes = [(phase, VICTIMS[(place + turn) % 3]) for turn in range(3) for place, phase in enumerate(PHASES)]
    found: list[Plan] = []
    for place in range(clean + kills + alone):
        pair, to_cloud, rtt_s = combos[place % len(combos)]
        # Those of a quick run share a few prompts, to which each engine's own answers are known.
        number = place // QUICK_PROMPTS * len(PROMPTS) + place % QUICK_PROMPTS if quick else place
        most, latest = (QUICK_TOKENS[1], 8) if quick else (TOKENS[1], 28)
        plan = Plan(number, pair, to_cloud, rtt_s, most, draw.randint(6, latest))
        if draw.random() < 1 / 3:
            plan = evolve(plan, stall=(draw.uniform(0.1, 1.0), draw.uniform(0.1, 0.4)))
        found.append(plan)
    if not quick:  # those few have each way once among the kills, and moves of both kinds
        draw.shuffle(found)
    for place, (phase, victim) in enumerate(strikes[n % len(strikes)] for n in range(kills)):
        found[place] = evolve(
            found[place], victim=victim, phase=phase, late_s=draw.uniform(0, found[place].rtt_s / 2), stall=None
        )
    for place in range(kills + clean, len(found)):
        found[place] = evolve(found[place], moves=False)
    last = [] if quick else found[round(KILLS_FIRST_RATIO * kills) : kills]
    mixed = [plan for plan in found if plan not in last]
    draw.shuffle(mixed)
    # A run that is ended early has some of each.
    first = [next(plan for plan in mixed if wanted(plan)) for wanted in (_stays, _moves_by_ids)]
    return [*first, *(plan for plan in mixed if plan not in first), *last]


@define
class Pace:
    """How long answers may be so that all are made in time: the reader sets the pace, and what an answer takes beside
    its reading (kills, new processes, stalls, measurements) is learnt from those that were made.

    tokens: at least and at most. ahead_tokens: what an answer's end does not wait for.
    """

    tokens: tuple[int, int]
    ahead_tokens: int
    beside_s: float = 1.5
    answers: int = 0

    def took(self, seconds: float, tokens: int, reader_tokens_per_s: float) -> None:
        """One more answer, with all that was done for it."""
        self.answers += 1
        beside_s = max(0.0, seconds - max(0, tokens - self.ahead_tokens) / reader_tokens_per_s)
        self.beside_s += (beside_s - self.beside_s) / (self.answers + 1)

    def longest(self, reader_tokens_per_s: Sequence[float], answers: int, seconds: float) -> int:
        """Tokens that each of so many answers may have. reader_tokens_per_s: by pair."""
        reading_s = max(0.0, seconds / (answers * REMADE_RATIO) - self.beside_s)
        tokens = self.ahead_tokens + reading_s / mean(1.0 / rate for rate in reader_tokens_per_s)
        return int(min(self.tokens[1], max(self.tokens[0], tokens)))


def _stays(plan: Plan) -> bool:
    return not plan.moves


def _moves_by_ids(plan: Plan) -> bool:
    return plan.moves and plan.victim is None and plan.to_cloud and plan.pair.crosses == "ids"

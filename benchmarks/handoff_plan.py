"""What the handoff bench does: pairs of engines, answers to make, and who is killed when."""

from __future__ import annotations

import random
from collections.abc import Sequence
from statistics import mean
from typing import Literal

from attrs import evolve, frozen

from benchmarks.handoff_stage import Phase

SMOL, GEMMA = "smollm2-135m", "gemma3-270m"
RTTS_S = (0.02, 0.06, 0.15)
REMADE_RATIO = 1.1

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

    @property
    def prompt(self) -> str:
        return PROMPTS[self.number % len(PROMPTS)]


def plans(quick: bool, draw: random.Random) -> list[Plan]:
    """Clean moves, kills and answers that stay, mixed; the same for the same seed."""
    clean, kills, alone = (6, 8, 2) if quick else (100, 108, 30)
    rtts_s = (0.06,) if quick else RTTS_S
    combos = [(pair, to_cloud, rtt_s) for rtt_s in rtts_s for pair in pairs(quick) for to_cloud in (True, False)]
    strikes = [(phase, VICTIMS[(place + turn) % 3]) for turn in range(3) for place, phase in enumerate(PHASES)]
    found: list[Plan] = []
    for number in range(clean + kills + alone):
        pair, to_cloud, rtt_s = combos[number % len(combos)]
        plan = Plan(number, pair, to_cloud, rtt_s, 32 if quick else 64, draw.randint(6, 12 if quick else 28))
        if draw.random() < 1 / 3:
            plan = evolve(plan, stall=(draw.uniform(0.1, 1.0), draw.uniform(0.1, 0.4)))
        found.append(plan)
    draw.shuffle(found)
    for place, (phase, victim) in enumerate(strikes[n % len(strikes)] for n in range(kills)):
        found[place] = evolve(
            found[place], victim=victim, phase=phase, late_s=draw.uniform(0, found[place].rtt_s / 2), stall=None
        )
    for place in range(kills, kills + alone):
        found[place] = evolve(found[place], moves=False)
    draw.shuffle(found)
    # A run that is ended early has some of each.
    first = [next(plan for plan in found if wanted(plan)) for wanted in (_stays, _moves_by_ids)]
    return [*first, *(plan for plan in found if plan not in first)]


def longest_answer(reader_tokens_per_s: Sequence[float], answers: int, ahead_tokens: int, seconds: float) -> int:
    """Tokens that answers may have so that all are made in time, 64 at most and 40 at least: the reader sets the pace.

    reader_tokens_per_s: by pair. ahead_tokens: what an answer's end does not wait for. REMADE_RATIO is for those that
    are made again.
    """
    each_s = seconds / (answers * REMADE_RATIO)
    return int(min(64.0, max(40.0, ahead_tokens + each_s / mean(1.0 / rate for rate in reader_tokens_per_s))))


def _stays(plan: Plan) -> bool:
    return not plan.moves


def _moves_by_ids(plan: Plan) -> bool:
    return plan.moves and plan.victim is None and plan.to_cloud and plan.pair.crosses == "ids"

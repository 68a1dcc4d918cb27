"""Live handoffs between two engines over a shaped link, with kills in every phase.

`python -m benchmarks.handoff --json F [--quick]`: SmolLM2 and Gemma on llama-server (xllamacpp) and llama-cpp-python, a
worker process and one thread each; one side is the device, the other sits behind the handoff protocol and a user-space
shaper with 20, 60 and 150 ms of round trip, lost segments and stalls. The reader takes a quarter of the measured decode
rate. Half of the answers move by plan, in both directions; in the other half the source, the target or the link is
killed (SIGKILL, connections reset) while the target prepares, is extended, cuts over, or has just taken over.

Pairs: same model, ids cross (two vocabularies); same model, text crosses, as to a server that tells no vocabulary; and
two models with two vocabularies, so that text crosses. `nll_ratio` covers the pairs of one model: what a model makes of
another one's words depends on the models, and stands beside it as `nll_ratio_other_model`.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from attrs import define, evolve, field

from benchmarks.handoff_plan import GEMMA, PHASES, PROMPTS, SMOL, VICTIMS, Plan, Victim, pairs, plans
from benchmarks.handoff_score import Judged, Oracle, Own, judge, ratio_of_means, text_bytes
from benchmarks.handoff_stage import CONTEXT_TOKENS, Actor, Batch, Binding, Phase, Stage, Watched, stage
from benchmarks.report import arguments, percentile, publish
from engines.peer import PeerEngine
from engines.store import default_store
from gateway.attempt import StreamPorts
from gateway.context import Constraints, RequestContext
from gateway.pacing import DeliveryMeter, paced
from gateway.settings import GatewaySettings
from gateway.stops import Owned
from gateway.stream import StreamOwner
from gateway.targets import AnswerLengths, Target, TargetBoard
from protocol.errors import MidstreamError
from protocol.events import HandedOver, RecordingEmit, SourceLost
from protocol.policy import MigrationPolicy, Policy
from protocol.text import Sampling, TextRequest

MODEL = "pair"
LONGEST_S = 24.0 * 60
"""The bench ends by itself before 25 minutes, whatever happens."""

REMEASURED_AFTER = 20
"""Answers between two measurements of the decode rates, which drift with the machine's load."""

AHEAD_TOKENS = GatewaySettings().ahead_tokens
"""Unread tokens that a source may make, half of them in its engine and half with the reader: short answers must not be
over before a target was prepared over 150 ms."""

QUICK_S = 34.0
"""So that a quick run is over within 45 s, engines closed."""

SCORING_S = 240.0
"""Kept for scoring at the end."""

ORACLE_S = 4.0
"""Less than this is too little to load a model and score with it."""


@define
class Outcome:
    """One answer as it went. `struck`: the kill happened."""

    plan: Plan
    r_c: float
    owned: list[Owned]
    meter: DeliveryMeter
    judged: Judged
    moved: bool = False
    lost_sides: int = 0
    struck: bool = False
    error: str = ""
    seconds: float = 0.0
    batches: list[Batch] = field(factory=list)
    nll: float | None = None
    own_nll: float | None = None


class Strike:
    """Kills once, when the target enters the planned phase."""

    def __init__(self, plan: Plan, kill: Any) -> None:
        self.done = False
        self._plan, self._kill = plan, kill

    def __call__(self, phase: Phase) -> None:
        if self._plan.phase == phase and not self.done:
            self.done = True
            asyncio.get_running_loop().call_later(self._plan.late_s, self._kill)


class Bench:
    """Runs plans on a stage and keeps what came of them."""

    def __init__(self, set_: Stage, json_file: Path | None, quick: bool) -> None:
        self.stage = set_
        self.quick = quick
        self.outcomes: list[Outcome] = []
        self.own: dict[tuple[str, int], list[int]] = {}
        self.notes: list[str] = []
        self.complete = True
        self.nats: dict[str, tuple[float, float]] = {}
        self._json_file = json_file
        self._boards: dict[tuple[str, str], TargetBoard] = {}
        self._peers: dict[tuple[str, str], PeerEngine] = {}
        self._reading: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """End what still reads."""
        for task in self._reading:
            task.cancel()
        if self._reading:
            await asyncio.wait(self._reading)
        for peer in self._peers.values():
            await peer.close()

    async def measure(self) -> None:
        """Decode rate of each actor, and its own answers to all prompts."""
        for actor in self.stage.actors.values():
            for number, prompt in enumerate(PROMPTS[:2] if self.quick else PROMPTS):
                tokens, rate = await actor.run(prompt, 64)
                actor.tokens_per_s = rate
                self.own[actor.name, number] = [t.id for t in tokens if t.data and t.id is not None]
        await self.measure_again()

    async def measure_again(self) -> None:
        """Decode rates as they are now: a reader's rate is a quarter of what the machine can do at the time."""
        for actor in self.stage.actors.values():
            rates = [(await actor.run(prompt, 32))[1] for prompt in PROMPTS[:3]]
            actor.tokens_per_s = percentile(rates, 0.5)
            actor.generations.clear()
        shown = ", ".join(f"{actor.name} {actor.tokens_per_s:.0f}" for actor in self.stage.actors.values())
        say(f"tokens/s with one thread: {shown}")

    async def run(self, plan: Plan) -> Outcome:
        """Make one answer; returns when it was generated. Its reader may still read the rest of it."""
        device, cloud = self.stage.actors[plan.pair.device], self.stage.actors[plan.pair.cloud]
        r_c = min(device.tokens_per_s, cloud.tokens_per_s) / 4
        device.generations.clear()
        cloud.generations.clear()
        self.stage.batches.clear()
        self.stage.shape(plan.rtt_s)
        emit = RecordingEmit()
        strike = Strike(plan, lambda: self._kill(plan))
        owner = self._owner(plan, r_c, strike, emit)
        meter = DeliveryMeter(r_c)
        outcome = Outcome(plan, r_c, [], meter, Judged(0, 0, ()))
        made = asyncio.Event()
        reading = asyncio.create_task(self._read(owner, outcome, made))
        self._reading.add(reading)
        reading.add_done_callback(self._reading.discard)
        stalling = asyncio.create_task(self.stage.stall(*plan.stall)) if plan.stall else None
        await made.wait()
        if stalling is not None:
            stalling.cancel()
            await asyncio.wait({stalling})
        by_side = {"device": list(device.generations), "cloud": list(cloud.generations)}
        outcome.struck = strike.done
        outcome.moved = any(isinstance(event, HandedOver) for event in emit.events)
        outcome.lost_sides = sum(isinstance(event, SourceLost) for event in emit.events)
        outcome.judged = judge(outcome.owned, by_side, owner.finish is not None, plan.max_tokens)
        outcome.batches = [evolve(batch, text=_text_of(batch, outcome.owned)) for batch in self.stage.batches]
        return outcome

    async def _read(self, owner: StreamOwner, outcome: Outcome, made: asyncio.Event) -> None:
        """The reader: takes what was made at r_c."""

        async def source() -> Any:
            stream = owner.tokens()
            try:
                async for one in stream:
                    outcome.owned.append(one)
                    yield one
            except MidstreamError as err:
                outcome.error = f"{err.code}: {err.message}"
            finally:
                await stream.aclose()
                made.set()

        ahead = AHEAD_TOKENS // 2
        try:
            async for _ in paced(source(), outcome.meter, lambda _: 1, time.monotonic, ahead_tokens=ahead):
                pass
        finally:
            made.set()

    def _kill(self, plan: Plan) -> None:
        if plan.victim == "link":
            self.stage.proxy.cut()
            return
        of_device = (plan.victim == "source") == plan.to_cloud
        self.stage.actors[plan.pair.device if of_device else plan.pair.cloud].kill()

    def _owner(self, plan: Plan, r_c: float, strike: Strike, emit: RecordingEmit) -> StreamOwner:
        device, cloud = self.stage.actors[plan.pair.device], self.stage.actors[plan.pair.cloud]
        key = (device.name, cloud.name)
        board = self._boards.setdefault(key, TargetBoard())
        if key not in self._peers:
            self._peers[key] = self.stage.peer(cloud, device.vocabulary)
        peer = self._peers[key]
        tells = plan.pair.crosses != "text"
        here, there = Watched(device, _ignore, tells), Watched(peer, _ignore, tells)
        (there if plan.to_cloud else here).on_phase = strike
        # The source is dear, so an answer that may move does.
        targets = [
            Target("device", True, here, frozenset({MODEL}), device.tokens_per_s, price_out=float(plan.to_cloud)),
            Target("cloud", False, there, frozenset({MODEL}), cloud.tokens_per_s, price_out=float(not plan.to_cloud)),
        ]
        order = targets if plan.to_cloud else targets[::-1]
        migration = MigrationPolicy(
            enabled=plan.moves,
            consume_tokens_per_s=r_c,
            min_tokens=plan.min_tokens,
            min_remaining_tokens=2,
            # As many of the reader's tokens as the default allows.
            stall_s=MigrationPolicy().stall_s * MigrationPolicy().consume_tokens_per_s / r_c,
        )
        ports = StreamPorts(
            board, AnswerLengths(), time.monotonic, emit, lambda: {} if peer.rtt_s is None else {"cloud": peer.rtt_s}
        )
        context = RequestContext(
            f"answer-{plan.number}", MODEL, time.monotonic() + 60.0, Policy(migration=migration), Constraints()
        )
        request = TextRequest(MODEL, plan.prompt, Sampling(max_tokens=plan.max_tokens))
        starts = [(order[0], 0.0), (order[1], 30.0)]
        return StreamOwner(context, request, starts, targets, ports, GatewaySettings(ahead_tokens=AHEAD_TOKENS // 2))

    async def rest(self) -> None:
        """Wait for the readers."""
        if self._reading:
            await asyncio.wait(tuple(self._reading))

    def keys(self) -> dict[str, object]:
        """What is known so far."""
        clean = [o for o in self.outcomes if o.plan.victim is None and o.plan.moves]
        moved = [o for o in clean if o.moved]
        alone = [o for o in self.outcomes if not o.plan.moves]
        killed = [o for o in self.outcomes if o.struck]
        delayed = [o.meter.delayed_tokens for o in moved + killed]
        gaps = [gap * o.r_c for o in moved for gap in o.meter.paced_s]
        alone_gaps = [gap * o.r_c for o in alone for gap in o.meter.paced_s]
        id_batches = [b for o in moved for b in o.batches if o.plan.pair.crosses == "ids"]
        text_total = sum(text_bytes(b) for b in id_batches)
        same = [o for o in moved if o.plan.pair.crosses != "other model" and o.nll is not None]
        other = [o for o in moved if o.plan.pair.crosses == "other model" and o.nll is not None]
        return {
            "lost": sum(o.judged.lost for o in self.outcomes),
            "doubled": sum(o.judged.doubled for o in self.outcomes),
            "law_violations": sum(len(o.judged.violations) for o in self.outcomes),
            "delayed_tokens_mean_clean": _mean([o.meter.delayed_tokens for o in moved]),
            "delayed_tokens_mean_kill": _mean([o.meter.delayed_tokens for o in killed]),
            "delayed_tokens_max": max(delayed, default=None),
            "delayed_tokens_mean_unmigrated": _mean([o.meter.delayed_tokens for o in alone]),
            "tbt_p99_ratio": percentile(gaps, 0.99) / percentile(alone_gaps, 0.99) if gaps and alone_gaps else None,
            "id_bytes_ratio": sum(b.size_bytes for b in id_batches) / text_total if text_total else None,
            "nll_ratio": _nll_ratio(same),
            "nll_ratio_other_model": _nll_ratio(other),
            "nats_worst_and_limit": {name: [round(v, 3) for v in both] for name, both in self.nats.items()},
            "migrations_clean": len(moved),
            "migrations_asked": len(clean),
            "kills": len(killed),
            **{f"kills_{phase}": sum(o.plan.phase == phase for o in killed) for phase in PHASES},
            **{f"delayed_tokens_mean_kill_{v}": self._delayed_of(v) for v in VICTIMS},
            "answers_cut": sum(bool(o.error) for o in self.outcomes),
            "unmigrated": len(alone),
            "stalls": self.stage.stalls,
            "tokens_per_s": {name: round(actor.tokens_per_s, 1) for name, actor in self.stage.actors.items()},
        }

    def _delayed_of(self, victim: Victim) -> float | None:
        return _mean([o.meter.delayed_tokens for o in self.outcomes if o.struck and o.plan.victim == victim])

    def save(self, complete: bool) -> None:
        """Write what is known so far, so that a run that is ended early leaves its figures."""
        if self._json_file is not None:
            self._json_file.parent.mkdir(parents=True, exist_ok=True)
            text = json.dumps({**self.keys(), "complete": complete, "notes": self.notes}, indent=2)
            self._json_file.write_text(text + "\n")


def _text_of(batch: Batch, owned: Sequence[Owned]) -> bytes:
    """The text of the batch's tokens, which cross without it where ids do."""
    by_index = {one.token.index: one.token.data for one in owned}
    return b"".join(by_index.get(token.index, b"") for token in batch.tokens)


def _nll_ratio(outcomes: Sequence[Outcome]) -> float | None:
    return ratio_of_means(
        [o.nll for o in outcomes if o.nll is not None], [o.own_nll for o in outcomes if o.own_nll is not None]
    )


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


def _ignore(phase: Phase) -> None:
    return


async def perform(bench: Bench, wanted: Sequence[Plan], end_s: float) -> None:
    """Run the plans one after the other until all are done or the time is over."""
    again: list[Plan] = []
    for number, plan in enumerate(wanted):
        if time.monotonic() > end_s:
            bench.notes.append(f"the time was over after {number} of {len(wanted)} answers")
            bench.complete = False
            return
        if number and number % REMEASURED_AFTER == 0:
            await bench.rest()
            await bench.measure_again()
        began_s = time.monotonic()
        outcome = await bench.run(plan)
        outcome.seconds = time.monotonic() - began_s
        bench.outcomes.append(outcome)
        if (plan.victim and not outcome.struck) or (plan.victim is None and plan.moves and not outcome.moved):
            again.append(plan)
        await bench.stage.mend()
        show(number, len(wanted), outcome)
        if number % 10 == 9:
            bench.save(complete=False)
    if again and len(again) < len(wanted):
        say(f"{len(again)} answers ended before their move or kill; made again")
        # Another prompt and an earlier move.
        await perform(bench, [evolve(p, number=p.number + 3, min_tokens=4) for p in again], end_s)


def show(number: int, total: int, o: Outcome) -> None:
    """One line of progress."""
    plan = o.plan
    way = f"{plan.pair.device} {'->' if plan.to_cloud else '<-'} {plan.pair.cloud} ({plan.pair.crosses})"
    what = f"{plan.victim} killed in {plan.phase}" if plan.victim else ("moves" if plan.moves else "stays")
    sides = [f"{owned.side}" for owned in o.owned]
    runs = "+".join(f"{sides[:i].count(s) or ''}{s}" for i, s in enumerate(sides) if i == 0 or sides[i - 1] != s)
    wrong = "; ".join(o.judged.violations) or o.error
    say(
        f"{number + 1}/{total} {1e3 * plan.rtt_s:.0f} ms {way}: {what}{'' if o.struck or not plan.victim else ' (not)'}"
        f", {len(o.owned)} tokens by {runs}, moved {o.moved}, lost sides {o.lost_sides}, "
        f"delayed so far {o.meter.delayed_tokens}, {o.seconds:.1f} s {wrong}"
    )


def score(bench: Bench, files: dict[str, Path], end_s: float) -> None:
    """Likelihood of the stitched answers, and the law in numbers: the target's tokens are the best it has, as far as
    its own answers that nobody moved are."""
    for model, file in files.items():
        if end_s - time.monotonic() < ORACLE_S:
            bench.notes.append(f"there was no time to score what {model} made")
            bench.complete = False
            continue
        oracle = Oracle(file, CONTEXT_TOKENS // 2)
        try:
            _score_model(bench, Own(oracle, model, bench.own), end_s)
        finally:
            oracle.close()


def _score_model(bench: Bench, own: Own, end_s: float) -> None:
    for outcome in bench.outcomes:
        if time.monotonic() > end_s:
            bench.notes.append("the time was over before all answers were scored")
            bench.complete = False
            return
        actor = last_actor(bench, outcome)
        if outcome.owned and actor.model == own.model:
            _score_one(own, outcome, actor)
    bench.nats[own.model] = (own.worst, own.limit)


def last_actor(bench: Bench, outcome: Outcome) -> Actor:
    """Who made the end of an answer."""
    pair = outcome.plan.pair
    side = outcome.owned[-1].side if outcome.owned else "device"
    return bench.stage.actors[pair.device if side == "device" else pair.cloud]


def _score_one(own: Own, outcome: Outcome, actor: Actor) -> None:
    tokens, side = [o.token for o in outcome.owned if o.token.data], outcome.owned[-1].side
    at = max((n + 1 for n, o in enumerate(outcome.owned) if o.side != side), default=0)
    if outcome.plan.pair.crosses == "ids":
        before = [t.id for t in tokens[:at] if t.id is not None]
    else:
        before = own.oracle.ids(b"".join(t.data for t in tokens[:at])) if at else []
    after = [t.id for t in tokens[at:] if t.id is not None]
    scored = own.oracle.score(outcome.plan.prompt, before, after)
    own.worst = max(own.worst, scored.worst)
    if scored.worst > own.limit:
        wrong = f"a token of {actor.name} lies {scored.worst:.2f} nats below its best, the limit is {own.limit:.2f}"
        outcome.judged = evolve(outcome.judged, violations=(*outcome.judged.violations, wrong))
    if outcome.moved and outcome.plan.victim is None:
        # As many tokens, since later ones are likelier.
        outcome.own_nll = own.nll(outcome.plan.number % len(PROMPTS), len(before) + len(after))
        outcome.nll = None if outcome.own_nll is None else scored.nll


def say(text: str) -> None:
    """Progress, at once."""
    print(f"  {text}", flush=True)


async def run(json_file: Path | None, quick: bool, seed: int, limit_s: float, bound: list[Bench]) -> Bench:
    """The whole bench."""
    began_s = time.monotonic()
    store, draw = default_store(), random.Random(seed)
    files = {model: store.pull(model) for model in (SMOL, GEMMA)}
    wanted: dict[str, Actor] = {}
    for pair in pairs(quick):
        for name in (pair.device, pair.cloud):
            binding, model = name.split(":")
            wanted.setdefault(name, Actor(_binding(binding), model, files[model]))
    async with stage(list(wanted.values()), draw) as set_:
        bench = Bench(set_, json_file, quick)
        bound.append(bench)
        try:
            await bench.measure()
            scoring_s = min(SCORING_S, limit_s / 4)
            await perform(bench, plans(quick, draw), began_s + limit_s - scoring_s)
            await bench.rest()
        finally:
            await bench.close()
        bench.save(complete=False)
        await asyncio.to_thread(score, bench, files, began_s + limit_s)
    return bench


def _binding(name: str) -> Binding:
    return "llama_server" if name == "llama_server" else "llama_cpp"


def give_up(bound: Sequence[Bench]) -> None:
    """The last resort of a run that hangs: write what is there and end."""
    print("the bench did not end in time; what it has is written", flush=True)
    for bench in bound:
        bench.notes.append("ended by its watchdog")
        bench.save(complete=False)
    os._exit(3)


def main() -> int:
    """Command line."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--limit-s", type=float, help=f"end after so many seconds (default {LONGEST_S:.0f}, quick {QUICK_S:.0f})"
    )
    options = parser.parse_args()
    limit_s = options.limit_s or (QUICK_S if options.quick else LONGEST_S)
    bound: list[Bench] = []
    watchdog = threading.Timer(limit_s + (9.0 if options.quick else 40.0), give_up, (bound,))
    watchdog.daemon = True
    watchdog.start()
    began_s = time.monotonic()
    bench = asyncio.run(run(options.json, options.quick, options.seed, limit_s, bound))
    watchdog.cancel()
    bench.notes.append(f"took {time.monotonic() - began_s:.0f} s; load average {os.getloadavg()[0]:.1f}")
    for outcome in bench.outcomes:
        bench.notes += [f"answer {outcome.plan.number}: {one}" for one in outcome.judged.violations]
    publish("handoff", {**bench.keys(), "complete": bench.complete}, options.json, bench.notes)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Live handoffs between two engines over a shaped link, with kills in every phase.

`python -m benchmarks.handoff --json F [--quick]`: SmolLM2 and Gemma on llama-server (xllamacpp) and llama-cpp-python, a
worker process and one thread each; one side is the device, the other sits behind the handoff protocol and a user-space
shaper with 20, 60 and 150 ms of round trip, lost segments and stalls. The reader takes a quarter of the measured decode
rate. Half of the answers move by plan, in both directions; in the other half the source, the target or the link is
killed (SIGKILL, connections reset) while the target prepares, is extended, cuts over, or has just taken over.

Pairs: same model, ids cross (two vocabularies); same model, text crosses, as to a server that tells no vocabulary; and
two models with two vocabularies, so that text crosses. An answer that ended before its move or its kill is made again
with another prompt (`remade`).

The law in numbers: the target's tokens lie within 0.25 nats of the best one of a one-shot pass over the same prefix.
llama-cpp-python makes the pass for all of them, with the attention that the engines decode with. A token that lies
further below there (`over_in_first_pass`) is made once more by the engine that made it, which begins with an empty
cache, as it did then, and reads the answer that the reader got in the same pieces: if the same tokens come out, this is
what the target generates from exactly that prefix (`made_again`, `made_again_nats_worst`), as long as it lies no
further below than rounding goes (0.6). If not, the engine reads the prefix in one go, and what lies further below there
too is a violation. That this judge can tell is shown by answers of which the token before the seam is left out
(`control_seen_ratio`). The same is done with answers that nobody moved (keys with `own_`, and `nats_worst_own` beside
`nats_worst`). What the `nll_ratio` keys and `id_bytes_ratio` count is told in benchmarks/handoff_report.py.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

from attrs import evolve

from benchmarks.handoff_law import Law
from benchmarks.handoff_plan import (
    GEMMA,
    PROMPTS,
    QUICK_PROMPTS,
    QUICK_TOKENS,
    SMOL,
    TOKENS,
    Pace,
    Pair,
    Plan,
    pairs,
    plans,
)
from benchmarks.handoff_report import Outcome, answer_keys
from benchmarks.handoff_score import Judged, OwnAnswer, judge
from benchmarks.handoff_stage import Actor, Batch, Binding, Phase, Stage, Watched, stage
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
LONGEST_S = 24.4 * 60
"""The bench ends by itself before 25 minutes, whatever happens."""

REMEASURED_AFTER = 20
"""Answers between two measurements of the decode rates, which drift with the machine's load."""

AHEAD_TOKENS = GatewaySettings().ahead_tokens
"""Unread tokens that a source may make, half of them in its engine and half with the reader: short answers must not be
over before a target was prepared over 150 ms."""

QUICK_S = 38.0
"""So that a quick run is over within 45 s, engines closed."""

SCORING_S = 300.0
"""Kept for scoring at the end: a second or so for each answer on a slow machine."""

AGAIN_LATER = 10
"""An answer that ended early is made again after so many others."""

MOST_ATTEMPTS = 6
"""An answer that ended before its move or kill is made again so often, with another prompt each time."""


class Strike:
    """Kills once, when the target enters the planned phase."""

    def __init__(self, plan: Plan, kill: Any) -> None:
        self.done = False
        self._plan, self._kill = plan, kill
        self._timer: asyncio.TimerHandle | None = None

    def __call__(self, phase: Phase) -> None:
        if self._plan.phase == phase and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._plan.late_s, self._strike)

    def over(self) -> None:
        """The answer was made; whoever still lives is spared."""
        if self._timer is not None:
            self._timer.cancel()

    def _strike(self) -> None:
        self.done = True
        self._kill()


class Bench:
    """Runs plans on a stage and keeps what came of them."""

    def __init__(self, set_: Stage, json_file: Path | None, quick: bool) -> None:
        self.stage = set_
        self.quick = quick
        self.outcomes: list[Outcome] = []
        self.own: dict[tuple[str, int], OwnAnswer] = {}
        self.law = Law(set_.actors, self.own)
        self.notes: list[str] = []
        self.complete = True
        self.pace = Pace(QUICK_TOKENS if quick else TOKENS, AHEAD_TOKENS // 2)
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
            rates = []
            for number, prompt in enumerate(PROMPTS[:QUICK_PROMPTS] if self.quick else PROMPTS):
                await actor.forget()
                tokens, rate = await actor.run(prompt, QUICK_TOKENS[1] if self.quick else TOKENS[1])
                rates.append(rate)
                said = [token for token in tokens if token.data and token.id is not None]
                self.own[actor.name, number] = OwnAnswer(said, tuple(actor.heard))
            actor.tokens_per_s = percentile(rates, 0.5)
        if not self.quick:
            await self.measure_again()

    async def measure_again(self) -> None:
        """Decode rates as they are now: a reader's rate is a quarter of what the machine can do at the time."""
        for actor in self.stage.actors.values():
            rates = [(await actor.run(prompt, 32))[1] for prompt in PROMPTS[:3]]
            actor.tokens_per_s = percentile(rates, 0.5)
            actor.generations.clear()
        shown = ", ".join(f"{actor.name} {actor.tokens_per_s:.0f}" for actor in self.stage.actors.values())
        say(f"tokens/s with one thread: {shown}")

    def reader_tokens_per_s(self, pair: Pair) -> float:
        """A quarter of what the slower of the two decodes."""
        return min(self.stage.actors[name].tokens_per_s for name in (pair.device, pair.cloud)) / 4

    def longest(self, answers: int, seconds: float) -> int:
        """Tokens that each of so many answers may have, to be made in these seconds."""
        return self.pace.longest([self.reader_tokens_per_s(pair) for pair in pairs(self.quick)], answers, seconds)

    async def run(self, plan: Plan) -> Outcome:
        """Make one answer; returns when it was generated. Its reader may still read the rest of it."""
        device, cloud = self.stage.actors[plan.pair.device], self.stage.actors[plan.pair.cloud]
        r_c = self.reader_tokens_per_s(plan.pair)
        await asyncio.gather(device.forget(), cloud.forget())
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
        strike.over()
        if stalling is not None:
            stalling.cancel()
            await asyncio.wait({stalling})
        by_side = {"device": list(device.generations), "cloud": list(cloud.generations)}
        outcome.struck = strike.done
        outcome.moved = any(isinstance(event, HandedOver) for event in emit.events)
        outcome.lost_sides = sum(isinstance(event, SourceLost) for event in emit.events)
        if outcome.owned:
            outcome.heard = tuple((device if outcome.owned[-1].side == "device" else cloud).heard)
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
        return {
            **answer_keys(self.outcomes),
            "migrations_asked": sum(o.clean and not o.plan.attempt for o in self.outcomes),
            "remade": sum(o.plan.attempt > 0 for o in self.outcomes),
            **self.law.keys(),
            "stalls": self.stage.stalls,
            "tokens_per_s": {name: round(actor.tokens_per_s, 1) for name, actor in self.stage.actors.items()},
        }

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


def _ignore(phase: Phase) -> None:
    return


async def perform(bench: Bench, wanted: Sequence[Plan], end_s: float) -> None:
    """Run the plans one after the other until all are done or the time is over; what ended early is made again."""
    waiting = deque(wanted)
    for number in count():
        if not waiting:
            return
        if time.monotonic() > end_s:
            bench.notes.append(f"the time was over when {len(waiting)} of {len(wanted)} answers were still to be made")
            bench.complete = False
            return
        began_s = time.monotonic()
        if number and number % REMEASURED_AFTER == 0:
            await bench.rest()
            await bench.measure_again()
        longest = bench.longest(len(waiting), end_s - time.monotonic())
        plan = waiting.popleft()
        outcome = await bench.run(plan.of_length(longest))
        bench.outcomes.append(outcome)
        if not outcome.done:
            if outcome.plan.attempt < MOST_ATTEMPTS:
                waiting.insert(AGAIN_LATER, evolve(plan.again(), max_tokens=plan.max_tokens))
            else:
                bench.notes.append(f"answer {outcome.plan.number} ended early {MOST_ATTEMPTS + 1} times")
        await bench.stage.mend()
        outcome.seconds = time.monotonic() - began_s
        bench.pace.took(outcome.seconds, len(outcome.owned), outcome.r_c)
        show(number, number + 1 + len(waiting), outcome)
        if number % 10 == 9:
            bench.save(complete=False)


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
            scoring_s = min(SCORING_S, limit_s / 3)
            end_s = began_s + limit_s - scoring_s
            await perform(bench, plans(quick, draw), end_s)
            await bench.rest()
        finally:
            await bench.close()
        bench.notes += sample(bench.outcomes, quick)
        bench.save(complete=False)
        await bench.law.alone(bench.outcomes, began_s + limit_s)
        await asyncio.to_thread(bench.law.score, bench.outcomes, files, began_s + limit_s)
        await bench.law.ask(began_s + limit_s)
        bench.notes += bench.law.notes
        bench.complete = bench.complete and bench.law.complete
    return bench


def sample(outcomes: Sequence[Outcome], quick: bool) -> list[str]:
    """How much was made, for the notes."""
    lengths = [outcome.plan.max_tokens for outcome in outcomes]
    notes = [f"answers have {min(lengths)} to {max(lengths)} tokens at most"] if lengths else []
    few = (
        f"a sample: {len(outcomes)} short answers of two pairs at one round trip; the figures are those of the full run"
    )
    return [*notes, few] if quick else notes


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
    watchdog = threading.Timer(limit_s + (6.0 if options.quick else 30.0), give_up, (bound,))
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

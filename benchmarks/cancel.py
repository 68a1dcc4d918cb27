"""How soon a cancelled answer stops costing anything: in the queue, inside its prompt and while it decodes.

`python -m benchmarks.cancel --json F [--quick]`: SmolLM2 behind the bounded queue, in this process and on one thread;
beside every trial another answer streams. Keys per engine: `*_stop_ms_p50`, `_p99`, `_max` per phase (wall clock) and
`*_stop_cpu_ms_max` (what the process computed until the engine had stopped: the same on a busy machine); `ran` (queued
requests of departed clients that were handed to the engine: 0), `lost` (tokens missing in the other streams: 0);
`llama_server_read_tokens_max`: most prompt tokens still read for a client that had left, by the server's own count;
`llama_server_ttft_ratio`: first token of a long prompt with its batch sized for this (`llama_server_batch_tokens`, from
the prefill rate measured first), over one batch for all of it.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from attrs import define, field, frozen

from benchmarks.report import arguments, percentile, publish, spread
from engines.llama_cpp import EmbeddedLlamaCpp
from engines.llama_server import EmbeddedLlamaServer
from engines.port import Continuation, TextEngine
from engines.queued_text import QueuedTextEngine
from engines.registry import installed_engines
from engines.store import default_store
from engines.text_admission import prefill_batch
from engines.unix_http import local_request
from engines.wrapping import WrappedTextEngine
from protocol.text import Sampling, TextRequest

MODEL = "smollm2-135m"
PHASES = ("queue", "prefill", "decode")
PROMPT_WORDS = 160
OTHER_TOKENS = 48
CONTEXT_TOKENS = 384
TTFT_PAIRS = 12


@frozen
class Trial:
    """One cancellation. `inside`: the phase was met. stop_s, stop_cpu_s: until the engine had stopped.

    read_tokens: prompt tokens that the engine still read after the client had left, where it tells them.
    """

    phase: str
    inside: bool
    stop_s: float
    stop_cpu_s: float
    read_tokens: int = 0


@define
class Outcome:
    """Trials of one engine, with what must be nothing: queued requests that ran, tokens missing elsewhere."""

    trials: list[Trial] = field(factory=list)
    ran: int = 0
    lost: int = 0
    other_answers: int = 0

    def stops_s(self, phase: str) -> list[float]:
        """Wall seconds of the trials that met `phase`."""
        return [trial.stop_s for trial in self.trials if trial.phase == phase and trial.inside]

    def stops_cpu_s(self, phase: str) -> list[float]:
        """Processor seconds of the trials that met `phase`."""
        return [trial.stop_cpu_s for trial in self.trials if trial.phase == phase and trial.inside]

    def read_tokens(self) -> list[int]:
        """Prompt tokens read after the client had left, of the trials that met the prompt."""
        return [trial.read_tokens for trial in self.trials if trial.phase == "prefill" and trial.inside]


class Watched(WrappedTextEngine):
    """A text engine that remembers which prompts reached it."""

    def __init__(self, inner: TextEngine) -> None:
        super().__init__(inner)
        self.prompts: set[object] = set()

    async def prepare(self, request: TextRequest, deadline_s: float) -> Continuation:
        self.prompts.add(request.prompt)
        return await self._inner.prepare(request, deadline_s)


class Bench:
    """One engine with two slots behind the queue: one streams on and on, the other is cancelled again and again."""

    def __init__(self, engine: EmbeddedLlamaCpp | EmbeddedLlamaServer, draw: random.Random) -> None:
        self._native = engine
        self._watched = Watched(engine)
        self._engine = QueuedTextEngine(self._watched, slots=2, wait_target_s=600.0)
        self._draw = draw
        self._numbers = itertools.count()
        self._prefill_s = 0.5
        self.outcome = Outcome()

    async def run(self, trials: int) -> Outcome:
        """`trials` cancellations, the phases in random order."""
        await self._engine.capabilities()
        stop = asyncio.Event()
        other = asyncio.create_task(self._stream_on(stop))
        try:
            began_s = time.perf_counter()
            await (await self._engine.prepare(self._ask(PROMPT_WORDS), 60.0)).close()
            self._prefill_s = time.perf_counter() - began_s
            for _ in range(trials):
                phase = self._draw.choice(PHASES)
                self.outcome.trials.append(await getattr(self, f"_{phase}")())
                if other.done():
                    break
        finally:
            stop.set()
            await other
        return self.outcome

    def _ask(self, words: int, tokens: int = 64) -> TextRequest:
        prompt = f"{next(self._numbers)} " + "north " * words
        return TextRequest(MODEL, prompt, Sampling(max_tokens=tokens))

    async def _stream_on(self, stop: asyncio.Event) -> None:
        """Nobody else's stream is touched: every one of these answers comes whole and in order."""
        while not stop.is_set():
            expected = 0
            continuation = await self._engine.prepare(self._ask(3, OTHER_TOKENS), 60.0)
            async for token in continuation.start(0, 8):
                self.outcome.lost += abs(token.index - expected)
                expected = token.index + 1
                continuation.acknowledge(token.index)
                ended = token.finish
            if ended == "length":
                self.outcome.lost += OTHER_TOKENS - expected
            self.outcome.other_answers += 1

    async def _queue(self) -> Trial:
        """Both slots are taken; the client goes while it waits for one."""
        blocker = await self._engine.prepare(self._ask(3), 60.0)
        request = self._ask(3)
        waiting = asyncio.create_task(self._engine.prepare(request, 60.0))
        await asyncio.sleep(self._draw.random() * 0.02)
        # The other stream may have ended meanwhile, and its slot is this request's by right.
        inside = self._engine.load().waiting > 0 and request.prompt not in self._watched.prompts
        timed = _Timed()
        await _cancel(waiting)
        trial = Trial("queue", inside, *timed.now())
        await blocker.close()
        await self._stopped()
        if inside:
            self.outcome.ran += request.prompt in self._watched.prompts
        return trial

    async def _prefill(self) -> Trial:
        preparing = asyncio.create_task(self._engine.prepare(self._ask(PROMPT_WORDS), 60.0))
        await asyncio.sleep(self._draw.random() * 0.6 * self._prefill_s)
        before = await self._prompt_tokens_read()
        inside = not preparing.done()
        timed = _Timed()
        await _cancel(preparing)
        await self._stopped()
        stop_s, stop_cpu_s = timed.now()
        after = await self._prompt_tokens_read()
        task = max(after, default=0)
        return Trial("prefill", inside, stop_s, stop_cpu_s, after.get(task, 0) - before.get(task, 0))

    async def _decode(self) -> Trial:
        continuation = await self._engine.prepare(self._ask(3), 60.0)
        tokens = continuation.start(0, 64)
        for _ in range(self._draw.randrange(1, 12)):
            await anext(tokens, None)
        timed = _Timed()
        await continuation.close()
        await self._stopped()
        return Trial("decode", True, *timed.now())

    async def _stopped(self) -> None:
        """Return when the engine works on nothing but the other stream."""
        if isinstance(self._native, EmbeddedLlamaCpp):
            # Such a job runs between two batches.
            await self._native.tokenize(b"x")
            return
        while await self._busy_slots() > 1:
            await asyncio.sleep(0.002)

    async def _busy_slots(self) -> int:
        return sum(slot["is_processing"] for slot in await self._server_slots())

    async def _prompt_tokens_read(self) -> dict[int, int]:
        """By task, of the long prompts in the server's slots, the batch that runs included; empty in other engines."""
        if not isinstance(self._native, EmbeddedLlamaServer):
            return {}
        slots = [slot for slot in await self._server_slots() if "params" in slot]
        own = [slot for slot in slots if slot["params"]["n_predict"] != OTHER_TOKENS]
        return {int(slot["id_task"]): int(slot["n_prompt_tokens"]) for slot in own}

    async def _server_slots(self) -> list[dict[str, Any]]:
        assert isinstance(self._native, EmbeddedLlamaServer)
        address, key = await self._native.url(), await self._native.api_key()
        async with local_request(address, "/slots", None, key) as reply:
            slots: list[dict[str, Any]] = json.loads(await reply.body())
        return slots


class _Timed:
    def __init__(self) -> None:
        self._began_s, self._began_cpu_s = time.perf_counter(), time.process_time()

    def now(self) -> tuple[float, float]:
        """Wall and processor seconds since the beginning."""
        return time.perf_counter() - self._began_s, time.process_time() - self._began_cpu_s


async def _cancel(preparing: asyncio.Task[Continuation]) -> None:
    preparing.cancel()
    with suppress(asyncio.CancelledError):
        await (await preparing).close()


async def trials(engine: EmbeddedLlamaCpp | EmbeddedLlamaServer, count: int, seed: int = 1) -> Outcome:
    """`count` random cancellations on an engine with two slots; closes it."""
    try:
        return await Bench(engine, random.Random(seed)).run(count)
    finally:
        await engine.close()


async def measured_batch(model: Path) -> int:
    """As the agent does: this machine's prefill rate, and the batch of it that ends soon enough."""
    engine = EmbeddedLlamaServer(model, context_tokens=CONTEXT_TOKENS, threads=1, slots=2)
    try:
        rates = []
        for number in range(3):  # the first one loads the model
            prompt = f"{number} " + "north " * PROMPT_WORDS
            tokens = len(await engine.tokenize(prompt.encode()))
            began_s = time.perf_counter()
            await (await engine.prepare(TextRequest(MODEL, prompt, Sampling(max_tokens=1)), 60.0)).close()
            rates.append(tokens / (time.perf_counter() - began_s))
        return prefill_batch(min(rates[1:]))
    finally:
        await engine.close()


async def ttft_ratio(model: Path, batch_tokens: int, pairs: int) -> list[float]:
    """First token of a prompt of PROMPT_WORDS with batches of `batch_tokens` over one batch, pair by pair."""
    engines = [
        EmbeddedLlamaServer(model, context_tokens=CONTEXT_TOKENS, threads=1, slots=1, batch_tokens=tokens)
        for tokens in (batch_tokens, CONTEXT_TOKENS)
    ]
    found: list[float] = []
    try:
        for turn in range(-1, pairs):
            seconds = []
            for engine in engines if turn % 2 else reversed(engines):
                request = TextRequest(MODEL, f"{turn} " + "north " * PROMPT_WORDS, Sampling(max_tokens=1))
                began_s = time.perf_counter()
                await (await engine.prepare(request, 60.0)).close()
                seconds.append(time.perf_counter() - began_s)
            sized_s, whole_s = seconds if turn % 2 else reversed(seconds)
            if turn >= 0:
                found.append(sized_s / whole_s)
    finally:
        for engine in engines:
            await engine.close()
    return found


def stops(name: str, outcome: Outcome) -> dict[str, object]:
    """The keys of one engine."""
    keys: dict[str, object] = {}
    for phase in PHASES:
        wall_s, cpu_s = outcome.stops_s(phase), outcome.stops_cpu_s(phase)
        keys[f"{name}_{phase}_trials"] = len(wall_s)
        keys[f"{name}_{phase}_stop_ms_p50"] = 1e3 * statistics.median(wall_s)
        keys[f"{name}_{phase}_stop_ms_p99"] = 1e3 * percentile(wall_s, 0.99)
        keys[f"{name}_{phase}_stop_ms_max"] = 1e3 * max(wall_s)
        keys[f"{name}_{phase}_stop_cpu_ms_max"] = 1e3 * max(cpu_s)
    if name == "llama_server":  # the other one does not tell
        keys[f"{name}_read_tokens_max"] = max(outcome.read_tokens())
    return keys


async def run(count: int, pairs: int) -> dict[str, object]:
    """Every installed engine."""
    model = default_store().path(MODEL)
    batch_tokens = await measured_batch(model)
    makes: dict[str, Callable[[], EmbeddedLlamaCpp | EmbeddedLlamaServer]] = {
        "llama_server": lambda: EmbeddedLlamaServer(
            model, context_tokens=CONTEXT_TOKENS, threads=1, slots=2, batch_tokens=batch_tokens
        ),
        "llama_cpp": lambda: EmbeddedLlamaCpp(model, context_tokens=CONTEXT_TOKENS, threads=1, slots=2),
    }
    keys: dict[str, object] = {"ran": 0, "lost": 0}
    ran = lost = 0
    for name, make in makes.items():
        if name not in installed_engines():
            print(f"{name} is not installed, left out")
            continue
        outcome = await trials(make(), count)
        ran, lost = ran + outcome.ran, lost + outcome.lost
        keys |= stops(name, outcome)
    ratios = await ttft_ratio(model, batch_tokens, pairs)
    keys |= {"ran": ran, "lost": lost, "llama_server_batch_tokens": batch_tokens}
    keys |= {"llama_server_ttft_ratio": statistics.median(ratios)}
    return {**keys, "llama_server_ttft_ratios": spread(ratios)}


def main() -> int:
    """Measure and publish."""
    options = arguments(__doc__ or "").parse_args()
    keys = asyncio.run(run(*((24, 3) if options.quick else (200, TTFT_PAIRS))))
    publish("cancel", keys, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())

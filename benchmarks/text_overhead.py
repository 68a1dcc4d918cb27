"""What the agent costs on top of the raw loop of a llama.cpp binding: decode rate and time to first token.

`python -m benchmarks.text_overhead --json F [--quick]`: SmolLM2 streams through a running agent (HTTP, SSE, stream
owner, child process) and through the bare binding with the same threads, in turn, for both bindings; each side is
first in every other pair. Keys are the worst of both: tok_s_ratio (agent over raw, median of pairs), ttft_added_ms
(median of more pairs with prompts of a few words and two tokens: what the agent adds does not depend on the prompt, and
the prefill of a long one varies by more than that). The client is the lean one: its own work is none of the agent's.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.demo.stage import Child
from benchmarks.report import arguments, publish, spread
from engines.llama_server import default_threads
from engines.registry import installed_engines
from engines.store import default_store
from links.http_lean import LeanHttpLink
from protocol.errors import EngineError
from protocol.sse import SseParser

MODEL = "smollm2-135m"
BINDINGS = {"llama_server": "xllamacpp", "llama_cpp": "llama-cpp-python"}
ANSWER_TOKENS = 96
FIRST_TOKENS = 2
HOPS = 4
PAIRS, QUICK_PAIRS = 20, 3
FIRST_PAIRS = 8
"""Pairs for the time to first token, per pair for the rate."""

SUBJECTS = (
    "rivers",
    "clocks",
    "lamps",
    "trains",
    "maps",
    "bread",
    "glass",
    "storms",
    "ships",
    "bees",
    "stone",
    "paper",
)


def prompt(turn: int) -> str:
    """Another first word each time, so that neither side can reuse a prefix."""
    subject = SUBJECTS[turn % len(SUBJECTS)]
    return f"{subject}, chapter {turn}. Once upon a time, in a land of {subject}, there lived an old woman who"


class Raw:
    """The bare binding in a child process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    @classmethod
    async def start(cls, binding: str, model: Path, threads: int) -> Raw:
        """Load the model and wait until it is ready."""
        command = [sys.executable, "-m", "benchmarks.raw_loops", binding, str(model), str(threads)]
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *command, stdin=pipe, stdout=pipe, stderr=asyncio.subprocess.DEVNULL
        )
        raw = cls(process)
        await raw._line()
        return raw

    async def _line(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = await self.process.stdout.readline()
        if not line:
            raise EngineError("the raw loop ended; run `python -m benchmarks.raw_loops` by hand to see why")
        return dict(json.loads(line))

    async def generate(self, ids: list[int], tokens: int) -> tuple[float, float]:
        """(TTFT in seconds, tokens/s)."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"prompt": ids, "tokens": tokens}).encode() + b"\n")
        answer = await self._line()
        return float(answer["ttft_s"]), float(answer["tokens_per_s"])

    async def hop_s(self) -> float:
        """Seconds from one idle process to the next on this machine: half of a line there and a line back."""
        begun_s = time.perf_counter()
        await self.generate([], 0)
        return (time.perf_counter() - begun_s) / 2

    async def stop(self) -> None:
        """End the child."""
        self.process.kill()
        await self.process.wait()


async def wait_for_model(link: LeanHttpLink, seconds: float = 60.0) -> None:
    """Return when the agent lists the model; it is ready before its models are loaded."""
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        listed = await link.exchange("/v1/models", {}, b"", 5.0, method="GET")
        if MODEL in {one["id"] for one in json.loads(listed.body)["data"]}:
            return
        await asyncio.sleep(0.1)
    raise EngineError(f"the agent did not load {MODEL} within {seconds:g} s")


async def through_agent(link: LeanHttpLink, text: str, tokens: int) -> tuple[float, float]:
    """(TTFT in seconds, tokens/s) of a streamed completion, seen by a client of the agent."""
    body = {"model": MODEL, "prompt": text, "max_tokens": tokens, "temperature": 0, "stream": True}
    parser, times = SseParser(), []
    started_s = time.perf_counter()
    async for chunk in link.lines("/v1/completions", {}, json.dumps(body).encode(), 60.0):
        now_s = time.perf_counter()
        for event in parser.feed(chunk):
            if event.data != "[DONE]" and json.loads(event.data).get("choices", [{}])[0].get("text"):
                times.append(now_s)
    lasted_s = times[-1] - times[0]
    return times[0] - started_s, (len(times) - 1) / lasted_s if lasted_s > 0 else 0.0


async def one_pair(
    link: LeanHttpLink, raw: Raw, ids_of: Callable[[str], list[int]], turn: int, text: str, tokens: int
) -> tuple[tuple[float, float], tuple[float, float]]:
    """(TTFT, rate) of the raw loop and through the agent for the same prompt; every other time the agent is first."""
    if turn % 2:
        by_agent = await through_agent(link, text, tokens)
        return await raw.generate(ids_of(text), tokens), by_agent
    alone = await raw.generate(ids_of(text), tokens)
    return alone, await through_agent(link, text, tokens)


async def one_binding(binding: str, threads: int, turns: int) -> dict[str, list[float]]:
    """Interleaved pairs of raw and agent runs."""
    from benchmarks.raw_loops import tokenizer

    model = default_store().path(MODEL)
    ids_of = tokenizer(str(model))
    series: dict[str, list[float]] = {
        "ratio": [], "added_ms": [], "raw_tok_s": [], "agent_tok_s": [], "raw_ttft_ms": [], "hop_ms": [],
    }  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="midstream-overhead-") as folder:
        arguments_ = [
            "agent",
            "--json",
            "--state-dir",
            folder,
            "--port",
            "0",
            "--mdns",
            "false",
            "--benchmark",
            "false",
        ]
        arguments_ += ["--text-model", MODEL, "--text-engine", binding, "--text-threads", str(threads)]
        agent = await Child.start("agent", arguments_, Path(folder) / "agent.log", {})
        raw = await Raw.start(binding, model, threads)
        link = LeanHttpLink("bench", f"http://127.0.0.1:{(await agent.wait_for('ready'))['port']}")
        try:
            await wait_for_model(link)
            await through_agent(link, "warm up", 8)
            await raw.generate(ids_of("warm up"), 8)
            pair = partial(one_pair, link, raw, ids_of)
            for turn in range(turns):
                (_, raw_rate), (_, rate) = await pair(turn, prompt(turn), ANSWER_TOKENS)
                if min(raw_rate, rate) == 0:
                    continue  # an answer of one token has no rate
                series["ratio"].append(rate / raw_rate)
                series["raw_tok_s"].append(raw_rate)
                series["agent_tok_s"].append(rate)
            for turn in range(turns, turns + turns * FIRST_PAIRS):
                (raw_ttft_s, _), (ttft_s, _) = await pair(
                    turn, f"{SUBJECTS[turn % len(SUBJECTS)]}, page {turn}", FIRST_TOKENS
                )
                series["raw_ttft_ms"].append(1e3 * raw_ttft_s)
                series["added_ms"].append(1e3 * (ttft_s - raw_ttft_s))
                series["hop_ms"].append(1e3 * await raw.hop_s())
        finally:
            await link.close()
            await raw.stop()
            await agent.stop()
    return series


async def run(turns: int, threads: int) -> dict[str, object]:
    """Both bindings, one after the other; the keys are the worst of both."""
    keys: dict[str, object] = {"threads": threads}
    ratios, added = [], []
    for binding, distribution in BINDINGS.items():
        if binding not in installed_engines():
            print(f"{binding}: {distribution} is not installed, left out")
            continue
        series = await one_binding(binding, threads, turns)
        ratios.append(statistics.median(series["ratio"]))
        added.append(statistics.median(series["added_ms"]))
        for name, values in series.items():
            keys[f"{binding}_{name}"] = spread(values)
    print(f"{HOPS} hops lie between a client and llama-server: to the agent, to its child process, and back")
    return {"tok_s_ratio": min(ratios), "ttft_added_ms": max(added), **keys}


def main() -> int:
    """Measure and publish."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--threads", type=int, default=default_threads(), help="threads on both sides")
    options = parser.parse_args()
    keys = asyncio.run(run(QUICK_PAIRS if options.quick else PAIRS, options.threads))
    few = f"a sample: {QUICK_PAIRS} pairs of answers; the figures are those of the full run"
    publish("text_overhead", keys, options.json, [few] if options.quick else ())
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""`python -m benchmarks.demo [--constant] [--out demo.jsonl]`: exits 0 only if all that it promises was seen."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.demo import talk, vision
from benchmarks.demo.records import Record, Tail, counts, metric_growth, played, read
from benchmarks.demo.screen import Screen
from benchmarks.demo.stage import VISION_MODEL, Stage, open_stage
from engines.store import default_store
from links.http import HttpLink
from protocol.errors import MidstreamError

SLOWDOWN = 6.0
CLOUD_TOKENS_BEFORE_LOSS = 12


async def play(out: Path, constant: bool, screen: Screen) -> bool:
    """All scenes. True if the records hold what the demo promises."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.unlink(missing_ok=True)
    store = default_store()
    images = [store.path("sample-page"), store.path("sample-text")]
    with tempfile.TemporaryDirectory(prefix="midstream-demo-") as folder:
        async with open_stage(Path(folder), out, SLOWDOWN, screen) as stage:
            tail = Tail(out)
            await show_profile(stage, screen)
            screen.heading("learning the link")
            await vision.warm_up(stage, tail, images, screen)
            before = await fetch(stage, "/metrics")
            append(out, {"event": "demo_begin", "metrics": before})
            tail.new()
            screen.heading(f"text detection ({VISION_MODEL}) while the network changes")
            seen = await vision.run(stage, tail, images, vision.CONSTANT if constant else vision.FALLING, screen)
            if not constant:
                await answers(stage, tail, screen)
            metrics = await fetch(stage, "/metrics")
        append(out, vision.as_record(seen))
        append(out, {"event": "demo_end", "metrics": metrics})
    return verdict(read(out), seen, constant, screen)


def append(out: Path, record: Record) -> None:
    """One more line in the file that the agent writes too."""
    with out.open("a") as f:
        f.write(json.dumps(record) + "\n")


async def show_profile(stage: Stage, screen: Screen) -> None:
    """Scene 1: what the agent found out about this device."""
    status = json.loads(await fetch(stage, "/midstream/v1/status"))
    profile = status.get("profile") or {}
    screen.heading("this device")
    for key in ("device_id", "soc", "cores", "memory_bytes", "page_bytes", "os", "npu", "engines"):
        screen.say(f"    {key:14} {profile.get(key)}")
    screen.say(
        f"    slow-down      {SLOWDOWN:g} x, declared: one machine plays both sides; all costs are measured through it"
    )
    for row in profile.get("measured", ()):
        per_token = f", {1e3 * row['per_token_s']:.1f} ms a token" if row.get("per_token_s") else ""
        screen.say(f"    {row['what']:40} {1e3 * row['median_s']:8.1f} ms{per_token} ({row['threads']} threads)")


async def answers(stage: Stage, tail: Tail, screen: Screen) -> None:
    """Scenes 3 and 4."""
    screen.heading("an answer that begins on the device and ends in the cloud")
    await talk.ask(stage, tail, talk.PROMPTS[0], 96, screen, lambda _: None)
    screen.heading("the cloud is killed in the middle of an answer")

    def kill(cloud_tokens: int) -> None:
        if cloud_tokens == CLOUD_TOKENS_BEFORE_LOSS:
            stage.coordinator.kill()

    await talk.ask(stage, tail, talk.PROMPTS[1], 96, screen, kill)


async def fetch(stage: Stage, path: str) -> str:
    """GET from the agent."""
    link = HttpLink("demo", stage.url)
    try:
        return (await link.exchange(path, {}, b"", 10.0, method="GET")).body.decode()
    finally:
        await link.close()


PROMISES = (
    ("switch", "midstream_arm_switches_total", 2),
    ("handoff", "midstream_handovers_total", 1),
    ("cloud_lost", "midstream_source_lost_total", 1),
)


def verdict(records: list[Record], seen: vision.VisionResult, constant: bool, screen: Screen) -> bool:
    """The closing table: what was promised, what the records say, what the metrics say."""
    found, metrics = counts(played(records)), metric_growth(records, [metric for _, metric, _ in PROMISES])
    screen.heading("what happened")
    rows, good = [], seen.failed == 0
    for kind, metric, least in PROMISES:
        enough = found[kind] == 0 if constant else found[kind] >= least
        good = good and enough and metrics[metric] == found[kind]
        promise = "exactly 0" if constant else f"at least {least}"
        rows.append((kind, str(found[kind]), f"{metrics[metric]:g}", promise, "yes" if enough else "NO"))
    screen.table(("event", "records", "metrics", "promised", "seen"), rows)
    screen.say("")
    vision_rows = [
        (phase, arm, str(len(times)), f"{sorted(times)[len(times) // 2]:.1f}")
        for (phase, arm), times in seen.times_ms.items()
    ]
    screen.table(("network", "arm", "answers", "median ms"), vision_rows)
    screen.say(f"requests that failed: {seen.failed}")
    return good


async def run(out: Path, constant: bool) -> int:
    """Play, and let Ctrl-C end it in order."""
    loop = asyncio.get_running_loop()
    task = asyncio.create_task(play(out, constant, Screen()))
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, task.cancel)
    try:
        return 0 if await task else 1
    except asyncio.CancelledError:
        print("\nstopped; nothing is left running", file=sys.stderr)
        return 130


def main() -> int:
    """Parse and run; a MidstreamError becomes one clear line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("demo.jsonl"), help="the requests' own records")
    parser.add_argument("--constant", action="store_true", help="a constant link: nothing may switch")
    options = parser.parse_args()
    started_s = time.monotonic()
    with contextlib.suppress(KeyboardInterrupt):
        try:
            code = asyncio.run(run(options.out, options.constant))
        except MidstreamError as err:
            print(f"demo: {err}", file=sys.stderr)
            return 1
        print(f"\n{time.monotonic() - started_s:.0f} s; records in {options.out}; exit {code}")
        return code
    return 130


if __name__ == "__main__":
    sys.exit(main())

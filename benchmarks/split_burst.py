"""A burst of batched answers against interactive work on one device.

The cloud's batching jumps from 30 to 1,000 answers (300 in a quick run): they leave at once, over a real WebSocket, and
each needs real post-processing here, while a user's requests go on. With the bound, answers are worked on by a small
executor and by the reader of their own stream (engines/laned.py), both with less claim to a core than the user's work;
without it, every answer is read at once and waits in the queue of the user's work. Both ways take turns.

One thread at a time works on answers either way. For the queue that is the best, too: the work is mostly Python, and
two workers that fight over the interpreter get less done together than one alone (`--queue-workers 2` shows it).

Throughput is that of all that was asked during the burst, over the time until all of that is done: the queue leaves the
user's requests for afterwards, and they are owed. `throughput_ratio_in_the_burst` leaves out what is owed; it counts
what was done when the last answer was, the user's requests as one each, though one is the work of several answers.

"Calm" is the time before the jump: a batch of 30 answers a second. "Idle" is no batches at all.

    python -m benchmarks.split_burst --json burst.json [--quick]
"""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from attrs import evolve, frozen

from benchmarks.burst_device import Device, Tally, arrive
from benchmarks.burst_server import GATE_PATH, STATE_PATH
from benchmarks.report import arguments, percentile, publish, spread
from engines.store import default_store
from engines.thread_priority import hand_over_soon
from links.http import HttpLink
from split_models.batch_onnx import free_rows
from split_models.cuts import single_tensor_cuts
from split_models.partition_onnx import Partitioner
from split_models.prepare_onnx import prepare

MODEL = "ppocr-v4-det"
BEFORE = 30
BATCH_EVERY_S = 1.0
"""In calm times a batch of BEFORE answers comes this often."""


@frozen
class Size:
    """How long each phase is, how many answers the burst has, how many pairs of stretches there are, and how many
    workers the queue without the bound has."""

    idle_s: float
    calm_s: float
    answers: int
    repeats: int
    queue_workers: int = 1


FULL = Size(idle_s=6.0, calm_s=10.0, answers=1_000, repeats=5)
QUICK = Size(idle_s=1.5, calm_s=3.0, answers=300, repeats=1)


@frozen
class Stretch:
    """Interactive latencies in each phase, and the burst from the opening of the gate to the last answer's work.

    all_per_s: what was asked during the burst, by the second until all of it is done; in_burst_per_s: what was done by
    the end of the last answer's work.
    """

    idle_s: tuple[float, ...]
    calm_s: tuple[float, ...]
    burst_s: tuple[float, ...]
    peak_queue: int
    all_per_s: float
    in_burst_per_s: float
    seconds: float
    lost: int

    def p99_ratio(self) -> float:
        """The burst's over the calm time's."""
        return percentile(self.burst_s, 0.99) / percentile(self.calm_s, 0.99)


def write_models(folder: Path, side: int) -> None:
    """whole, head and tail of the latest small cut, and the tail with a free first dimension."""
    prepared = prepare(default_store().pull(MODEL), {"x": (1, 3, side, side)})
    late = [cut for cut in single_tensor_cuts(prepared.graph) if cut.head_flops > 0.9 * prepared.graph.flops]
    cut = next(cut for cut in late if cut.crossing[0].shape[1] > 1)
    parts = Partitioner(prepared).split(cut, "raw")
    batch = free_rows(parts.tail)
    assert batch is not None
    for name, data in (("whole", prepared.data), ("head", parts.head), ("tail", parts.tail), ("batch", batch)):
        (folder / f"{name}.onnx").write_bytes(data)


class Cloud:
    """The server's process and the way to set its gate."""

    def __init__(self, folder: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.burst_server", str(folder)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self._process.stdout is not None
        self.url = f"http://127.0.0.1:{int(self._process.stdout.readline())}"

    async def gate(self, link: HttpLink, size: int) -> None:
        await link.exchange(GATE_PATH, {}, str(size).encode(), 10.0)

    async def open(self, link: HttpLink) -> None:
        await link.exchange(GATE_PATH, {}, b"", 10.0, method="PUT")

    async def gathered(self, link: HttpLink, count: int) -> None:
        """Return when `count` answers wait at the gate."""
        while int((await link.exchange(STATE_PATH, {}, b"", 10.0, method="GET")).body.split()[0]) < count:
            await asyncio.sleep(0.05)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(10)


async def stretch(folder: Path, cloud: Cloud, side: int, *, bounded: bool, size: Size, seed: int) -> Stretch:
    """Idle, calm, burst, on a device of its own."""
    device = Device(folder, cloud.url, side, bounded=bounded, queue_workers=size.queue_workers)
    link = HttpLink("control", cloud.url)
    try:
        await device.start()
        idle, calm, burst = Tally(), Tally(), Tally()
        await _for(device, idle, size.idle_s, seed)
        await cloud.gate(link, BEFORE)
        lost = await _calm(device, calm, size.calm_s, seed)
        await cloud.gate(link, size.answers + 1)
        asked = [asyncio.create_task(device.bulk_answer()) for _ in range(size.answers)]
        await cloud.gathered(link, size.answers)
        stop = asyncio.Event()
        arrivals = asyncio.create_task(arrive(device, burst, stop, seed))
        began_s = time.monotonic()
        await cloud.open(link)
        answers = await asyncio.gather(*asked, return_exceptions=True)
        ended_s = time.monotonic()
        stop.set()
        await arrivals
    finally:
        await link.close()
        await device.close()
    lost += sum(isinstance(answer, BaseException) for answer in answers)
    tallies = (idle, calm, burst)
    return Stretch(
        idle_s=tuple(idle.latencies_s),
        calm_s=tuple(calm.latencies_s),
        burst_s=tuple(burst.latencies_s),
        peak_queue=device.bulk.metrics().peak_waiting,
        all_per_s=(size.answers + burst.asked) / (max(ended_s, *burst.done_s) - began_s),
        in_burst_per_s=(size.answers + sum(moment <= ended_s for moment in burst.done_s)) / (ended_s - began_s),
        seconds=ended_s - began_s,
        lost=lost + sum(tally.asked - len(tally.latencies_s) for tally in tallies),
    )


async def _for(device: Device, tally: Tally, seconds: float, seed: int) -> None:
    stop = asyncio.Event()
    arrivals = asyncio.create_task(arrive(device, tally, stop, seed))
    await asyncio.sleep(seconds)
    stop.set()
    await arrivals


async def _calm(device: Device, tally: Tally, seconds: float, seed: int) -> int:
    """A batch of BEFORE answers once per BATCH_EVERY_S; returns how many were lost."""
    stop = asyncio.Event()
    arrivals = asyncio.create_task(arrive(device, tally, stop, seed))
    batches: list[asyncio.Task[None]] = []
    for _ in range(round(seconds / BATCH_EVERY_S)):
        batches += [asyncio.create_task(device.bulk_answer()) for _ in range(BEFORE)]
        await asyncio.sleep(BATCH_EVERY_S)
    stop.set()
    await arrivals
    return sum(isinstance(answer, BaseException) for answer in await asyncio.gather(*batches, return_exceptions=True))


def compare(size: Size, side: int) -> tuple[dict[str, object], list[str]]:
    """Both ways in turns; medians over the repeats."""
    found: dict[bool, list[Stretch]] = {True: [], False: []}
    with tempfile.TemporaryDirectory(prefix="midstream-burst-") as name:
        write_models(Path(name), side)
        cloud = Cloud(Path(name))
        try:
            for turn in range(size.repeats):
                for bounded in (True, False) if turn % 2 == 0 else (False, True):
                    seen = asyncio.run(stretch(Path(name), cloud, side, bounded=bounded, size=size, seed=turn))
                    found[bounded].append(seen)
                    _show(turn, bounded, seen)
        finally:
            cloud.close()
    keys, notes = _keys(found[True], found[False])
    return {**keys, "answers": size.answers, "repeats": size.repeats}, notes


def _keys(bound: list[Stretch], free: list[Stretch]) -> tuple[dict[str, object], list[str]]:
    """Percentiles are of all repeats together: one stretch has too few interactive requests for a P99 of its own."""
    idle, calm, burst = (_pooled(bound, phase) for phase in ("idle_s", "calm_s", "burst_s"))
    calm_free, burst_free = (_pooled(free, phase) for phase in ("calm_s", "burst_s"))
    pairs = list(zip(bound, free, strict=True))
    rates = [b.all_per_s / u.all_per_s for b, u in pairs]
    rates_in_burst = [b.in_burst_per_s / u.in_burst_per_s for b, u in pairs]
    keys: dict[str, object] = {
        "p99_interactive_ratio_to_calm": percentile(burst, 0.99) / percentile(calm, 0.99),
        "p99_interactive_ratio_to_idle": percentile(burst, 0.99) / percentile(idle, 0.99),
        "p99_interactive_ratio_to_calm_unbounded": percentile(burst_free, 0.99) / percentile(calm_free, 0.99),
        "p50_interactive_ratio_to_calm": statistics.median(burst) / statistics.median(calm),
        "peak_queue": max(s.peak_queue for s in bound),
        "peak_queue_unbounded": max(s.peak_queue for s in free),
        "throughput_ratio_to_unbounded": statistics.median(rates),
        "throughput_ratio_in_the_burst": statistics.median(rates_in_burst),
        "throughput_per_s": statistics.median(s.all_per_s for s in bound),
        "throughput_per_s_unbounded": statistics.median(s.all_per_s for s in free),
        "lost": sum(s.lost for s in (*bound, *free)),
        "p99_idle_ms": 1000 * percentile(idle, 0.99),
        "p99_calm_ms": 1000 * percentile(calm, 0.99),
        "p99_burst_ms": 1000 * percentile(burst, 0.99),
        "burst_seconds": statistics.median(s.seconds for s in bound),
        "interactive_requests": len(burst),
    }
    notes = [
        f"P99 in the burst over calm, each repeat for itself: {spread([s.p99_ratio() for s in bound])}",
        f"throughput ratio per repeat: {spread(rates)}; in the burst: {spread(rates_in_burst)}",
        f"load average of the machine: {os.getloadavg()[0]:.1f} (the benchmark alone makes about 2)",
    ]
    return keys, notes


def _pooled(stretches: list[Stretch], phase: str) -> list[float]:
    return [seconds for stretch in stretches for seconds in getattr(stretch, phase)]


def _show(turn: int, bounded: bool, s: Stretch) -> None:
    title = "bounded" if bounded else "unbounded"
    p99 = [1000 * percentile(phase, 0.99) for phase in (s.idle_s, s.calm_s, s.burst_s)]
    p50 = [1000 * statistics.median(phase) for phase in (s.idle_s, s.calm_s, s.burst_s)]
    print(
        f"  {turn + 1} {title:10} p50/p99 ms idle {p50[0]:.0f}/{p99[0]:.0f} calm {p50[1]:.0f}/{p99[1]:.0f} "
        f"burst {p50[2]:.0f}/{p99[2]:.0f}  peak queue {s.peak_queue:4}  "
        f"{s.all_per_s:6.1f} per s ({s.in_burst_per_s:.1f} in the burst of {s.seconds:.1f} s)  lost {s.lost}",
        flush=True,
    )


def main() -> None:
    """Command line."""
    parser = arguments("A burst of batched answers against interactive work, with and without the bound.")
    parser.add_argument(
        "--repeats", type=int, help=f"pairs of stretches (default {FULL.repeats}, {QUICK.repeats} with --quick)"
    )
    parser.add_argument("--side", type=int, default=160, help="pixels of the model's square input")
    parser.add_argument("--queue-workers", type=int, default=1, help="workers of the queue without the bound")
    options = parser.parse_args()
    size = evolve(QUICK if options.quick else FULL, queue_workers=options.queue_workers)
    hand_over_soon()  # as an agent does
    keys, notes = compare(evolve(size, repeats=options.repeats or size.repeats), options.side)
    few = f"a sample: bursts of {QUICK.answers} answers and few requests; the figures are those of the full run"
    publish("split_burst", keys, options.json, [few, *notes] if options.quick else notes)


if __name__ == "__main__":
    main()

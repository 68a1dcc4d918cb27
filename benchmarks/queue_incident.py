"""A burst of answers against interactive work: what the bounded executor is worth.

A thousand answers arrive at once over a real WebSocket; each needs a run of a real ONNX model of about 15 ms. Meanwhile
interactive requests arrive 20 times a second and need the same model. The executor with its computed bound is compared
with the same executor without one, in turns. With the bound the link's reader runs work itself and so stops reading;
interactive work that finds no room comes back after the time it was told, and its clock runs on.

    python -m benchmarks.queue_incident --json queue.json
"""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from attrs import define, field, frozen

from benchmarks.report import arguments, percentile, publish, spread
from engines.executor import BoundedExecutor
from engines.onnx import OnnxRuntime
from engines.port import TensorModel
from engines.store import default_store
from links.http import HttpLink
from links.http_server import RunningServer, serve
from links.lane import ReaderLane
from links.port import FrameRoute, FrameStream, Request
from protocol.errors import Full
from protocol.tensors import Tensor

MODEL = "ppocr-v4-det"
TARGET_RUN_S = 0.015
# The model takes multiples of 32.
SIZES = tuple((32 * (n // 2), 32 * ((n + 1) // 2)) for n in range(6, 40))
WORKERS = 4
WAIT_TARGET_S = 0.055
ANSWERS = 1000
REPEATS = 5
ANSWER_BYTES = 16 << 10
INTERACTIVE_PER_S = 20.0
WARM_UP_S = 1.0
PATH = "/answers"


@frozen
class Outcome:
    """One run of the incident in one mode."""

    p99_ms: float
    p50_ms: float
    peak_queue: int
    done_per_s: float
    lost: int
    capacity: int
    ran_by_reader: int
    refused: int


@define
class _Tally:
    """What was done; touched by workers and the reader's thread."""

    expected: int
    began_s: float = 0.0
    ended_s: float = 0.0
    answers: dict[int, str] = field(factory=dict)
    lock: threading.Lock = field(factory=threading.Lock)
    all_done: threading.Event = field(factory=threading.Event)

    def answered(self, index: int) -> None:
        with self.lock:
            self.answers[index] = threading.current_thread().name
            if len(self.answers) == self.expected:
                self.ended_s = time.monotonic()
                self.all_done.set()


@define
class _Interactive:
    """Requests of a user: latencies from arrival to done, of those that arrived during the incident."""

    latencies_s: list[float] = field(factory=list)
    done_s: list[float] = field(factory=list)
    asked: int = 0
    refused: int = 0


def model_path() -> Path:
    """The model's file, pulled if it is not here yet."""
    return default_store().pull(MODEL)


def choose_input(model: TensorModel) -> tuple[Tensor, float]:
    """The input whose run is nearest to the target on this machine, and its seconds."""
    name = model.inputs[0].name
    found: list[tuple[float, float, Tensor]] = []
    for height, width in SIZES:
        tensor = Tensor(name, "FP32", (1, 3, height, width), bytes(4 * 3 * height * width))
        seconds = measure(lambda t=tensor: model.run((t,)))  # type: ignore[misc]
        found.append((abs(seconds - TARGET_RUN_S), seconds, tensor))
        if seconds > 2 * TARGET_RUN_S:
            break
    _, seconds, tensor = min(found, key=lambda item: item[0])
    return tensor, seconds


def measure(work: Callable[[], object], runs: int = 12) -> float:
    """Seconds of one run that nothing disturbs: the least of some, after two to warm up."""
    seconds: list[float] = []
    for _ in range(runs + 2):
        began_s = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began_s)
    return min(seconds[2:])


async def incident(
    model: TensorModel, tensor: Tensor, *, bounded: bool, answers: int = ANSWERS, warm_up_s: float = WARM_UP_S
) -> Outcome:
    """One burst; returns when the last answer and the last interactive request are done."""
    executor = BoundedExecutor("incident", WORKERS, WAIT_TARGET_S, bounded=bounded)
    tally = _Tally(expected=answers)
    user = _Interactive()
    burst = asyncio.Event()
    server = await _serve_answers(burst, answers)
    lane = _lane(server.port, executor, model, tensor, tally)
    await asyncio.to_thread(lane.start)
    stop = asyncio.Event()
    arrivals = asyncio.create_task(_arrive(executor, lambda: model.run((tensor,)), user, stop, tally))
    try:
        await asyncio.sleep(warm_up_s)
        capacity = executor.capacity
        tally.began_s = time.monotonic()
        burst.set()
        while not tally.all_done.is_set():
            await asyncio.sleep(0.02)
        stop.set()
        await arrivals
    finally:
        arrivals.cancel()
        await asyncio.to_thread(lane.close)
        await asyncio.to_thread(executor.close)
        await server.close()
    seconds = tally.ended_s - tally.began_s
    readers = sum(1 for thread in tally.answers.values() if thread == "link-reader")
    return Outcome(
        p99_ms=1000 * percentile(user.latencies_s, 0.99),
        p50_ms=1000 * percentile(user.latencies_s, 0.5),
        peak_queue=executor.metrics().peak_waiting,
        # What was done until the last answer was: without the bound, interactive work still waits then.
        done_per_s=(answers + sum(moment <= tally.ended_s for moment in user.done_s)) / seconds,
        lost=answers - len(tally.answers) + user.asked - len(user.latencies_s),
        capacity=capacity,
        ran_by_reader=readers,
        refused=user.refused,
    )


async def _serve_answers(burst: asyncio.Event, answers: int) -> RunningServer:
    """A WebSocket server that sends all answers as fast as the link takes them, once told to."""

    async def answer(request: Request, stream: FrameStream) -> None:
        await burst.wait()
        filler = bytes(ANSWER_BYTES - 4)
        for index in range(answers):
            await stream.send(struct.pack("<I", index) + filler)
        await stream.receive()

    return await serve([], [FrameRoute(PATH, answer)], host="127.0.0.1", port=0)


def _lane(port: int, executor: BoundedExecutor, model: TensorModel, tensor: Tensor, tally: _Tally) -> ReaderLane:
    """The link's reader in its own thread: every answer becomes work, the reader's own if the queue is full."""
    links: list[HttpLink] = []

    async def connect() -> FrameStream:
        links.append(HttpLink("incident", f"http://127.0.0.1:{port}"))
        return await links[0].open(PATH)

    async def disconnect() -> None:
        for link in links:
            await link.close()

    def take(frame: bytes) -> None:
        (index,) = struct.unpack_from("<I", frame)
        executor.submit(_work, model, tensor, index, tally, on_done=lambda _, error: _check(error), lane=True)

    return ReaderLane(connect, take, after=disconnect, name="link-reader")


def _work(model: TensorModel, tensor: Tensor, index: int, tally: _Tally) -> None:
    model.run((tensor,))
    tally.answered(index)


def _check(error: BaseException | None) -> None:
    if error is not None:
        raise error


async def _arrive(
    executor: BoundedExecutor, run: Callable[[], Any], user: _Interactive, stop: asyncio.Event, tally: _Tally
) -> None:
    """Interactive requests at random moments, the same in every run; counted from the burst on."""
    rng = random.Random(20)
    pending: set[asyncio.Task[None]] = set()
    while not stop.is_set():
        task = asyncio.create_task(_ask(executor, run, user, counted=tally.began_s > 0))
        pending.add(task)
        task.add_done_callback(pending.discard)
        await asyncio.sleep(rng.expovariate(INTERACTIVE_PER_S))
    await asyncio.gather(*pending)


async def _ask(executor: BoundedExecutor, run: Callable[[], Any], user: _Interactive, *, counted: bool) -> None:
    arrived_s = time.monotonic()
    user.asked += counted
    while True:
        try:
            await executor.run(run)
            break
        except Full as full:
            user.refused += counted
            await asyncio.sleep(full.retry_after_s)
    if counted:
        user.done_s.append(time.monotonic())
        user.latencies_s.append(user.done_s[-1] - arrived_s)


def compare(repeats: int) -> tuple[dict[str, object], list[str]]:
    """Both modes in turns; medians over the repeats, and what a reader should know."""
    model = OnnxRuntime().load(model_path(), threads=1)
    tensor, run_s = choose_input(model)
    print(f"{MODEL} {list(tensor.shape)}: {1000 * run_s:.1f} ms a run, {WORKERS} workers, {os.cpu_count()} CPUs")
    found: dict[bool, list[Outcome]] = {True: [], False: []}
    for turn in range(repeats):
        for bounded in (True, False) if turn % 2 == 0 else (False, True):
            outcome = asyncio.run(incident(model, tensor, bounded=bounded))
            found[bounded].append(outcome)
            _show(turn, bounded, outcome)
    model.close()
    with_bound, without = found[True], found[False]
    for title, outcomes in (("bounded", with_bound), ("unbounded", without)):
        p99_ms, rates = [o.p99_ms for o in outcomes], [o.done_per_s for o in outcomes]
        print(f"{title:10} p99 ms {spread(p99_ms)}, per s {spread(rates)}")
    ratios = [b.done_per_s / u.done_per_s for b, u in zip(with_bound, without, strict=True)]
    keys: dict[str, object] = {
        "p99_unbounded_ms": statistics.median(o.p99_ms for o in without),
        "p99_bounded_ms": statistics.median(o.p99_ms for o in with_bound),
        "peak_queue_unbounded": max(o.peak_queue for o in without),
        "peak_queue_bounded": max(o.peak_queue for o in with_bound),
        "throughput_ratio": statistics.median(ratios),
        "lost": sum(o.lost for o in with_bound + without),
        "capacity_at_burst": statistics.median(o.capacity for o in with_bound),
        "model_run_ms": 1000 * run_s,
        "ran_by_reader": statistics.median(o.ran_by_reader for o in with_bound),
        "repeats": repeats,
    }
    notes = [
        f"throughput ratio per repeat: {spread(ratios)}",
        f"load average of the machine: {os.getloadavg()[0]:.1f} (the benchmark alone makes about {WORKERS + 1})",
        f"interactive requests told to come back: {sum(o.refused for o in with_bound)} (their time runs on)",
    ]
    return keys, notes


def _show(turn: int, bounded: bool, o: Outcome) -> None:
    title = "bounded" if bounded else "unbounded"
    print(
        f"  {turn + 1} {title:10} p50 {o.p50_ms:8.1f} ms  p99 {o.p99_ms:8.1f} ms  peak queue {o.peak_queue:4}  "
        f"{o.done_per_s:6.1f} per s  room {o.capacity}  by the reader {o.ran_by_reader}  lost {o.lost}",
        flush=True,
    )


def main() -> None:
    """Command line."""
    parser = arguments("A burst of answers against interactive work, with and without the bound.")
    parser.add_argument("--repeats", type=int, help=f"pairs of runs (default {REPEATS}, 1 with --quick)")
    options = parser.parse_args()
    keys, notes = compare(options.repeats or (1 if options.quick else REPEATS))
    few = "a sample: one pair of runs; the figures are those of the full run"
    publish("queue_incident", keys, options.json, [few, *notes] if options.quick else notes)


if __name__ == "__main__":
    main()

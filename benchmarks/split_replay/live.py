"""One run in real time through the in-tree shaper, and the replay of the same trace: both must agree.

Server and device are real, on loopback, with a shaper between them that follows the trace. Each request of a replay
costs what the very request of the live run took here and at the far end (see `lived`); the link, the queue and, of
ours, the decisions are the replay's own. What is planned with is learnt before, as in life: from a few runs of each arm
over the unshaped link, at about the pace of the stretch.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from statistics import mean
from typing import TypeVar

from attrs import frozen

from benchmarks.report import percentile, spread
from benchmarks.split_replay.cases import DET, encoded_input
from benchmarks.split_replay.lived import Lived, around, as_lived, cost_of
from benchmarks.tensor_pair import Device, device, tails
from engines.catalogue import shipped_catalogue
from engines.store import ModelStore, default_store
from links.shaped import ShaperProxy
from protocol.device import Measured
from protocol.policy import SplitPolicy
from split_models.arm_cost import DEVICE_ARM, Arm, ArmCost
from split_models.arms import Spent, Work
from split_models.costs import CostTable
from split_models.replay import LINK, Load, replay, replay_fixed
from split_models.replay_link import LinkTrace
from split_models.runner_ports import Answer

SLOWDOWN = 2.0
"""As the fast device. A slower one would be busy all of the time: then the queue, and no arm, makes the figures."""

EVERY_S = 0.5
DELAY_S = 0.02
CALIBRATION_RUNS, QUICK_CALIBRATION_RUNS = 8, 1
CALIBRATION_PAUSE_S = 0.15
TURNS = 3
"""Stretches in real time per arm, in turns with those of the other arms, and of ours; one in a quick run."""
LOADED_S = 60.0
DEADLINE_S = 60.0
MBIT = 125_000.0
FULL_RATES = (
    20.0,
    9.0,
    6.0,
    14.0,
    3.0,
    1.2,
    4.0,
    12.0,
    18.0,
    7.0,
    2.5,
    5.0,
    16.0,
    20.0,
    8.0,
    1.5,
    3.5,
    10.0,
    15.0,
    6.0,
)
QUICK_RATES = (160.0, 80.0, 48.0)
STEP_S = 1.0

_ENDS = (DEVICE_ARM, Arm("cloud", link=LINK))

T = TypeVar("T")
Ask = Callable[[], Awaitable[T]]


@frozen
class Pair:
    """One arm: latencies in seconds of each turn, live and replayed; figures are of all turns together."""

    arm: str
    live_s: Sequence[Sequence[float]]
    replayed_s: Sequence[Sequence[float]]

    @property
    def live(self) -> tuple[float, float]:
        """Mean and P99 in seconds."""
        return _figures(_flat(self.live_s))

    @property
    def replayed(self) -> tuple[float, float]:
        """Mean and P99 in seconds."""
        return _figures(_flat(self.replayed_s))

    @property
    def worst(self) -> float:
        """The larger of both relative differences."""
        return max(abs(a / b - 1.0) for a, b in zip(self.live, self.replayed, strict=True))

    def p99s_ms(self) -> str:
        """How far the turns are from each other."""
        return spread([1e3 * percentile(turn, 0.99) for turn in self.live_s])


async def agreement(folder: Path, policy: SplitPolicy, quick: bool) -> tuple[float, list[str]]:
    """The largest relative difference over all arms, and a row per arm."""
    trace = _trace(QUICK_RATES if quick else FULL_RATES)
    load = Load.over(trace, EVERY_S, trace.seconds)
    count = QUICK_CALIBRATION_RUNS if quick else CALIBRATION_RUNS
    async with contextlib.AsyncExitStack() as stack:
        store = _store(Path(stack.enter_context(tempfile.TemporaryDirectory())))
        port = await stack.enter_async_context(tails(folder))
        async with _ready(store, port, policy) as (near, cut):
            stretches: list[_Stretch] = []
            for _ in range(1 if quick else TURNS):
                stretches += [await _stretch(near, arm, trace, load) for arm in (*_ENDS, cut)]
            pairs = [_fixed(arm, stretches, trace, load) for arm in (*_ENDS, cut)]
            ours = [await _ours(near, (*_ENDS, cut), trace, load, policy, count)] if quick else []
        for _ in range(0 if quick else TURNS):
            async with _ready(store, port, policy) as (near, cut):
                ours.append(await _ours(near, (*_ENDS, cut), trace, load, policy, count))
    live, replayed = zip(*ours, strict=True)
    return _reported([*pairs, Pair("ours", live, replayed)])


def _reported(pairs: Sequence[Pair]) -> tuple[float, list[str]]:
    rows = [
        f"live {pair.arm:20} mean {1e3 * pair.live[0]:6.0f} ms, replayed {1e3 * pair.replayed[0]:6.0f}; "
        f"p99 {1e3 * pair.live[1]:6.0f} ms, replayed {1e3 * pair.replayed[1]:6.0f}; differs by {pair.worst:.0%}; "
        f"p99 of each turn alone, live: {pair.p99s_ms()}"
        for pair in pairs
    ]
    return max(pair.worst for pair in pairs), rows


def _trace(mbits: Sequence[float]) -> LinkTrace:
    rates = tuple(MBIT * rate for rate in mbits)
    return LinkTrace("live", STEP_S, rates, rates, (DELAY_S,) * len(rates))


def _store(root: Path) -> ModelStore:
    """A new store with the one model: no bundle of an earlier run, and nothing else to load."""
    entry = shipped_catalogue()[DET]
    target = root / DET / entry.filename
    target.parent.mkdir(parents=True)
    shutil.copyfile(default_store().path(DET), target)
    return ModelStore(root, {DET: entry})


@contextlib.asynccontextmanager
async def _ready(store: ModelStore, port: int, policy: SplitPolicy) -> AsyncIterator[tuple[Device, Arm]]:
    """A new device whose heads are loaded, and the cut without compression that sends least."""
    async with device(store, port, policy, slowdown=SLOWDOWN) as near:
        await near.until_cut(DET)
        plan = near.way.runners[DET].plan
        for entry in plan.manifest.cuts:
            await near.local.preload(plan.head(entry))
            near.way.want_rest(plan, Arm("cut", entry.id, entry.codec, LINK))
            await _loaded(near, plan.tail(entry))
        allowed = [entry for entry in plan.manifest.cuts if entry.error_ratio <= policy.max_error_ratio]
        least = min(allowed, key=lambda entry: entry.wire_bytes)
        yield near, Arm("cut", least.id, least.codec, LINK)


async def _loaded(near: Device, name: str) -> None:
    async with asyncio.timeout(LOADED_S):
        while not near.local.loaded(name):
            await asyncio.sleep(0.01)


@frozen
class _Part:
    """What one run of an arm took: its cost, and by part of the cost table."""

    cost: ArmCost
    spent: Spent


async def _run(near: Device, arm: Arm) -> _Part:
    runner = near.way.runners[DET]
    work = Work(encoded=encoded_input(runner.plan.manifest), tensors=())
    began_s = time.perf_counter()
    spent = (await runner.arms.run(arm, runner.plan, work, DEADLINE_S)).spent
    taken_s = time.perf_counter() - began_s
    away_s = spent.connect_s + spent.send_s + spent.server_s + spent.server_queue_s + spent.receive_s
    return _Part(cost_of(arm, spent, taken_s - away_s), spent)


async def _runs(near: Device, arm: Arm, count: int) -> list[_Part]:
    """A few runs, after one that warms up."""
    await _run(near, arm)
    found = []
    for _ in range(count):
        await asyncio.sleep(CALIBRATION_PAUSE_S)
        found.append(await _run(near, arm))
    return found


def _middle(runs: Sequence[_Part]) -> _Part:
    """The run that took neither long nor short."""
    return sorted(runs, key=lambda run: run.cost.device_s + run.cost.server_s)[len(runs) // 2]


@frozen
class _Stretch:
    """One arm in real time while the link was shaped: latencies, and what each request took."""

    arm: Arm
    latencies_s: tuple[float, ...]
    costs: tuple[ArmCost, ...]


async def _stretch(near: Device, arm: Arm, trace: LinkTrace, load: Load) -> _Stretch:
    await _run(near, arm)  # the caches are warm, as in the middle of a stretch
    latencies_s, runs = await _shaped(near.shaper, trace, load, lambda: _run(near, arm))
    return _Stretch(arm, latencies_s, tuple(run.cost for run in runs))


def _teach(table: CostTable, digest: str, parts: Sequence[_Part]) -> None:
    """What the parts took, as a device's benchmark would tell it."""
    device, cloud, cut = (part.spent for part in parts)
    arm = parts[2].cost.arm
    seconds = {"whole": device.compute_s, "before": device.before_s, "after": device.after_s}
    seconds[f"head:{arm.cut}:{arm.codec}"] = cut.compute_s
    table.learn([Measured(digest, "onnx", 1, what, took_s, 0.0) for what, took_s in seconds.items()])
    for _ in range(3):
        table.observe("server", "cloud", cloud.server_s)
        table.observe("server", f"tail:{arm.cut}:{arm.codec}", cut.server_s)


def _fixed(arm: Arm, stretches: Sequence[_Stretch], trace: LinkTrace, load: Load) -> Pair:
    """All stretches of one arm, each beside its replay."""
    mine = [stretch for stretch in stretches if stretch.arm == arm]
    replayed = []
    for stretch in mine:
        took = as_lived(around((), stretch.costs, 0), stretch.costs[:1])
        replayed.append(replay_fixed(trace, stretch.costs[0], load, took).latencies_s)
    return Pair(str(arm), [one.latencies_s for one in mine], replayed)


async def _ours(
    near: Device, arms: Sequence[Arm], trace: LinkTrace, load: Load, policy: SplitPolicy, count: int
) -> tuple[Sequence[float], Sequence[float]]:
    """Latencies of ours, live and replayed."""
    runner = near.way.runners[DET]
    manifest = runner.plan.manifest
    encoded = encoded_input(manifest) or b""
    before = [await _runs(near, arm, count) for arm in arms]
    _teach(runner.table, manifest.digest, [_middle(runs) for runs in before])
    packs = any(cost.arm.compressed for cost in runner.report().costs)
    near.probe.reset(LINK)  # the runs before went over another link, so to speak: a replay knows nothing of any

    async def ask() -> Answer:
        return await runner.infer(Work(encoded=encoded, tensors=()), "live", DEADLINE_S)

    live, answers = await _shaped(near.shaper, trace, load, ask)
    after = [await _runs(near, arm, count) for arm in arms]
    parts = [_middle([*runs, *later]) for runs, later in zip(before, after, strict=True)]
    table = CostTable(manifest, speed_ratio=SLOWDOWN)
    _teach(table, manifest.digest, parts)
    costs = table.arms(
        len(encoded), (LINK,), lambda cut, codec: True, zstd=lambda link: packs, ends_here=lambda cut, codec: True
    )
    own = [Lived(number, cost_of(answer.arm, answer.spent)) for number, answer in enumerate(answers)]
    for runs, later in zip(before, after, strict=True):
        own += around([run.cost for run in runs], [run.cost for run in later], load.count)
    # The device's runs are stopped within an operator; decoding is not, and goes on.
    stop_s = parts[0].spent.before_s
    return live, replay(trace, costs, policy, load, stop_s=stop_s, took=as_lived(own, costs)).latencies_s


async def _shaped(
    shaper: ShaperProxy, trace: LinkTrace, load: Load, ask: Ask[T]
) -> tuple[tuple[float, ...], tuple[T, ...]]:
    """Requests at their rate while the shaper follows the trace: latencies, and what was answered."""
    began_s = time.monotonic()
    shaper.set_delay(DELAY_S)
    follow = asyncio.create_task(_follow(shaper, trace, began_s))
    latencies, answers = [], []
    try:
        for number in range(load.count):
            due_s = began_s + number * load.every_s
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            answers.append(await ask())
            latencies.append(time.monotonic() - due_s)
    finally:
        follow.cancel()
        await asyncio.gather(follow, return_exceptions=True)
        shaper.set_rate(float("inf"))
        shaper.set_delay(0.0)
    return tuple(latencies), tuple(answers)


async def _follow(shaper: ShaperProxy, trace: LinkTrace, began_s: float) -> None:
    step = 0
    while True:
        place = step % len(trace.up_bytes_per_s)
        shaper.set_rate(trace.up_bytes_per_s[place], trace.down_bytes_per_s[place])
        step += 1
        await asyncio.sleep(max(0.0, began_s + step * trace.step_s - time.monotonic()))


def _flat(parts: Iterable[Sequence[float]]) -> list[float]:
    return [seconds for part in parts for seconds in part]


def _figures(latencies: Sequence[float]) -> tuple[float, float]:
    return mean(latencies), percentile(latencies, 0.99)

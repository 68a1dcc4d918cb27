"""What a switch of the arm costs the request that meets it: nothing is loaded, lost or answered twice.

A device asks for text boxes without a pause, by its own HTTP front; a shaper between it and a server of tails (another
process) makes the link fast and slow in turns, so that the held arm changes both ways. Pictures may not leave, so the
arms are the device and the cuts; the objective counts joules, which makes a cut worth its while on a good link without
a slowed device. The first request after each switch is compared with the next ones on the same arm at the same rate:
each is taken less the median of those next ones. `added_ms_median` is the median of the firsts. Any request, first or
not, is late at times: `added_ms_p99` is the P99 of the firsts (`first_ms_p99`) less that of the next ones
(`steady_ms_p99`). `inline_load_ms_median` is what loading head and tail in the request would have cost.

    python -m benchmarks.split_switch --json switch.json
"""

from __future__ import annotations

import asyncio
import shutil
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from math import prod
from pathlib import Path

from attrs import define, field, frozen

from benchmarks.report import arguments, percentile, publish, spread
from benchmarks.tensor_pair import POOL_BYTES, Device, device, tails
from engines.catalogue import shipped_catalogue
from engines.executor import BoundedExecutor
from engines.local import LocalEndpoint
from engines.onnx import OnnxRuntime
from engines.pool import ModelPool
from engines.port import TensorModel
from engines.store import ModelStore, default_store
from links.http import HttpLink
from protocol.errors import MidstreamError
from protocol.events import ArmSwitched, TensorDone
from protocol.models import BundleManifest, CutEntry
from protocol.oip import InferRequest, bytes_tensor, decode_response, encode_request
from protocol.policy import SplitPolicy
from protocol.tensors import Tensor
from split_models.bundle import BundleLimits, build_bundle
from split_models.measure import Timed, time_calls, time_model

MODEL, PICTURE = "ppocr-v4-det", "sample-page"
SWITCHES, QUICK_SWITCHES = 50, 4
FAST_BYTES_PER_S, SLOW_BYTES_PER_S = 12.5e6, 0.6e6
DELAY_S = 0.005
STEADY = 8
"""Requests after the first that say what this arm takes now."""
PATIENCE = 60
"""Requests within which the arm must have changed after the rate did."""
MISSES = 4
"""Changes of the rate in a row that may pass without one of the arm."""
BUILD_S = 90.0
INLINE_RUNS, QUICK_INLINE_RUNS = 10, 4
WATTS = 5.0
POLICY = SplitPolicy(
    objective={"seconds": 1.0, "joules": 1.0},
    raw_input_leaves=False,
    period_s=0.02,
    explore_one_in=10,
    hedge_ratio=0.0,
)


@frozen
class Asked:
    """One request as its client saw it; `arm` is empty when it failed."""

    id: str
    seconds: float
    arm: str


@define(eq=False)
class Client:
    """Asks one picture after the other and remembers."""

    link: HttpLink
    picture: bytes
    asked: list[Asked] = field(factory=list)

    async def ask(self) -> Asked:
        """One request, answered by whichever arm."""
        request_id, arm = f"s{len(self.asked)}", ""
        began_s = time.perf_counter()
        try:
            headers, body = encode_request(
                InferRequest(MODEL, (bytes_tensor("image", [self.picture]),), id=request_id, binary=True)
            )
            reply = await self.link.exchange(f"/v2/models/{MODEL}/infer", headers, body, 30.0)
            answer = decode_response(reply.headers, reply.body)
            arm = str(answer.parameters["midstream_arm"]) if answer.outputs and answer.id == request_id else ""
        except MidstreamError as err:
            print(f"  {request_id} failed: {err}")
        self.asked.append(Asked(request_id, time.perf_counter() - began_s, arm))
        return self.asked[-1]


@frozen
class Met:
    """One switch: from which arm to which, the first request and the next ones."""

    source: str
    target: str
    first_s: float
    next_s: tuple[float, ...]

    @property
    def steady_s(self) -> float:
        return statistics.median(self.next_s)

    @property
    def added_s(self) -> float:
        return self.first_s - self.steady_s


async def switches(near: Device, client: Client, count: int) -> list[Met]:
    """Ask and shape until the arm has changed `count` times and each change has its steady requests."""
    met: list[Met] = []
    fast, misses = True, 0
    while len(met) < count and misses < MISSES:
        near.shaper.set_rate(FAST_BYTES_PER_S if fast else SLOW_BYTES_PER_S)
        found = await _until_switch(near, client)
        misses = 0 if found is not None else misses + 1
        # A change on the way to another arm has no steady requests: ask on until the arm stays.
        while found is not None:
            first = client.asked[-1]
            steady = [await client.ask() for _ in range(STEADY)]
            same = [asked.seconds for asked in steady if asked.arm == first.arm]
            if len(same) == STEADY and _last_switch(near) == found:
                met.append(Met(found.source, found.target, first.seconds, tuple(same)))
                found = None
            else:
                found = await _until_switch(near, client, patience=STEADY)
        fast = not fast
    if len(met) < min(count, 4):
        raise RuntimeError(f"the arm does not follow the link: {near.way.status()[MODEL]}")
    return met


async def _until_switch(near: Device, client: Client, patience: int = PATIENCE) -> ArmSwitched | None:
    """Ask until a request was the first on its arm; None when the arm stays."""
    for _ in range(patience):
        asked = await client.ask()
        last = _last_switch(near)
        if last is not None and last.request_id == asked.id:
            return last
    return None


def _last_switch(near: Device) -> ArmSwitched | None:
    return next((event for event in reversed(near.events.events) if isinstance(event, ArmSwitched)), None)


async def inline_load_ms(folder: Path, manifest: BundleManifest, cuts: Sequence[CutEntry], runs: int) -> list[float]:
    """What the first request on a cut pays if its head and its tail are loaded in it: load and first run over a run."""
    name, shape = next(iter(manifest.input_shapes.items()))
    inputs = [Tensor(name, "FP32", tuple(shape), bytes(4 * prod(shape)))]
    found: list[float] = []
    for turn in range(runs):
        cut = cuts[turn % len(cuts)]
        head_s, crossing = await _cold_s(folder / cut.head_file, inputs)
        tail_s, _ = await _cold_s(folder / cut.tail_file, crossing)
        found.append(1e3 * (head_s + tail_s))
    return found


async def _cold_s(file: Path, inputs: Sequence[Tensor]) -> tuple[float, Sequence[Tensor]]:
    """Seconds of a first request over a warm one, and the outputs."""
    executor, pool = BoundedExecutor("inline", 1, 5.0), ModelPool(POOL_BYTES)
    local = LocalEndpoint(None, pool, executor, {"onnx": OnnxRuntime()})
    local.register("part", file, "part", "onnx")
    seconds: list[float] = []
    try:
        for _ in range(4):
            began_s = time.perf_counter()
            answer = await local.infer("part", inputs, 30.0)
            seconds.append(time.perf_counter() - began_s)
    finally:
        await local.close()
        executor.close()
        pool.close()
    return seconds[0] - statistics.median(seconds[1:]), answer.outputs


def doubled(near: Device, client: Client) -> int:
    """Requests that were reported more than once, or not at all."""
    done = Counter(event.request_id for event in near.events.events if isinstance(event, TensorDone))
    return sum(count - 1 for count in done.values()) + sum(asked.id not in done for asked in client.asked)


async def run(quick: bool, bundles: Path | None = None) -> tuple[dict[str, object], list[str]]:
    """The whole benchmark. bundles: where a bundle is kept for the next run."""
    pulled, entry = default_store(), shipped_catalogue()[MODEL]
    picture, file = pulled.pull(PICTURE).read_bytes(), pulled.pull(MODEL)
    with tempfile.TemporaryDirectory() as folder:
        root, models = bundles or Path(folder) / "bundles", Path(folder) / "models"
        limits = BundleLimits(max_cuts=1 if quick else 2, seconds=BUILD_S, batches=not quick)
        measure = _quick_time if quick else time_model
        await asyncio.to_thread(build_bundle, file, entry, root, limits=limits, measure=measure)
        (models / MODEL).mkdir(parents=True)
        shutil.copyfile(file, models / MODEL / entry.filename)
        store = ModelStore(models, {MODEL: entry})
        async with tails(root) as port, device(store, port, POLICY, watts=WATTS) as near:
            await near.until_cut(MODEL)
            near.shaper.set_delay(DELAY_S)
            client = Client(HttpLink("user", f"http://127.0.0.1:{near.server.port}"), picture)
            met = await switches(near, client, QUICK_SWITCHES if quick else SWITCHES)
            await client.link.close()
            manifest = near.manifest(MODEL)
            used = [cut for cut in manifest.cuts if any(_means(one.target, cut) for one in met)]
            runs = QUICK_INLINE_RUNS if quick else INLINE_RUNS
            inline = await inline_load_ms(root / MODEL, manifest, used or manifest.cuts, runs)
            return _keys(near, client, met, inline), _notes(met, inline)


def _means(arm: str, cut: CutEntry) -> bool:
    """Whether an arm's name is of this cut."""
    return arm.removesuffix("+zstd") == f"cut:{cut.id}:{cut.codec}"


def _quick_time(model: TensorModel, inputs: Sequence[Tensor]) -> Timed:
    return time_calls(lambda: model.run(inputs), runs=2)


def _keys(near: Device, client: Client, met: Sequence[Met], inline: Sequence[float]) -> dict[str, object]:
    added = [1e3 * one.added_s for one in met]
    usual = [1e3 * (seconds - one.steady_s) for one in met for seconds in one.next_s]
    first_ms_p99, steady_ms_p99 = percentile(added, 0.99), percentile(usual, 0.99)
    return {
        "switches": len(met),
        "requests": len(client.asked),
        "failed": sum(not asked.arm for asked in client.asked),
        "doubled": doubled(near, client),
        "added_ms_median": statistics.median(added),
        "added_ms_p99": first_ms_p99 - steady_ms_p99,
        "first_ms_p99": first_ms_p99,
        "steady_ms_p99": steady_ms_p99,
        "inline_load_ms_median": statistics.median(inline),
    }


def _notes(met: Sequence[Met], inline: Sequence[float]) -> list[str]:
    ways = Counter(f"{one.source} -> {one.target}" for one in met)
    notes = [f"{count} x {way}" for way, count in sorted(ways.items())]
    for target in sorted({one.target for one in met}):
        mine = [one for one in met if one.target == target]
        notes.append(
            f"{target}: added ms {spread([1e3 * one.added_s for one in mine])}, "
            f"steady ms {spread([1e3 * one.steady_s for one in mine])}"
        )
    return [*notes, f"inline load ms {spread(inline)}"]


def main() -> None:
    """Command line."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--bundles", type=Path, help="keep the bundle in this folder and take it from there")
    options = parser.parse_args()
    keys, notes = asyncio.run(run(options.quick, options.bundles))
    publish("split_switch", keys, options.json, notes)


if __name__ == "__main__":
    main()

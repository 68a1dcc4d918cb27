"""The device's half of `benchmarks.split_burst`: interactive requests, and the answers of a burst with their work.

Interactive requests are whole ones: a picture is decoded and scaled, then the model runs here, or its head here and its
tail in the cloud, in turns; then boxes are found. Bulk answers come over a stream of their own and need the same work.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from attrs import define, field

from agent.compose_tensor import POST_WAIT_S, POST_WAITING
from benchmarks.burst_server import GATED, TAIL
from engines.executor import BoundedExecutor
from engines.laned import NICENESS, LanedEndpoint
from engines.local import LocalEndpoint
from engines.onnx import OnnxRuntime
from engines.pool import ModelPool
from engines.port import TensorAnswer
from engines.remote_frames import FramesEndpoint
from links.http import HttpLink
from protocol.errors import Full
from protocol.tensors import Tensor
from split_models.recipes import Made, recipe

DEADLINE_S = 300.0
INTERACTIVE_PER_S = 5.0


@define
class Tally:
    """Interactive latencies of one stretch, and when each ended."""

    latencies_s: list[float] = field(factory=list)
    done_s: list[float] = field(factory=list)
    asked: int = 0


class Device:
    """One device with one way of working on bulk answers: bounded (lane and executor) or not.

    queue_workers: threads that work on what waits where nothing is bounded.
    """

    def __init__(self, folder: Path, url: str, side: int, *, bounded: bool, queue_workers: int = 1) -> None:
        self._url = url
        self._bounded = bounded
        self._recipe = recipe("ppocr-det")
        self._shape = (1, 3, side, side)
        self.picture = self._recipe.calibration()[0]
        self.pictures = BoundedExecutor("pictures", 1 if bounded else queue_workers, POST_WAIT_S, bounded=bounded)
        self.bulk = self._behind(self.pictures) if bounded else self.pictures
        self._runs = BoundedExecutor("tensor", 2, 60.0)
        self._pool = ModelPool(2 << 30)
        self._local = LocalEndpoint(None, self._pool, self._runs, {"onnx": OnnxRuntime()}, threads=1)
        for name in ("whole", "head"):
            self._local.register(name, folder / f"{name}.onnx", runtime="onnx")
        self._link = HttpLink("cloud", url)
        self._frames = FramesEndpoint("cloud", self._link.open)
        self._lane = LanedEndpoint("cloud", lambda: HttpLink("cloud-bulk", url), self.bulk)
        self._wide = FramesEndpoint("cloud", self._link.open, credit_bytes=1 << 40)
        self.input_name = ""
        self.made: Made | None = None
        self.sent: tuple[Tensor, ...] = ()
        self.lost = 0
        self.held = 0

    @staticmethod
    def _behind(first: BoundedExecutor) -> BoundedExecutor:
        """As in an agent."""
        return BoundedExecutor("post", 1, POST_WAIT_S, max_waiting=POST_WAITING, niceness=NICENESS, first=first)

    async def start(self) -> None:
        """Load, connect, run everything once."""
        inputs, _, _ = await self._local.describe("whole")
        self.input_name = inputs[0].name
        self.made = self._recipe.before(self.picture, self.input_name, self._shape)
        self.sent = tuple((await self._local.infer("head", self.made.inputs, DEADLINE_S)).outputs)
        await self._lane.start()
        for turn in range(4):
            await self.interactive(turn)

    async def interactive(self, turn: int) -> None:
        """One whole request: on the device, or its tail in the cloud."""
        made = await self._patient(self._recipe.before, self.picture, self.input_name, self._shape)
        answer = await self._local.infer("whole" if turn % 2 else "head", made.inputs, DEADLINE_S)
        if turn % 2 == 0:
            answer = await self._frames.infer(TAIL, answer.outputs, DEADLINE_S)
        await self._patient(self._recipe.after, answer.outputs, made.context)

    async def bulk_answer(self) -> None:
        """One answer of a batch and the work on it."""
        if self._bounded:
            await self._lane.infer_then(GATED, self.sent, DEADLINE_S, self._work)
            return
        answer = await self._wide.infer(GATED, self.sent, DEADLINE_S)
        await self.bulk.run(self._work, answer)

    def _work(self, answer: TensorAnswer) -> int:
        assert self.made is not None
        return len(self._recipe.after(answer.outputs, self.made.context))

    async def _patient(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Interactive work that finds no room comes back when it was told to; its time runs on."""
        while True:
            try:
                return await self.pictures.run(fn, *args)
            except Full as full:
                await asyncio.sleep(full.retry_after_s)

    async def close(self) -> None:
        for part in (self._frames, self._wide, self._lane, self._link, self._local):
            await part.close()
        for executor in {self.pictures, self.bulk, self._runs}:
            executor.close()
        self._pool.close()


async def arrive(device: Device, tally: Tally, stop: asyncio.Event, seed: int) -> None:
    """Interactive requests at random moments, the same in every stretch of one seed."""
    rng = random.Random(seed)
    pending: set[asyncio.Task[None]] = set()

    async def ask(turn: int) -> None:
        tally.asked += 1
        arrived_s = time.monotonic()
        await device.interactive(turn)
        tally.done_s.append(time.monotonic())
        tally.latencies_s.append(tally.done_s[-1] - arrived_s)

    turn = 0
    while not stop.is_set():
        task = asyncio.create_task(ask(turn))
        turn += 1
        pending.add(task)
        task.add_done_callback(pending.discard)
        await asyncio.sleep(rng.expovariate(INTERACTIVE_PER_S))
    await asyncio.gather(*pending)

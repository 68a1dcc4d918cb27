"""The cloud's half of `benchmarks.split_burst`, in a process of its own: the real front for tensor frames over a real
model and real dynamic batches, and a gate that lets answers go in batches of so many.

    python -m benchmarks.burst_server FOLDER        (prints its port)
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from engines.batching import BatchingEndpoint, BatchSettings
from engines.executor import BoundedExecutor
from engines.local import LocalEndpoint
from engines.onnx import OnnxRuntime
from engines.pool import ModelPool
from engines.port import TensorAnswer
from links.http_server import serve
from links.port import Request, Response, Route
from protocol.tensors import Tensor, TensorSpec
from split_models.frames_front import FramesFront, StreamLimits
from split_models.service import Service, Shown

TAIL, GATED, BATCH = "tail", "tail-gated", "tail~batch"
GATE_PATH, STATE_PATH = "/gate", "/state"
MAX_ROWS = 8


class Gate:
    """Answers of one model leave when so many are ready: what a batching that is set too high does."""

    def __init__(self, inner: BatchingEndpoint) -> None:
        self._inner = inner
        self.size = 1
        self._ready: list[asyncio.Future[None]] = []

    @property
    def waiting(self) -> int:
        return len(self._ready)

    async def infer(self, model: str, inputs: Sequence[Tensor], deadline_s: float) -> TensorAnswer:
        answer = await self._inner.infer(TAIL, inputs, deadline_s)
        if model == GATED:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._ready.append(turn)
            if len(self._ready) >= self.size:
                self.open()
            await turn
        return answer

    def open(self) -> None:
        ready, self._ready = self._ready, []
        for turn in ready:
            if not turn.done():
                turn.set_result(None)

    async def describe(self, name: str) -> tuple[Sequence[TensorSpec], Sequence[TensorSpec], str]:
        return await self._inner.describe(TAIL)

    async def preload(self, name: str, *, keep: bool = False, warm: bool = False) -> float | None:
        return await self._inner.preload(TAIL, keep=keep, warm=warm)

    def loaded(self, name: str) -> bool:
        return self._inner.loaded(TAIL)

    def wait_s(self) -> float:
        return self._inner.wait_s()


async def run(folder: Path) -> None:
    """Serve until the standard input ends."""
    # Batches leave as many requests in the queue as the gate wants; here the queue is not what is measured.
    executor = BoundedExecutor("tails", 2, 3600.0, max_waiting=10_000)
    local = LocalEndpoint(None, ModelPool(2 << 30), executor, {"onnx": OnnxRuntime()}, threads=1)
    local.register(TAIL, folder / "tail.onnx", runtime="onnx")
    local.register(BATCH, folder / "batch.onnx", runtime="onnx")
    for name in (TAIL, BATCH):
        await local.preload(name, keep=True)
    batching = BatchingEndpoint(local, lambda: {TAIL: BATCH}, lambda: BatchSettings(MAX_ROWS), time.monotonic)
    gate = Gate(batching)
    shown: Mapping[str, Shown] = {name: Shown(name, "onnx_onnxv1") for name in (TAIL, GATED)}
    front = FramesFront(
        Service(gate, executor, time.monotonic, lambda: shown, side="server"), StreamLimits(2_048, 1 << 30, 1 << 30)
    )

    async def set_gate(request: Request) -> Response:
        gate.size = int(request.body)
        return Response()

    async def open_gate(request: Request) -> Response:
        gate.open()
        return Response()

    async def state(request: Request) -> Response:
        return Response(body=f"{gate.waiting} {sum(n * k for n, k in batching.runs.items())}".encode())

    routes = [
        Route("POST", GATE_PATH, set_gate), Route("PUT", GATE_PATH, open_gate), Route("GET", STATE_PATH, state),
    ]  # fmt: skip
    server = await serve(routes, [front.route], host="127.0.0.1", port=0)
    print(server.port, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.close()
    await local.close()
    executor.close()


if __name__ == "__main__":
    asyncio.run(run(Path(sys.argv[1])))

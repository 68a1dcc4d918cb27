"""TensorEndpoint for models on this device: store -> pool -> bounded executor."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from attrs import define, field, frozen

from engines.digest import file_sha256
from engines.executor import BoundedExecutor, Ticket
from engines.pool import RETRY_AFTER_S, Closable, Lease, ModelPool, estimate_bytes
from engines.port import StoppableModel, TensorAnswer, TensorModel, TensorRuntime
from engines.registry import ENGINES
from engines.stop import Stop
from protocol.clock import Clock
from protocol.errors import BadRequest, EngineError, Full, Loading, MidstreamError, NotFound
from protocol.extras import install_step
from protocol.models import CatalogueEntry
from protocol.pulse import Pulse
from protocol.tensors import DATATYPE_BYTES, Tensor, TensorSpec

MAX_REGISTERED = 4096
"""Heads and tails of all bundles of a house; more is a leak."""

T = TypeVar("T")

RunModel = Callable[[Sequence[Tensor]], Sequence[Tensor]]
"""One run of a loaded model; blocking, for the worker's thread."""

Left = Callable[[float], None]
"""Told how many seconds a run went on whose caller left."""


WARM_RUNS = 3
LOAD_PATIENCE_S = 900.0
"""A model of some gigabytes from a worn SD card takes minutes to load; longer than this counts as hung."""
LONG_WARM_S = 0.1
"""The first run of a model allocates and is slow; of a model whose runs take longer than this two are enough."""


class ModelFiles(Protocol):
    """What a local endpoint needs of the model store."""

    def entry(self, name: str) -> CatalogueEntry: ...

    def path(self, name: str) -> Path: ...


@frozen
class Registered:
    """A file that answers under a name of its own: a head, a tail, or a model outside the catalogue."""

    name: str
    file: Path
    digest: str
    runtime: str


@define(eq=False)
class _Slot:
    """A loaded model; `turn` keeps its runs apart when the runtime cannot run it in two threads at once."""

    model: TensorModel
    digest: str
    turn: threading.Lock | None = field(default=None)
    warm_s: float | None = None
    """Seconds of a run with empty inputs, once it was warm; None when it was not tried."""

    def close(self) -> None:
        self.model.close()

    def run(self, inputs: Sequence[Tensor], stop: Stop | None = None) -> Sequence[Tensor]:
        try:
            with self.turn or contextlib.nullcontext():
                if stop is not None and isinstance(self.model, StoppableModel):
                    return self.model.run_until(inputs, stop)
                return self.model.run(inputs)
        except MemoryError as err:
            raise EngineError("no memory left for this run", next_step="free memory, or use another arm") from err

    def warm(self, clock: Clock) -> None:
        """Run until a run costs what it will cost; models with free dimensions or texts are left as they are."""
        if any(None in spec.shape or spec.datatype not in DATATYPE_BYTES for spec in self.model.inputs):
            return
        inputs = [_empty(spec) for spec in self.model.inputs]
        for number in range(WARM_RUNS):
            began_s = clock()
            self.run(inputs)
            seconds = clock() - began_s
            self.warm_s = min(self.warm_s or seconds, seconds)
            if number > 0 and seconds > LONG_WARM_S:
                return


class LocalEndpoint:
    """Runs models by name. All methods are for the event loop's thread.

    Args:
        files: the model store, or None when everything is registered by hand.
        pool: memory of all models of this process.
        executor: where runs wait and run; its owner closes it.
        runtimes: by format (`onnx`, `tflite`).
        threads: per run.
    """

    def __init__(
        self,
        files: ModelFiles | None,
        pool: ModelPool,
        executor: BoundedExecutor,
        runtimes: Mapping[str, TensorRuntime],
        *,
        threads: int = 1,
        clock: Clock = time.monotonic,
    ) -> None:
        self._files = files
        self._pool = pool
        self._executor = executor
        self._runtimes = dict(runtimes)
        self._threads = threads
        self._clock = clock
        self._registered: dict[str, Registered] = {}
        self._pinned: dict[str, Lease[Closable]] = {}
        self._loading: dict[str, asyncio.Task[None]] = {}
        # Loads go one after the other, so that two large models never peak in memory together. Each model loads once
        # for all who want it, so no more loads can wait than there are models; deadlines bound those who ask.
        self._loader = BoundedExecutor(
            f"{executor.name}-load", 1, clock=clock, bounded=False, patience_s=LOAD_PATIENCE_S
        )
        # Of their own, so that a request that must load never waits for a run that nobody waits for.
        self._warmer = BoundedExecutor(
            f"{executor.name}-warm", 1, clock=clock, bounded=False, patience_s=LOAD_PATIENCE_S
        )

    async def infer(
        self,
        model: str,
        inputs: Sequence[Tensor],
        deadline_s: float,
        *,
        load: bool = True,
        left: Left | None = None,
    ) -> TensorAnswer:
        """Answer within `deadline_s` seconds from now.

        load: False raises Loading at once for a model that is not in memory. left: see `run`.
        Raises NotFound, BadRequest, Full (no room, or the queue alone would pass the deadline) or EngineError.
        """
        asked = tuple(inputs)
        outputs, digest, wait_s, run_s = await self.run(model, lambda run: run(asked), deadline_s, load=load, left=left)
        return TensorAnswer(outputs, digest, wait_s=wait_s, compute_s=run_s)

    async def run(
        self,
        model: str,
        work: Callable[[RunModel], T],
        deadline_s: float,
        *,
        load: bool = True,
        left: Left | None = None,
    ) -> tuple[T, str, float, float]:
        """Do `work` with a loaded model on a worker, as `infer` does its one run.

        Who leaves before the end, cancelled or out of time, stops the run, if its runtime can. left: called in this
        event loop when the run of a caller who left is over, with the seconds that it ran.
        Returns what it returned, the digest, and the seconds it waited and ran.
        """
        began_s = self._clock()
        wait_s = self._executor.wait_s()
        if wait_s > deadline_s:
            raise Full(f"the queue is {wait_s:.2f} s long, the deadline {deadline_s:.2f} s", retry_after_s=wait_s)
        try:
            async with asyncio.timeout(deadline_s):
                lease = await self._lease(self._resolve(model)) if load else self._leased(model)
                run = _Run(lease, work, self._clock)
                try:
                    result, ticket = await self._executor.run_timed(run)
                except BaseException:
                    run.leave(left)
                    raise
        except TimeoutError as err:
            raise EngineError(
                f"{model} did not answer within {deadline_s:.2f} s", next_step="allow more time, or use another arm"
            ) from err
        assert result is not None
        return result, run.digest, self._waited(ticket, began_s), ticket.run_s

    def stops(self, name: str) -> bool:
        """Whether a run of `name` ends soon after its caller has left."""
        try:
            return bool(getattr(self._runtimes.get(self._resolve(name).runtime), "stoppable", False))
        except MidstreamError:
            return False

    def pulses(self) -> tuple[Pulse, ...]:
        """Signs of life of the threads that load and warm models; the executor has its own."""
        return (*self._loader.pulses(), *self._warmer.pulses())

    def wait_s(self) -> float:
        """Seconds a request that came now would wait before it runs."""
        return self._executor.wait_s()

    def register(self, name: str, file: Path, digest: str | None = None, runtime: str | None = None) -> None:
        """Let `file` answer as `name`. `digest` is hashed when absent; `runtime` follows from the suffix.

        Registering a name again replaces it; the model loaded before is forgotten when its last request ends.
        """
        if len(self._registered) >= MAX_REGISTERED and name not in self._registered:
            raise EngineError(f"{MAX_REGISTERED} models are registered already", next_step="remove old bundles")
        if not file.is_file():
            raise EngineError(f"{file.name} is not there", next_step="fetch it again")
        kind = runtime or file.suffix.removeprefix(".")
        found = Registered(name, file, digest or file_sha256(file), kind)
        if self._registered.get(name, found) != found:
            self.unregister(name)
        self._registered[name] = found

    def unregister(self, name: str) -> None:
        """Forget a name and its loaded model, one of the store's too; unknown names are fine."""
        self._unpin(name)
        self._registered.pop(name, None)
        self._pool.drop(name)

    async def preload(self, name: str, *, keep: bool = False, warm: bool = False, spare: bool = False) -> float | None:
        """Load before the first request; with `keep`, stay loaded until unregister or close.

        spare: only into memory that is free, so that nothing leaves for it.

        warm: a model that is loaded by this also runs before it counts as loaded, off the executor; returns the seconds
        of its last run, None for one that was in memory already or has free dimensions.
        Raises NotFound, EngineError, or Full when models in use hold the memory.
        """
        lease = await self._lease(self._resolve(name), warm, spare)
        slot = lease.value
        seconds = slot.warm_s if isinstance(slot, _Slot) else None
        if keep and name not in self._pinned:
            self._pinned[name] = lease
        else:
            lease.release()
        return seconds

    def loaded(self, name: str) -> bool:
        """Whether `name` answers without loading first."""
        return self._pool.loaded(name)

    def versions(self) -> str:
        """The runtimes and their versions, for what was measured with them."""
        return ", ".join(f"{name} {_version(runtime)}" for name, runtime in sorted(self._runtimes.items()))

    def loading(self) -> tuple[str, ...]:
        """Names of the models that are being loaded."""
        return tuple(self._loading)

    def file(self, name: str) -> Path:
        """Where a model's file is. Raises NotFound."""
        return self._resolve(name).file

    async def describe(self, name: str) -> tuple[Sequence[TensorSpec], Sequence[TensorSpec], str]:
        """Inputs, outputs and digest of a model, loading it if needed."""
        with await self._lease(self._resolve(name)) as slot:
            assert isinstance(slot, _Slot)
            return slot.model.inputs, slot.model.outputs, slot.digest

    def names(self) -> tuple[str, ...]:
        """Registered names, in order of registration."""
        return tuple(self._registered)

    async def close(self) -> None:
        """Stop loading, unpin; the pool and the executor belong to who made them."""
        tasks = list(self._loading.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for name in list(self._pinned):
            self._unpin(name)
        await asyncio.to_thread(self._loader.close)
        await asyncio.to_thread(self._warmer.close)

    def _resolve(self, name: str) -> Registered:
        registered = self._registered.get(name)
        if registered is not None:
            return registered
        if self._files is None:
            raise NotFound(f"there is no model {name[:100]!r} here", field="model")
        entry = self._files.entry(name)
        if entry.format not in self._runtimes:
            raise BadRequest(
                f"{name} is a {entry.format} file, which takes no tensors here",
                next_step=f"tensor models here are {', '.join(self._runtimes)}",
                field="model",
            )
        return Registered(name, self._files.path(name), entry.sha256, entry.format)

    async def _lease(self, wanted: Registered, warm: bool = False, spare: bool = False) -> Lease[Closable]:
        """Lease a loaded model, else load it off the loop; those who come meanwhile share the load."""
        name = wanted.name
        while True:
            lease = self._pool.try_acquire(name)
            if lease is not None:
                return lease
            task = self._loading.get(name)
            if task is None:
                task = asyncio.create_task(self._load(wanted, warm, spare), name=f"load {name}")
                self._loading[name] = task
                task.add_done_callback(lambda _: self._loading.pop(name, None))
            await asyncio.shield(task)
            wanted = self._resolve(name)  # it may be another file by now, or gone

    async def _load(self, wanted: Registered, warm: bool, spare: bool) -> None:
        runtime = self._runtimes.get(wanted.runtime)
        if runtime is None:
            engine = ENGINES.get(wanted.runtime)
            step = f"{install_step(engine.extra)}, or " if engine is not None and engine.extra else ""
            raise EngineError(f"no engine here runs {wanted.runtime!r} files", next_step=f"{step}use another model")
        load = _loader(runtime, wanted, self._threads, self._clock if warm else None)
        loader = self._warmer if warm else self._loader
        acquire = partial(self._pool.acquire, spare=spare)
        lease = await loader.run(acquire, wanted.name, _size_bytes(wanted.file), load)
        lease.release()

    def _leased(self, name: str) -> Lease[Closable]:
        lease = self._pool.try_acquire(self._resolve(name).name)
        if lease is None:
            raise Loading(f"{name} is not in memory", retry_after_s=RETRY_AFTER_S)
        return lease

    def _unpin(self, name: str) -> None:
        lease = self._pinned.pop(name, None)
        if lease is not None:
            lease.release()

    def _waited(self, ticket: Ticket, began_s: float) -> float:
        """Everything before the run: loading, if any, and the queue."""
        return max(0.0, ticket.arrived_s - began_s) + ticket.wait_s


class _Run(Generic[T]):
    """Work under a lease. Whoever is first, the worker or the one who leaves, takes the lease and ends it.

    So work that was cancelled in the queue frees its model at once, and work under way is stopped, or keeps it until it
    ends by itself.
    """

    def __init__(self, lease: Lease[Closable], work: Callable[[RunModel], T], clock: Clock) -> None:
        slot = lease.value
        assert isinstance(slot, _Slot)
        self.digest = slot.digest
        self._slot = slot
        self._lease = lease
        self._work = work
        self._clock = clock
        self._claim = threading.Lock()
        self._stop = Stop()
        self._over = threading.Lock()
        self._ran_s: float | None = None
        self._tell: Callable[[float], None] | None = None

    def __call__(self) -> T | None:
        if not self._claim.acquire(blocking=False):
            return None
        began_s = self._clock()
        try:
            return self._work(lambda inputs: self._slot.run(inputs, self._stop))
        finally:
            self._lease.release()
            self._ended(self._clock() - began_s)

    def leave(self, left: Left | None) -> None:
        """Nobody waits any more; from the event loop."""
        if self._claim.acquire(blocking=False):
            self._lease.release()
            self._ended(0.0)
        self._stop.ask()
        if left is None:
            return
        loop = asyncio.get_running_loop()
        with self._over:
            ran_s, self._tell = self._ran_s, lambda seconds: _call(loop, left, seconds)
        if ran_s is not None:
            left(ran_s)

    def _ended(self, ran_s: float) -> None:
        with self._over:
            self._ran_s, tell = ran_s, self._tell
        if tell is not None:
            tell(ran_s)


def _call(loop: asyncio.AbstractEventLoop, left: Left, ran_s: float) -> None:
    with contextlib.suppress(RuntimeError):  # the loop was closed while the work ran; nobody listens any more
        loop.call_soon_threadsafe(left, ran_s)


def _loader(runtime: TensorRuntime, wanted: Registered, threads: int, warm_by: Clock | None) -> Callable[[], _Slot]:
    def load() -> _Slot:
        try:
            model = runtime.load(wanted.file, threads)
        except MemoryError as err:
            raise EngineError(f"no memory left to load {wanted.name}", next_step="free memory, or use less") from err
        slot = _Slot(model, wanted.digest, None if getattr(model, "thread_safe", False) else threading.Lock())
        try:
            if warm_by is not None:
                slot.warm(warm_by)
        except BaseException:
            slot.close()
            raise
        return slot

    return load


def _version(runtime: TensorRuntime) -> str:
    try:
        return runtime.version
    except EngineError:
        return "not installed"


def _empty(spec: TensorSpec) -> Tensor:
    shape = tuple(size or 0 for size in spec.shape)
    return Tensor(spec.name, spec.datatype, shape, bytes(prod(shape) * DATATYPE_BYTES[spec.datatype]))


def _size_bytes(file: Path) -> int:
    try:
        return estimate_bytes(file)
    except OSError as err:
        raise EngineError(f"{file.name} cannot be read: {err.strerror}", next_step="pull the model again") from err

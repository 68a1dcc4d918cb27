"""Requests of one model that wait anyway are run as one batch. A lone request does not wait.

A batch is open from its first request until a worker takes it: whoever comes meanwhile joins, so batches grow with the
load and nobody waits for company. With `max_wait_s` a batch is also held back while another one of its model is in
flight, up to that long (the "maximum queue delay" of dynamic batchers). A model is batched only if a file with a free
first dimension was registered for it (split_models/batch_onnx.py makes and checks those); all others run one by one.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar

from attrs import define, field, frozen

from engines.local import RunModel
from engines.port import TensorAnswer
from protocol.clock import Clock
from protocol.errors import EngineError, Full, MidstreamError
from protocol.tensors import Tensor, TensorSpec

log = logging.getLogger("midstream.engines.batching")

T = TypeVar("T")


@frozen
class BatchSettings:
    """max_rows: rows of one batch; 1 switches batching off. max_wait_s: how long a batch may be held back."""

    max_rows: int = 8
    max_wait_s: float = 0.0


class Local(Protocol):
    """The part of engines.local.LocalEndpoint that is used here."""

    async def infer(self, model: str, inputs: Sequence[Tensor], deadline_s: float) -> TensorAnswer: ...

    async def run(
        self, model: str, work: Callable[[RunModel], T], deadline_s: float
    ) -> tuple[T, str, float, float]: ...

    async def describe(self, name: str) -> tuple[Sequence[TensorSpec], Sequence[TensorSpec], str]: ...

    async def preload(self, name: str, *, keep: bool = False, warm: bool = False) -> float | None: ...

    def loaded(self, name: str) -> bool: ...

    def wait_s(self) -> float: ...


@define(eq=False)
class _Member:
    """One request in a batch."""

    inputs: tuple[Tensor, ...]
    rows: int
    arrived_s: float
    done: asyncio.Future[tuple[Sequence[Tensor], str, float, float]]


@define(eq=False)
class _Batch:
    """Requests that will run together. Members join and leave on the loop until a worker takes them in its thread."""

    model: str
    shape: tuple[tuple[str, str, tuple[int, ...]], ...]
    members: list[_Member] = field(factory=list)
    hold: asyncio.TimerHandle | None = None
    task: asyncio.Task[None] | None = None
    _lock: threading.Lock = field(factory=threading.Lock)
    _taken: bool = False

    @property
    def rows(self) -> int:
        return sum(member.rows for member in self.members)

    def join(self, member: _Member, max_rows: int) -> bool:
        """False when it runs already, or has no room."""
        with self._lock:
            if self._taken or (self.members and self.rows + member.rows > max_rows):
                return False
            self.members.append(member)
            return True

    def leave(self, member: _Member) -> bool:
        """Take a member out; True when nobody is left and nothing runs yet: then nobody joins any more either."""
        with self._lock:
            if self._taken or member not in self.members:
                return False
            self.members.remove(member)
            self._taken = not self.members
            return self._taken

    def take(self) -> list[_Member]:
        """From here on nobody joins."""
        with self._lock:
            self._taken = True
            return list(self.members)


class BatchingEndpoint:
    """A TensorEndpoint in front of a local one. For the event loop's thread.

    Args:
        local: where models run.
        batched: model name -> name of its file with a free first dimension; read at each request.
        settings: read at each request.
    """

    def __init__(
        self,
        local: Local,
        batched: Callable[[], Mapping[str, str]],
        settings: Callable[[], BatchSettings],
        clock: Clock,
    ) -> None:
        self._local = local
        self._batched = batched
        self._settings = settings
        self._clock = clock
        self._open: dict[str, _Batch] = {}
        self._in_flight: dict[str, int] = {}
        self._loading: set[asyncio.Task[None]] = set()
        self.runs: dict[int, int] = {}
        """How many runs there were, by the number of their requests."""

    async def infer(self, model: str, inputs: Sequence[Tensor], deadline_s: float) -> TensorAnswer:
        """As LocalEndpoint.infer."""
        settings, name = self._settings(), self._batched().get(model)
        count = inputs[0].shape[0] if inputs and inputs[0].shape else 0
        fits = 0 < count < settings.max_rows and all(tensor.shape[:1] == (count,) for tensor in inputs)
        if name is None or not fits or not self._ready(name):
            return await self._local.infer(model, inputs, deadline_s)
        queue_s = self._local.wait_s()
        if queue_s > deadline_s:
            raise Full(f"the queue is {queue_s:.2f} s long, the deadline {deadline_s:.2f} s", retry_after_s=queue_s)
        member = _Member(tuple(inputs), count, self._clock(), asyncio.get_running_loop().create_future())
        batch = self._enter(model, name, member, settings)
        try:
            async with asyncio.timeout(deadline_s):
                outputs, digest, wait_s, run_s = await member.done
        except TimeoutError as err:
            raise EngineError(
                f"{model} did not answer within {deadline_s:.2f} s", next_step="allow more time, or use another arm"
            ) from err
        finally:
            self._leave(batch, member)
        return TensorAnswer(outputs, digest, wait_s=wait_s, compute_s=run_s)

    async def describe(self, name: str) -> tuple[Sequence[TensorSpec], Sequence[TensorSpec], str]:
        """As LocalEndpoint.describe."""
        return await self._local.describe(name)

    async def preload(self, name: str, *, keep: bool = False, warm: bool = False) -> float | None:
        """As LocalEndpoint.preload."""
        return await self._local.preload(name, keep=keep, warm=warm)

    def loaded(self, name: str) -> bool:
        return self._local.loaded(name)

    def wait_s(self) -> float:
        return self._local.wait_s()

    def _ready(self, name: str) -> bool:
        """Whether the batch file is loaded; else it is loaded beside, and requests run one by one meanwhile."""
        if self._local.loaded(name):
            return True
        if not self._loading:
            task = asyncio.create_task(self._load(name), name=f"load {name}")
            self._loading.add(task)
            task.add_done_callback(self._loading.discard)
        return False

    async def _load(self, name: str) -> None:
        try:
            await self._local.preload(name)
        except MidstreamError as err:
            log.info("%s is not loaded, its requests run one by one: %s", name, err)

    def _enter(self, model: str, name: str, member: _Member, settings: BatchSettings) -> _Batch:
        shape = tuple((tensor.name, tensor.datatype, tensor.shape[1:]) for tensor in member.inputs)
        batch = self._open.get(model)
        if batch is None or batch.shape != shape or not batch.join(member, settings.max_rows):
            if batch is not None:
                self._post(batch, name)
            batch = self._open[model] = _Batch(model, shape)
            batch.join(member, settings.max_rows)
        held = settings.max_wait_s > 0 and self._in_flight.get(model, 0) > 0 and batch.rows < settings.max_rows
        if not held:
            self._post(batch, name)
        elif batch.hold is None and batch.task is None:
            loop = asyncio.get_running_loop()
            batch.hold = loop.call_later(settings.max_wait_s, self._post, batch, name)
        return batch

    def _post(self, batch: _Batch, name: str) -> None:
        """Into the executor's queue; it stays open until a worker takes it."""
        if batch.hold is not None:
            batch.hold.cancel()
        if batch.task is None and batch.members:
            self._in_flight[batch.model] = self._in_flight.get(batch.model, 0) + 1
            batch.task = asyncio.create_task(self._run(batch, name), name=f"batch {batch.model}")
            # Not in the task: one that is cancelled before its first step runs none of its lines.
            batch.task.add_done_callback(lambda _: self._over(batch, name))

    async def _run(self, batch: _Batch, name: str) -> None:
        taken: list[_Member] = []
        started_s = [0.0]

        def work(run: RunModel) -> list[_Outcome]:
            started_s[0] = self._clock()
            taken.extend(batch.take())
            return batch_run(run, [member.inputs for member in taken])

        try:
            # Each member has a deadline of its own; a batch that all its members left is cancelled.
            outcomes, digest, _, run_s = await self._local.run(name, work, _LONGEST_S)
            self.runs[len(taken)] = self.runs.get(len(taken), 0) + 1
            for member, outcome in zip(taken, outcomes, strict=True):
                wait_s = max(0.0, started_s[0] - member.arrived_s)
                _settle(member, outcome if isinstance(outcome, MidstreamError) else (outcome, digest, wait_s, run_s))
        except MidstreamError as err:
            for member in batch.take():
                _settle(member, err)

    def _over(self, batch: _Batch, name: str) -> None:
        for member in batch.take():
            _settle(member, EngineError(f"a batch of {batch.model} was cut short", next_step="ask again"))
        self._in_flight[batch.model] -= 1
        if not self._in_flight[batch.model]:
            del self._in_flight[batch.model]
        waiting = self._open.get(batch.model)
        if waiting is batch:
            del self._open[batch.model]
        elif waiting is not None:
            self._post(waiting, name)

    def _leave(self, batch: _Batch, member: _Member) -> None:
        """A member is done or gave up; a batch that nobody waits for any more leaves the queue."""
        member.done.cancel()
        if batch.leave(member):
            if batch.hold is not None:
                batch.hold.cancel()
            if self._open.get(batch.model) is batch:
                del self._open[batch.model]
            if batch.task is not None:
                batch.task.cancel()


_LONGEST_S = 3600.0

_Answered = tuple[Sequence[Tensor], str, float, float]
_Outcome = Sequence[Tensor] | MidstreamError


def _settle(member: _Member, outcome: _Answered | MidstreamError) -> None:
    if member.done.done():
        return
    if isinstance(outcome, MidstreamError):
        member.done.set_exception(outcome)
    else:
        member.done.set_result(outcome)


def batch_run(run: RunModel, asked: Sequence[Sequence[Tensor]]) -> list[_Outcome]:
    """One run over the rows of all requests, and each request's rows of every output. Blocking.

    When that fails, each request runs alone, so that none suffers from another's input.
    """
    if len(asked) > 1:
        try:
            outputs = run([joined(parts) for parts in zip(*asked, strict=True)])
            counts = [inputs[0].shape[0] for inputs in asked]
            split = [parted(tensor, counts) for tensor in outputs]
            return [tuple(parts) for parts in zip(*split, strict=True)]
        except MidstreamError as err:
            log.info("a batch of %d runs one by one: %s", len(asked), err)
    return [_alone(run, inputs) for inputs in asked]


def _alone(run: RunModel, inputs: Sequence[Tensor]) -> _Outcome:
    try:
        return run(inputs)
    except MidstreamError as err:
        return err


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """One tensor with the rows of all, which differ in the first dimension only."""
    first = tensors[0]
    count = sum(tensor.shape[0] for tensor in tensors)
    return Tensor(first.name, first.datatype, (count, *first.shape[1:]), b"".join(tensor.data for tensor in tensors))


def parted(tensor: Tensor, counts: Sequence[int]) -> list[Tensor]:
    """The rows in runs of `counts`, not copied. Raises EngineError when there are more or fewer rows."""
    if not tensor.shape or tensor.shape[0] != sum(counts):
        raise EngineError(f"output {tensor.name!r} has shape {list(tensor.shape)} for {sum(counts)} rows")
    data = memoryview(tensor.data).cast("B")
    row_bytes = len(data) // tensor.shape[0]
    found, at = [], 0
    for count in counts:
        part = data[at * row_bytes : (at + count) * row_bytes]
        found.append(Tensor(tensor.name, tensor.datatype, (count, *tensor.shape[1:]), part))
        at += count
    return found

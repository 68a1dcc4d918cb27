"""Worker threads behind a bounded queue. Only device compute belongs here.

Who asks decides what happens when the queue is full: the event loop is refused (`run` raises Full and the planner goes
elsewhere); a foreign thread, such as the reader of one link, may run the work itself and meanwhile reads nothing. It
takes a worker's place for that: it first works off what came before its own, in order, and gives the place back. So no
more runs go at once than there are workers (they would only fight over the interpreter and the caches), and a reader
under a burst reads a handful, then works on a handful. It may keep the place while it reads the next handful: a worker
that took up each piece meanwhile would fight with the reading.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, Literal, ParamSpec, TypeVar

from attrs import define, field, frozen

from engines.admission import MAX_WAITING, Admission, Decision, Load, WhenFull
from engines.give_way import First, behind, given_way_s
from engines.stop import Stopped
from engines.thread_priority import stand_back
from profiles.facts import usable_cores
from protocol.clock import Clock
from protocol.errors import EngineError, Full
from protocol.events import Emit, QueueSampled, ignore
from protocol.pulse import Pulse

P = ParamSpec("P")
T = TypeVar("T")
OnDone = Callable[[Any, BaseException | None], None]
"""Called with (result, None) or (None, error) in the thread that ran the work; must be quick and not raise."""

_log = logging.getLogger("midstream.engines.executor")


@frozen
class ExecutorMetrics:
    """A snapshot. service_s: one run on a core of its own, or None; wait_s: what a newcomer would wait."""

    waiting: int
    running: int
    capacity: int
    service_s: float | None
    wait_s: float
    peak_waiting: int


@define(eq=False)
class Ticket:
    """One piece of work. `wait_s` and `run_s` are known once it is done."""

    fn: Callable[[], Any] = field(repr=False)
    on_done: OnDone = field(repr=False)
    arrived_s: float
    state: Literal["waiting", "running", "done", "cancelled"] = "waiting"
    running_at_start: int = 0
    wait_s: float = 0.0
    run_s: float = 0.0


PATIENCE_S = 120.0
"""A run that takes longer than this, and much longer than runs took before, counts as hung."""
PATIENCE_RUNS = 20


@define(eq=False)
class _Worker:
    """Of one worker, or of a caller in its place; `beats` moves when work is taken up, and when a worker did it."""

    beats: int = 0
    busy: bool = False


class BoundedExecutor:
    """A queue whose length follows the measured service time; see engines.admission.

    Args:
        name: names the threads and the events.
        workers: threads; they start with the first work and end with close().
        wait_target_s: longest wait in the queue that work is let in for.
        threads_per_run: cores that one run keeps busy.
        bounded: False lets everything wait: for work that is bounded elsewhere, or to measure what the bound is worth.
        niceness: how far the workers stand back behind other threads for a core, 0 to 19; see `stand_back`.
        patience_s: longest run that is not called hung; twenty measured runs when that is more.
        first: work stands back while that executor has any; see engines.give_way.
    """

    def __init__(
        self,
        name: str,
        workers: int,
        wait_target_s: float = 0.1,
        clock: Clock = time.monotonic,
        emit: Emit = ignore,
        *,
        threads_per_run: int = 1,
        cores: int | None = None,
        max_waiting: int = MAX_WAITING,
        bounded: bool = True,
        niceness: int = 0,
        patience_s: float = PATIENCE_S,
        first: First | None = None,
    ) -> None:
        parallel = max(1.0, (cores or usable_cores()) / max(1, threads_per_run))
        self._name = name
        self._workers = workers
        self._clock = clock
        self._emit = emit
        self._niceness = niceness
        self._patience_s = patience_s
        self._first = first
        self._admission = Admission(workers, wait_target_s, parallel=parallel, max_waiting=max_waiting, bounded=bounded)
        self._lock = threading.RLock()
        self._to_do, self._room, self._idle = (threading.Condition(self._lock) for _ in range(3))
        self._queue: deque[Ticket] = deque()
        self._threads: list[threading.Thread] = []
        self._pulses: list[_Worker] = []
        self._running: set[threading.Thread] = set()
        self._callers: dict[threading.Thread, _Worker] = {}
        self._callers_waiting = 0
        self._keepers: set[threading.Thread] = set()
        self._peak_waiting = 0
        self._closed = False
        self._served: weakref.WeakSet[asyncio.AbstractEventLoop] = weakref.WeakSet()

    @property
    def name(self) -> str:
        return self._name

    @property
    def workers(self) -> int:
        return self._workers

    @property
    def waiting(self) -> int:
        """Work that no free worker is about to take."""
        return max(0, len(self._queue) - max(0, self._workers - self.running))

    @property
    def running(self) -> int:
        """Runs under way, those in callers' own threads and the places that callers keep included."""
        return len(self._running)

    @property
    def busy(self) -> bool:
        """Whether anything runs or waits; from any thread, and it waits for no lock."""
        return bool(self._queue) or self.running > 0

    def wait_until_idle(self, seconds: float) -> None:
        """Return when nothing runs or waits, or after `seconds`; from a foreign thread."""
        with self._idle:
            self._idle.wait_for(lambda: not self.busy, seconds)

    @property
    def capacity(self) -> int:
        """How many may wait now."""
        return self._admission.capacity

    @property
    def service_s(self) -> float | None:
        """Measured seconds of one run on a core of its own."""
        return self._admission.service_s

    def wait_s(self) -> float:
        """Seconds that work which came now would wait before it runs."""
        return self._admission.wait_s(self._load())

    def set_wait_target(self, seconds: float) -> None:
        """Follow another wait target at once, from any thread; what waits already stays. ValueError unless above 0."""
        with self._lock:
            self._admission.set_wait_target(seconds)
            self._room.notify_all()

    def metrics(self) -> ExecutorMetrics:
        """All live figures at one moment."""
        with self._lock:
            return ExecutorMetrics(
                self.waiting, self.running, self.capacity, self.service_s, self.wait_s(), self._peak_waiting
            )

    def pulses(self) -> tuple[Pulse, ...]:
        """Signs of life of workers, and of callers in their places, for a watchdog; from any thread, without a lock."""
        patience_s = max(self._patience_s, PATIENCE_RUNS * (self.service_s or 0.0))
        workers = [(str(number), worker) for number, worker in enumerate(tuple(self._pulses))]
        callers = [(thread.name, place) for thread, place in self._callers.copy().items()]
        return tuple(
            Pulse(f"{self._name}-{name}", worker.beats, worker.busy, patience_s)
            for name, worker in (*workers, *callers)
        )

    async def run(self, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `fn` on a worker and await it; from the event loop. Raises Full at once when there is no room.

        Cancelling takes waiting work out of the queue: it never runs. Running work ends by itself, unheard.
        """
        result, _ = await self.run_timed(fn, *args, **kwargs)
        return result

    async def run_timed(self, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> tuple[T, Ticket]:
        """As `run`, with the ticket that knows how long the work waited and ran."""
        loop = asyncio.get_running_loop()
        self._served.add(loop)
        done: asyncio.Future[T] = loop.create_future()

        def tell(result: T, error: BaseException | None) -> None:
            try:
                loop.call_soon_threadsafe(_settle, done, result, error)
            except RuntimeError:  # the loop was closed while the work ran; nobody listens any more
                _log.debug("%s: result dropped, the event loop is closed", self._name)

        ticket = Ticket(fn=lambda: fn(*args, **kwargs), on_done=tell, arrived_s=self._clock())
        self._admit(ticket, "refuse")
        try:
            return await done, ticket
        finally:
            self.cancel(ticket)

    def call(self, fn: Callable[..., T], *args: Any, when_full: WhenFull = "caller_runs", lane: bool = False) -> T:
        """Run `fn` and return its result; from a foreign thread, never from an event loop's (RuntimeError).

        when_full: `caller_runs` runs it in this thread, after what came before it; `refuse` raises Full, `wait` waits
            for room.
        lane: this thread runs an event loop that reads one link and serves nothing else; blocking it is back-pressure.
        """
        self._must_be_foreign(lane)
        box: list[tuple[Any, BaseException | None]] = []
        finished = threading.Event()

        def keep(result: Any, error: BaseException | None) -> None:
            box.append((result, error))
            finished.set()

        self.submit(fn, *args, on_done=keep, when_full=when_full, lane=lane)
        finished.wait()
        result, error = box[0]
        if error is not None:
            raise error
        return result  # type: ignore[no-any-return]

    def submit(
        self,
        fn: Callable[..., Any],
        *args: Any,
        on_done: OnDone,
        when_full: WhenFull = "caller_runs",
        lane: bool = False,
        keep_place: bool = False,
    ) -> Ticket:
        """Hand in `fn` and be told by `on_done`; from a foreign thread, except with `refuse`, which never blocks.

        lane: see `call`.
        keep_place: a thread that ran work itself has its worker's place still, unless another caller waits for one, and
            works on what waits by `go_on`, until that says False, or it calls `leave`, or hands in without this.
        """
        if when_full != "refuse":
            self._must_be_foreign(lane)
        if not keep_place:
            self.leave()  # nobody else would run what this thread may wait for
        ticket = Ticket(fn=lambda: fn(*args), on_done=on_done, arrived_s=self._clock())
        self._admit(ticket, when_full, keep_place=keep_place)
        return ticket

    @property
    def has_place(self) -> bool:
        """Whether the calling thread has kept a worker's place, and does not work there now."""
        return threading.current_thread() in self._keepers

    def go_on(self) -> bool:
        """Work off what waits, in a place that was kept; False where nothing does: then the place is given back."""
        with self._lock:
            if not self._queue or not self.has_place:
                self.leave()
                return False
            last = self._queue[-1]
        self._work_off(last, keep=True, newcomer=False)
        return True

    def leave(self) -> None:
        """Give a kept place back, if there is one."""
        with self._lock:
            if self.has_place:
                self._leave()

    def cancel(self, ticket: Ticket) -> bool:
        """Take waiting work out of the queue; its on_done is not called. False when it runs, ran or was cancelled."""
        with self._lock:
            if ticket.state != "waiting" or ticket not in self._queue:
                return False
            self._queue.remove(ticket)
            ticket.state = "cancelled"
            self._notify()
        return True

    def close(self, timeout_s: float = 10.0) -> None:
        """Refuse new work, drop what waits (its on_done gets an EngineError), join the workers. Idempotent."""
        with self._lock:
            self._closed = True
            dropped = list(self._queue)
            self._queue.clear()
            for ticket in dropped:
                ticket.state = "cancelled"
            threads = list(self._threads)
            self._notify()
        for ticket in dropped:
            self._tell(ticket, None, self._closing())
        deadline_s = time.monotonic() + timeout_s
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline_s - time.monotonic()))

    def _admit(self, ticket: Ticket, when_full: WhenFull, *, keep_place: bool = False) -> None:
        with self._lock:
            decision = self._decide(when_full)
            while decision.act == "wait":
                self._room.wait()
                decision = self._decide(when_full)
            if decision.act == "queue":
                self._enqueue(ticket)
            elif decision.act == "caller_runs":
                self._take_place(ticket)
        if decision.act == "refuse":
            self._sample("refused")
            raise Full(f"{self._name}: {decision.reason}", retry_after_s=decision.retry_after_s)
        if decision.act == "caller_runs":
            self._work_off(ticket, keep=keep_place, newcomer=True)
        else:
            self._sample("queued", wait_s=self.wait_s())

    def _take_place(self, own: Ticket) -> None:
        """A caller is one of the workers from the next end of a run on, before any worker; under the lock."""
        self._callers_waiting += 1
        try:
            while not self._closed and not self.has_place and self.running >= self._workers:
                self._room.wait()
        finally:
            self._callers_waiting -= 1
        if self._closed:
            raise self._closing()
        self._running.add(threading.current_thread())
        self._queue.append(own)
        self._peak_waiting = max(self._peak_waiting, self.waiting)

    def _work_off(self, last: Ticket, *, keep: bool, newcomer: bool) -> None:
        """In a caller's thread: what waits, in order, up to and with `last`; then the place is free or kept."""
        here, kept = threading.current_thread(), False
        place = self._callers[here] = _Worker(busy=True)
        self._keepers.discard(here)
        try:
            if newcomer:
                self._sample("ran_here", wait_s=self.wait_s())
            while last.state == "waiting":
                with self._lock:
                    if not self._queue:
                        break
                    ticket = self._next()
                place.beats += 1
                self._execute(ticket, leaves=ticket is last and not keep)
            kept = keep
        finally:
            self._callers.pop(here, None)
            with self._lock:
                if kept and not self._callers_waiting and not self._closed:
                    self._keepers.add(here)
                else:
                    self._leave()

    def _next(self) -> Ticket:
        """What came first leaves the queue; under the lock, by who has a place already."""
        ticket = self._queue.popleft()
        ticket.state, ticket.running_at_start = "running", self.running
        self._room.notify_all()
        return ticket

    def _decide(self, when_full: WhenFull) -> Decision:
        if self._closed:
            raise self._closing()
        return self._admission.decide(self._load(), when_full)

    def _enqueue(self, ticket: Ticket) -> None:
        self._queue.append(ticket)
        self._peak_waiting = max(self._peak_waiting, self.waiting)
        if len(self._threads) < self._workers and self.running + len(self._queue) > len(self._threads):
            worker = _Worker()
            name = f"{self._name}-{len(self._threads)}"
            thread = threading.Thread(target=self._work, args=(worker,), name=name, daemon=True)
            self._threads.append(thread)
            self._pulses.append(worker)
            thread.start()
        self._notify()

    def _work(self, worker: _Worker) -> None:
        stand_back(self._niceness)
        while True:
            with self._lock:
                while not self._closed and not self._may_take():
                    self._to_do.wait()
                if not self._queue:
                    return
                self._running.add(threading.current_thread())
                ticket = self._next()
            worker.beats, worker.busy = worker.beats + 1, True
            self._execute(ticket, leaves=True)
            worker.beats, worker.busy = worker.beats + 1, False
            del ticket

    def _may_take(self) -> bool:
        """Whether there is work and a place for a worker; callers who wait for a place come first. Under the lock."""
        return bool(self._queue) and self.running + self._callers_waiting < self._workers

    def _leave(self) -> None:
        """The thread that calls this, worker or caller, has a place no more; under the lock."""
        self._running.discard(threading.current_thread())
        self._keepers.discard(threading.current_thread())
        self._notify()

    def _execute(self, ticket: Ticket, *, leaves: bool) -> None:
        """leaves: the place is free for others when this is done, before anyone hears of it."""
        started_s = self._clock()
        ticket.wait_s = started_s - ticket.arrived_s
        result: Any = None
        error: BaseException | None = None
        stood_back_s = 0.0
        with behind(self._first):
            try:
                result = ticket.fn()
            except BaseException as err:  # noqa: BLE001 - whoever asked gets it; a worker outlives what it runs
                error = err
            stood_back_s = given_way_s()
        held_s = self._clock() - started_s
        ticket.run_s = held_s - stood_back_s
        with self._lock:
            at_once = (ticket.running_at_start + self.running) / 2
            if not isinstance(error, Stopped):  # a part of a run is no measure of one
                self._admission.add(held_s, at_once)  # who waits behind it waits for all of that
            ticket.state = "done"
            if leaves:
                self._leave()
        self._tell(ticket, result, error)
        self._sample("done", wait_s=ticket.wait_s, service_s=ticket.run_s)

    def _notify(self) -> None:
        """Something came or ended: whom it concerns wakes up; nobody does while a place only changes its work."""
        if self._closed or self._may_take():
            self._to_do.notify_all()
        self._room.notify_all()
        if not self.busy:
            self._idle.notify_all()

    def _tell(self, ticket: Ticket, result: Any, error: BaseException | None) -> None:
        try:
            ticket.on_done(result, error)
        except Exception:  # noqa: BLE001 - logged with its trace
            # A bug in the callback must not end the worker, nor the reader that ran the work itself.
            _log.exception("%s: a callback failed", self._name)

    def _load(self) -> Load:
        handed_in = len(self._queue) + self.running
        return Load(waiting=self.waiting, running=min(handed_in, self._workers), workers=self._workers)

    def _sample(
        self, outcome: Literal["queued", "ran_here", "refused", "done"], *, wait_s: float = 0.0, service_s: float = 0.0
    ) -> None:
        event = QueueSampled(
            at_s=self._clock(), name=self._name, waiting=self.waiting, running=self.running, capacity=self.capacity,
            outcome=outcome, wait_s=wait_s, service_s=service_s,
        )  # fmt: skip
        self._emit(event)

    def _must_be_foreign(self, lane: bool) -> None:
        here = threading.current_thread()
        if here in self._threads or here in self._callers:
            raise RuntimeError(f"{self._name}: work may not hand in more work and wait for it: the queue could lock up")
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return
        if not lane or loop in self._served:
            raise RuntimeError(
                f"{self._name}: the event loop must await run(); a blocking call would stop every request"
            )

    def _closing(self) -> EngineError:
        return EngineError(f"{self._name} is closed", next_step="send the request to another target")


def _settle(done: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if done.done():
        return
    if error is not None:
        # A future cannot carry StopIteration, and an exit request of the work is not one of the event loop.
        fit = isinstance(error, Exception) and not isinstance(error, StopIteration)
        done.set_exception(error if fit else RuntimeError(f"the work raised {error!r}"))
    else:
        done.set_result(result)

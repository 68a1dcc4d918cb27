"""A stream of tensor frames read by a thread of its own, which also works on the answers when their executor is full.

A burst of answers then slows the reader: while it works it reads nothing and grants no credit, so the server keeps what
it has, and no queue grows here. Requests whose user waits take another stream (engines.remote_frames on the house's own
loop): they neither stand behind the burst on the wire nor behind its work.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from engines.executor import BoundedExecutor
from engines.give_way import given_way_s
from engines.port import TensorAnswer, Worked
from engines.remote_frames import FramesEndpoint
from engines.thread_priority import stand_back
from links.port import FrameStream, Link
from protocol.clock import Clock
from protocol.errors import LinkClosed, LinkTimeout, MidstreamError
from protocol.events import TransferSample
from protocol.tensors import Tensor

log = logging.getLogger("midstream.engines.laned")

T = TypeVar("T")

NICENESS = 10
"""Of the lane's thread: a core that anyone else wants is theirs."""

QUIET_TURNS = 3
"""Turns of the lane's loop without an answer after which nothing more counts as being here already: one reads what the
system has, and one more takes it apart."""

OPEN_S = 10.0


class LanedEndpoint:
    """A TensorEndpoint with a reader's lane. Methods are for the house's event loop.

    Args:
        link: the name that samples carry.
        open_link: makes a link to the server, for each stream anew; called in the lane's thread, where that link lives.
        executor: where answers are worked on; when it is full the lane takes a worker's place there.
        sink: takes samples on the house's loop.
    """

    def __init__(
        self,
        link: str,
        open_link: Callable[[], Link],
        executor: BoundedExecutor,
        *,
        sink: Callable[[TransferSample], None] = lambda sample: None,
        clock: Clock = time.monotonic,
        niceness: int = NICENESS,
    ) -> None:
        self._name = link
        self._open_link = open_link
        self._executor = executor
        self._sink = sink
        self._clock = clock
        self._niceness = niceness
        self._home: asyncio.AbstractEventLoop | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._frames: FramesEndpoint | None = None
        self._ready: Future[None] = Future()
        self._thread: threading.Thread | None = None
        self._stop: asyncio.Event | None = None
        self._link: Link | None = None
        self._starting = asyncio.Lock()
        self._closed = False
        self._outbox: deque[Callable[[], None]] = deque()
        self._answers = 0
        self._in_place = False

    async def start(self) -> None:
        """Start the thread unless it runs; the first request does it too, and opens the stream.

        Raises LinkClosed, or LinkTimeout when the thread is not up in time.
        """
        async with self._starting:
            if self._closed:
                raise LinkClosed(f"the lane to {self._name} was closed", next_step="another arm answers meanwhile")
            if self._thread is None or not self._thread.is_alive():
                self._begin()
            if self._ready.done():
                self._ready.result()
                return
            try:  # shielded: who gives up waiting takes the thread from nobody
                await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(self._ready)), OPEN_S)
            except TimeoutError as err:
                raise LinkTimeout(f"the lane to {self._name} did not start within {OPEN_S:.0f} s") from err

    def _begin(self) -> None:
        """A thread of its own, the first one or another after the one before ended."""
        self._home = asyncio.get_running_loop()
        self._loop = self._stop = self._frames = self._link = None
        self._ready = Future()
        name = f"{self._name}-lane"
        self._thread = threading.Thread(target=self._work, args=(self._ready,), name=name, daemon=True)
        self._thread.start()

    async def infer(self, model: str, inputs: Sequence[Tensor], deadline_s: float) -> TensorAnswer:
        """As FramesEndpoint.infer; nothing is worked on here."""
        await self.start()
        return await self._in_lane(self._endpoint().infer(model, inputs, deadline_s))

    async def infer_then(
        self,
        model: str,
        inputs: Sequence[Tensor],
        deadline_s: float,
        work: Callable[[TensorAnswer], T],
        *,
        packed: bool = False,
    ) -> Worked[T]:
        """Ask, then do `work` with the answer on the executor or in the lane, all within `deadline_s`.

        packed: send and ask for zstd data, where both sides have it.
        Raises what the server, the link or `work` raised; LinkTimeout when time ran out.
        """
        await self.start()
        home = asyncio.get_running_loop()
        done: asyncio.Future[Worked[T]] = home.create_future()

        def on_answer(answer: TensorAnswer, used: Callable[[], None]) -> None:
            self._hand_in(answer, used, work, home, done)

        asking = self._begun(self._endpoint().infer_then(model, inputs, deadline_s, on_answer, packed=packed))
        asking.add_done_callback(lambda asked: self._unless_answered(asked, home, done))
        try:
            async with asyncio.timeout(deadline_s):
                return await done  # alone: an answer wakes the house's loop once
        except BaseException as err:
            asking.cancel()
            if isinstance(err, TimeoutError):
                raise LinkTimeout(f"no answer for {model} was ready within {deadline_s:.2f} s") from err
            raise

    def wait_s(self) -> float:
        """Seconds at the server, as it said last, and in the executor here."""
        return (self._frames.wait_s() if self._frames is not None else 0.0) + self._executor.wait_s()

    def under_way(self) -> TransferSample | None:
        """The oldest request that is on its way."""
        return self._frames.under_way() if self._frames is not None else None

    async def close(self) -> None:
        """End the stream, its link and the thread. The executor belongs to who made it."""
        self._closed = True
        loop, stop = self._loop, self._stop
        if loop is not None and stop is not None:
            with contextlib.suppress(RuntimeError):  # the lane has ended by itself
                loop.call_soon_threadsafe(stop.set)
        if self._thread is not None and self._thread.is_alive():
            await asyncio.to_thread(self._thread.join, OPEN_S)

    def _hand_in(
        self,
        answer: TensorAnswer,
        used: Callable[[], None],
        work: Callable[[TensorAnswer], T],
        home: asyncio.AbstractEventLoop,
        done: asyncio.Future[Worked[T]],
    ) -> None:
        """In the lane: may run the work itself, and then reads nothing meanwhile."""
        came_s = self._clock()

        def call() -> tuple[T, float, float]:
            began_s, before_s = self._clock(), given_way_s()
            result = work(answer)
            stood_back_s = given_way_s() - before_s
            return result, began_s - came_s + stood_back_s, self._clock() - began_s - stood_back_s

        def tell(result: Any, error: BaseException | None) -> None:
            used()
            outcome = error if error is not None else Worked(answer, *result)
            self._outbox.append(partial(_settle, done, outcome))
            self._send_home(home)

        self._answers += 1
        try:
            self._executor.submit(call, on_done=tell, lane=True, keep_place=True)
        except MidstreamError as err:
            tell(None, err)
        if self._executor.has_place and not self._in_place:
            self._in_place = True
            self._look_on(self._answers, 0)

    def _look_on(self, answers: int, quiet_turns: int) -> None:
        """In the lane, turn by turn while it has a worker's place: it reads what is here already, then works on it."""
        quiet_turns = quiet_turns + 1 if self._answers == answers else 0
        self._in_place = quiet_turns < QUIET_TURNS
        if not self._in_place:
            self._in_place, quiet_turns = self._executor.go_on(), 0
        if self._in_place:
            assert self._loop is not None
            self._loop.call_soon(self._look_on, self._answers, quiet_turns)

    def _endpoint(self) -> FramesEndpoint:
        if self._frames is None or self._thread is None or not self._thread.is_alive():
            raise LinkClosed(f"the lane to {self._name} is not open", next_step="another arm answers meanwhile")
        return self._frames

    def _begun(self, asking: Coroutine[Any, Any, TensorAnswer]) -> Future[TensorAnswer]:
        loop = self._loop
        assert loop is not None
        try:
            return asyncio.run_coroutine_threadsafe(asking, loop)
        except RuntimeError as err:
            asking.close()
            raise LinkClosed(f"the lane to {self._name} has ended") from err

    async def _in_lane(self, asking: Coroutine[Any, Any, TensorAnswer]) -> TensorAnswer:
        running = self._begun(asking)
        try:
            return await asyncio.wrap_future(running)
        except asyncio.CancelledError:
            if running.cancelled() and not _being_cancelled():
                raise LinkClosed(f"the lane to {self._name} has ended") from None
            raise

    def _unless_answered(
        self, asked: Future[TensorAnswer], home: asyncio.AbstractEventLoop, done: asyncio.Future[Worked[T]]
    ) -> None:
        """In the thread in which the asking ended: nobody works on an answer that never came, so it is told here."""
        error = LinkClosed(f"the lane to {self._name} has ended") if asked.cancelled() else asked.exception()
        if error is not None:
            self._outbox.append(partial(_settle, done, error))
            self._send_home(home)

    def _work(self, ready: Future[None]) -> None:
        stand_back(self._niceness)
        try:
            asyncio.run(self._main(ready))
        except Exception as err:
            if ready.done():
                log.exception("the lane to %s ended by a bug", self._name)
            else:
                ready.set_exception(err)
        finally:
            self._in_place = False
            self._executor.leave()  # what came in until the very end may have taken one

    async def _main(self, ready: Future[None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        self._frames = FramesEndpoint(self._name, self._open, sink=self._to_home, clock=self._clock)
        ready.set_result(None)
        try:
            if not self._closed:  # closed before there was anything to tell it by
                await self._stop.wait()
        finally:
            await self._frames.close()
            if self._link is not None:
                await self._link.close()

    async def _open(self, path: str) -> FrameStream:
        """A stream over a link of its own: the one before may lead to where the server is no more."""
        old, self._link = self._link, self._open_link()
        if old is not None:
            await old.close()
        return await self._link.open(path)

    def _to_home(self, sample: TransferSample) -> None:
        """In the lane: it goes with the next result, or when the loop has its next turn."""
        assert self._loop is not None and self._home is not None
        self._outbox.append(partial(self._sink, sample))
        self._loop.call_soon(self._send_home, self._home)

    def _send_home(self, home: asyncio.AbstractEventLoop) -> None:
        """From any thread. Each call wakes the house's loop, which takes the interpreter from whoever works."""
        if self._outbox:
            try:
                home.call_soon_threadsafe(self._at_home, home)
            except RuntimeError:  # the house's loop was closed; nobody listens any more
                self._outbox.clear()

    def _at_home(self, home: asyncio.AbstractEventLoop) -> None:
        while self._outbox:
            home.call_soon(self._outbox.popleft())


def _settle(done: asyncio.Future[Any], outcome: Any) -> None:
    if done.done():
        return
    if isinstance(outcome, Worked):
        done.set_result(outcome)
    elif isinstance(outcome, Exception) and not isinstance(outcome, StopIteration):
        done.set_exception(outcome)
    else:
        done.set_exception(RuntimeError(f"the work raised {outcome!r}"))


def _being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0

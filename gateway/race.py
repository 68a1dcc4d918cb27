"""Runs a plan of starts: the first target to speak wins, the others are cancelled and closed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from typing import Any

from attrs import define, field

from engines.port import Continuation
from gateway.targets import Target
from protocol.errors import Full, MidstreamError, RejectedError
from protocol.text import Token

CLOSING_S = 10.0
"""An engine gets this long to give a slot back (a prefill batch on a slow device takes seconds)."""

Begin = Callable[[Target], Awaitable["Live"]]
"""Prepares a target and waits for its first token; closes what it opened when it fails or is cancelled."""


@define
class Live:
    """A generation that has spoken. `first` is its first token, not yet taken from here."""

    target: Target
    continuation: Continuation
    tokens: AsyncIterator[Token]
    first: Token | None
    ttft_s: float
    closed: bool = False

    async def close(self) -> None:
        """Cancel the generation; idempotent. The engine frees its slot before this returns."""
        if self.closed:
            return
        self.closed = True
        try:
            await self.continuation.close()
        finally:
            aclose = getattr(self.tokens, "aclose", None)
            if aclose is not None:
                await aclose()


@define
class Cleanup:
    """Endings that nobody waits for now, and everybody before the request is over."""

    _tasks: set[asyncio.Task[None]] = field(factory=set)

    def add(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` beside the stream; its MidstreamErrors mean that the peer was gone already."""
        task = asyncio.create_task(_quietly(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def drain(self) -> None:
        """Return when all of them have ended; one that hangs is cancelled after CLOSING_S."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CLOSING_S)
        while self._tasks:
            for task in self._tasks:
                task.cancel()
            await asyncio.wait(self._tasks)


async def _quietly(work: Coroutine[Any, Any, None]) -> None:
    try:
        await work
    except MidstreamError:
        return


class AllFailed(Exception):
    """No start of the plan spoke; `errors` holds (target name, error) in the order of failure."""

    def __init__(self, errors: Sequence[tuple[str, MidstreamError]]) -> None:
        super().__init__("; ".join(f"{name}: {err}" for name, err in errors))
        self.errors = tuple(errors)


async def race(
    starts: Sequence[tuple[Target, float]],
    begin: Begin,
    cleanup: Cleanup,
    on_failure: Callable[[Target, MidstreamError], None],
    on_loser: Callable[[Target, float], None] = lambda target, silent_s: None,
) -> Live:
    """Start each target after its seconds, or at once when nothing else runs any more; return the first to speak.

    Raises AllFailed when all did. Losers are cancelled at once and closed through `cleanup`; `on_loser` hears of each
    and how long it had been silent.
    """
    loop = asyncio.get_running_loop()
    begun_s = loop.time()
    waiting = list(starts)
    running: dict[asyncio.Task[Live], Target] = {}
    started_s: dict[str, float] = {}
    errors: list[tuple[str, MidstreamError]] = []
    try:
        while waiting or running:
            for target in _launch_due(waiting, running, begin, loop.time() - begun_s):
                started_s[target.name] = loop.time()
            timeout_s = max(0.0, begun_s + waiting[0][1] - loop.time()) if waiting else None
            await asyncio.wait(running, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            for task in [task for task in running if task.done()]:
                error = task.exception()
                if error is None:
                    running.pop(task)
                    for loser in running.values():
                        on_loser(loser, loop.time() - started_s[loser.name])
                    return task.result()
                if not isinstance(error, MidstreamError):
                    raise error
                target = running.pop(task)
                errors.append((target.name, error))
                on_failure(target, error)
    finally:
        for task in running:
            task.cancel()
            cleanup.add(_end(task))
    raise AllFailed(errors)


def _launch_due(
    waiting: list[tuple[Target, float]], running: dict[asyncio.Task[Live], Target], begin: Begin, elapsed_s: float
) -> list[Target]:
    launched = []
    while waiting and (waiting[0][1] <= elapsed_s or not running):
        target, _ = waiting.pop(0)
        running[asyncio.create_task(_as_task(begin, target))] = target
        launched.append(target)
    return launched


async def _as_task(begin: Begin, target: Target) -> Live:
    return await begin(target)


async def _end(task: asyncio.Task[Live]) -> None:
    """Wait for a cancelled loser; one that spoke in the same moment is closed here."""
    await asyncio.wait({task})
    if not task.cancelled() and task.exception() is None:
        await task.result().close()


def most_telling(failed: AllFailed) -> MidstreamError:
    """What the client should hear when no target answered: what is wrong with the request first, then a full house."""
    errors = [err for _, err in failed.errors]
    full = [err for err in errors if isinstance(err, Full)]
    for err in errors:
        if isinstance(err, RejectedError) and not isinstance(err, Full):
            return err
    return min(full, key=lambda err: err.retry_after_s) if full else errors[0]

"""Heads on a device, and tails for late links: loaded and warmed before they are used, set aside while they fail.

A head may be used once it is in memory and has run once there, and once the far end was asked to load its tail; no
request waits for any of it. Memory is the pool's: the least recently used head goes first, and one that went is loaded
again before it is used again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Protocol

from attrs import define

from protocol.clock import Clock
from protocol.errors import MidstreamError, NotFound

FIRST_PAUSE_S = 5.0
LONGEST_PAUSE_S = 300.0
"""A head that fails is tried again after a pause that doubles."""

NOT_HERE_S = 1.0
"""A head whose file is still being fetched is asked for again after this."""

_log = logging.getLogger("midstream.split")


async def _nothing() -> None:
    """There is nothing else to do."""


class Residents(Protocol):
    """The part of engines.local.LocalEndpoint that is used here."""

    def loaded(self, name: str) -> bool: ...

    async def preload(
        self, name: str, *, keep: bool = False, warm: bool = False, spare: bool = False
    ) -> float | None: ...


@define
class _Head:
    """failures: in a row, since it last ran well. until_s: set aside until then. ready: loaded, its tail asked for."""

    failures: int = 0
    until_s: float = float("-inf")
    loading: bool = False
    ready: bool = False


class Heads:
    """Of all models of a device. For the event loop's thread.

    Args:
        spawn: runs a coroutine in the background until it ends or the way is stopped.
        warmed: told the name of a head and the seconds of its warm run.
    """

    def __init__(
        self,
        local: Residents,
        clock: Clock,
        spawn: Callable[[Coroutine[Any, Any, None], str], None],
        warmed: Callable[[str, float], None],
    ) -> None:
        self._local = local
        self._clock = clock
        self._spawn = spawn
        self._warmed = warmed
        self._heads: dict[str, _Head] = {}
        self._one_load = asyncio.Lock()

    def ready(self, name: str) -> bool:
        """Whether a request may take this head now."""
        head = self._heads.get(name)
        return head is not None and head.ready and head.until_s <= self._clock() and self._local.loaded(name)

    def want(self, name: str, load_tail: Callable[[], Awaitable[None]]) -> None:
        """Load and warm in the background, unless that is under way, failed a moment ago or is done."""
        self._want(name, after=load_tail)

    def want_rest(self, name: str, fetch: Callable[[], Awaitable[None]]) -> None:
        """The same for a tail that is to run here when its link is late: `fetch` brings the file, and it only takes
        memory that is free. A head that needs the room later puts it out first, since it runs least.
        """
        self._want(name, before=fetch, spare=True)

    def forget(self, name: str) -> None:
        """Its model was removed, or has another bundle."""
        self._heads.pop(name, None)

    def ran(self, name: str, err: MidstreamError | None) -> None:
        """A request ran this head: well, or with this error."""
        head = self._heads.setdefault(name, _Head())
        if err is not None:
            self._failed(name, head, err)
        elif head.failures:
            head.failures = 0
            _log.info("%s works again", name)

    async def keep(self, name: str) -> None:
        """Load a whole model and keep it: the fallback waits for no load. A failure is only said."""
        try:
            async with self._one_load:
                await self._local.preload(name, keep=True)
        except MidstreamError as err:
            _log.info("%s is not loaded ahead: %s", name, err)

    def _want(
        self,
        name: str,
        *,
        before: Callable[[], Awaitable[None]] = _nothing,
        after: Callable[[], Awaitable[None]] = _nothing,
        spare: bool = False,
    ) -> None:
        head = self._heads.setdefault(name, _Head())
        if head.loading or head.until_s > self._clock() or self.ready(name):
            return
        head.loading = True
        self._spawn(self._load(name, head, before, after, spare), f"load {name}")

    async def _load(
        self,
        name: str,
        head: _Head,
        before: Callable[[], Awaitable[None]],
        after: Callable[[], Awaitable[None]],
        spare: bool,
    ) -> None:
        try:
            await before()
            async with self._one_load:  # requests that need another model find the loader free
                seconds = await self._local.preload(name, warm=True, spare=spare)
            await after()
            head.ready = True
            if seconds is not None:
                self._warmed(name, seconds)
        except NotFound:  # its file is still on the way
            head.until_s = self._clock() + NOT_HERE_S
        except MidstreamError as err:
            self._failed(name, head, err)
        finally:
            head.loading = False

    def _failed(self, name: str, head: _Head, err: MidstreamError) -> None:
        """Set aside; said once until it has run well."""
        pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0**head.failures)
        head.failures += 1
        head.until_s = self._clock() + pause_s
        say: Callable[..., None] = _log.info if head.failures == 1 else _log.debug
        say("%s is left out for %.0f s, other arms answer: %s", name, pause_s, err)

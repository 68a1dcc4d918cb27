"""Identical requests in flight share one: the first one flies, the others wait for what it brings.

The flight goes on as long as somebody waits for it, whoever left meanwhile, and is cancelled with the last one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

from attrs import define, field

T = TypeVar("T")

MAX_FLIGHTS = 4096
"""More at once fly alone."""


@define
class _Flight(Generic[T]):
    task: asyncio.Task[T]
    waiting: int = 0


@define
class Flights(Generic[T]):
    """Results by key while they are being made; nothing is kept afterwards."""

    _under_way: dict[Hashable, _Flight[T]] = field(factory=dict)

    async def share(self, key: Hashable, make: Callable[[], Awaitable[T]]) -> tuple[T, bool]:
        """What `make` gives, and whether somebody else's flight brought it. Its error goes to all who wait."""
        flight = self._under_way.get(key)
        shared = flight is not None
        if flight is None:
            flight = _Flight(asyncio.ensure_future(_made(make)))
            if len(self._under_way) < MAX_FLIGHTS:
                self._under_way[key] = flight
        flight.waiting += 1
        try:
            return await asyncio.shield(flight.task), shared
        finally:
            flight.waiting -= 1
            if not flight.waiting:
                if self._under_way.get(key) is flight:
                    del self._under_way[key]
                if not flight.task.done():
                    flight.task.cancel()
                    await asyncio.wait({flight.task})


async def _made(make: Callable[[], Awaitable[T]]) -> T:
    return await make()

"""Who begins when much comes at once: one request after the other, and what is under way moves on in between.

A loop that begins all requests of a burst in one turn has the first word of each wait for the last of them. Begun one
by one, and each only after what has come meanwhile from those who were asked, half of them speak before the other half
has begun.
"""

from __future__ import annotations

import asyncio
from collections import deque

MOST_GIVEN_WAY = 3
"""Turns of the loop that a begin gives way to what has come, at the most: under a constant stream of parts it is begun
all the same."""


class Arrivals:
    """Counts what has come for requests that are under way from servers of plain HTTP, as most streams do
    (links/http_wire.py says so here). To what comes by other ways a begin gives one turn, as to all else."""

    count = 0


class Turns:
    """`mine` returns at once for a request that comes alone; of many, one goes every other turn of the loop: in between
    leaves what the first one asks of somebody else."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[int]] = deque()
        self._taken = False
        """Somebody has begun in this turn of the loop, or is about to."""

    async def mine(self) -> None:
        """Wait for a turn, in the order of asking."""
        loop = asyncio.get_running_loop()
        if self._taken:
            turn = loop.create_future()
            self._waiting.append(turn)
            try:
                await self._given_way(await turn)
            except BaseException:
                if turn.done() and not turn.cancelled():
                    self._next()  # it was this one's turn
                else:
                    turn.cancel()  # who left without being cancelled is given no turn either
                raise
        self._taken = True
        loop.call_soon(self._next)

    async def _given_way(self, seen: int) -> None:
        """What has come since the turn was given goes first."""
        for _ in range(MOST_GIVEN_WAY):
            if seen == Arrivals.count:
                return
            seen = Arrivals.count
            await asyncio.sleep(0)

    def _next(self) -> None:
        """Give the turn to the next one."""
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():  # else whoever waited was cancelled
                turn.set_result(Arrivals.count)
                return
        self._taken = False

"""Who begins when much comes at once: one request after the other, and what is under way moves on in between.

A loop that begins all requests of a burst in one turn has the first word of each wait for the last of them. Begun one
by one, with a turn in between for what the sockets brought, half of them speak before the other half has begun.
"""

from __future__ import annotations

import asyncio
from collections import deque

TURNS_EACH = 1
"""Of the event loop, from one begin until the next one is woken, which takes a turn more: in between leaves what the
first one asks of somebody else."""


class Turns:
    """`mine` returns at once for a request that comes alone; of many, one goes every TURNS_EACH turns of the loop."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._left = 0
        """Turns of the loop until the next one may begin."""

    async def mine(self) -> None:
        """Wait for a turn, in the order of asking."""
        loop = asyncio.get_running_loop()
        if self._left:
            turn = loop.create_future()
            self._waiting.append(turn)
            await turn
            return
        self._left = TURNS_EACH
        loop.call_soon(self._over, loop)

    def _over(self, loop: asyncio.AbstractEventLoop) -> None:
        """One turn of the loop is over."""
        self._left -= 1
        while not self._left and self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():  # else whoever waited was cancelled
                turn.set_result(None)
                self._left = TURNS_EACH
        if self._left:
            loop.call_soon(self._over, loop)

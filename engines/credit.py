"""How far a generation may run ahead of its consumer: one counter that acknowledgements move forward."""

from __future__ import annotations

import asyncio

from protocol.errors import BadRequest


class Credit:
    """Lets token `index` go while it is at most `ahead_tokens` past the last acknowledged one.

    The counter starts as if `at - 1` were acknowledged, so `ahead_tokens` tokens flow before the first acknowledgement.
    Used on one event loop.
    """

    def __init__(self, at: int, ahead_tokens: int) -> None:
        self._acknowledged = at - 1
        self._ahead_tokens = max(1, ahead_tokens)
        self._moved = asyncio.Event()
        self._closed = False

    @property
    def acknowledged(self) -> int:
        """Index of the last acknowledged token."""
        return self._acknowledged

    def acknowledge(self, index: int) -> None:
        """Move forward to `index`; an older index changes nothing."""
        if index > self._acknowledged:
            self._acknowledged = index
            self._moved.set()

    def close(self) -> None:
        """Let every waiter go; used when the generation is cancelled."""
        self._closed = True
        self._moved.set()

    def allows(self, index: int) -> bool:
        """Whether token `index` may be made now."""
        return self._closed or index - self._acknowledged <= self._ahead_tokens

    async def wait(self, index: int) -> None:
        """Return when token `index` may be made or the credit was closed."""
        while not self.allows(index):
            self._moved.clear()
            await self._moved.wait()


def credit_from(begun: Credit | None, at: int, prefix_tokens: int, ahead_tokens: int) -> Credit:
    """The credit of a generation that starts now behind `prefix_tokens` tokens. begun: the one it has already.

    Raises RuntimeError for a second start, BadRequest for a start anywhere else than behind the prefix.
    """
    if begun is not None:
        raise RuntimeError("start() is called once")
    if at != prefix_tokens:
        raise BadRequest(f"start at {at}, but the prefix has {prefix_tokens} tokens", field="at")
    return Credit(at, ahead_tokens)

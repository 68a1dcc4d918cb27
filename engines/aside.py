"""Work that would hold up the event loop is done in a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def aside(work: Callable[[], T], large: bool) -> T:
    """Large work in a thread, small work at once: a change of threads costs more than it."""
    return await asyncio.to_thread(work) if large else work()

"""Which event loop a house runs on: asyncio's own, or uvloop where it is installed and asked for (extra `fast`)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Literal, TypeVar

from protocol.errors import ConfigError

T = TypeVar("T")

LoopKind = Literal["asyncio", "uvloop"]


def run_on(kind: LoopKind, main: Coroutine[Any, Any, T]) -> T:
    """asyncio.run on that loop. Raises ConfigError where uvloop is not installed."""
    factory: Callable[[], asyncio.AbstractEventLoop] | None = None
    if kind == "uvloop":
        try:
            import uvloop
        except ImportError as err:
            main.close()
            raise ConfigError(
                "event_loop is uvloop, which is not installed",
                next_step="install midstream[fast], or leave event_loop out",
                field="event_loop",
            ) from err
        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(main)

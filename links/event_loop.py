"""Which event loop a house runs on: asyncio's own, or uvloop (extra `fast`); and when its garbage is looked for."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Coroutine
from typing import Any, Literal, TypeVar

from protocol.errors import ConfigError
from protocol.extras import install_step

T = TypeVar("T")

LoopKind = Literal["auto", "asyncio", "uvloop"]
"""auto: uvloop where it is installed."""

YOUNG_OBJECTS = 25_000
"""A request makes some hundred objects that end with it. To look for cycles after each 700 comes in the middle of every
request, and finds none; after 5,000 it comes once in a burst of sixteen streams, all of which wait for it."""


def run_on(kind: LoopKind, main: Coroutine[Any, Any, T]) -> T:
    """asyncio.run on that loop. Raises ConfigError where uvloop is asked for by name and not installed."""
    factory = None if kind == "asyncio" else _uvloop()
    if factory is None and kind == "uvloop":
        main.close()
        raise ConfigError(
            "event_loop is uvloop, which is not installed",
            next_step=f"{install_step('fast')}, or leave event_loop out",
            field="event_loop",
        )
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(main)


def settle() -> None:
    """After the start: what is there now is never looked at again for garbage, and young objects less often."""
    gc.collect()
    gc.freeze()
    _, middle, old = gc.get_threshold()
    gc.set_threshold(YOUNG_OBJECTS, middle, old)


def _uvloop() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory

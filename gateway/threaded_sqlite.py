"""A SQLite file that is opened with its first use and touched by one thread of its own."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from protocol.clock import WallTime
from protocol.durable import open_sqlite, sqlite_error

T = TypeVar("T")


def stamp(now: WallTime) -> float:
    """The time to keep beside a row; 0 from a clock that was not set yet, for those are set right by `sweepable`."""
    return now.unix_s if now.trusted else 0.0


def sweepable(db: sqlite3.Connection, now: WallTime, *columns: tuple[str, str]) -> bool:
    """Whether rows may be judged by their age now. Rows of a time before the clock was set begin to age here, or a
    device without a battery clock would forget everything when the network tells it the time. columns: (table, name).
    """
    if not now.trusted:
        return False
    for table, column in columns:
        db.execute(f"UPDATE {table} SET {column} = ? WHERE {column} = 0", (now.unix_s,))
    return True


class ThreadedSqlite:
    """Stores derive from it: their methods call `_do`, what they give to it uses `_db`.

    All of them raise ConfigError when the file cannot be used.
    """

    def __init__(self, file: Path, migrations: Sequence[str], thread: str) -> None:
        self._file = file
        self._migrations = migrations
        self._opened: sqlite3.Connection | None = None
        self._closed = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=thread)

    async def close(self) -> None:
        """Idempotent."""
        if self._closed:
            return
        self._closed = True
        await self._do(self._shut)
        self._thread.shutdown()

    async def _do(self, work: Callable[..., T], *arguments: Any) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)
        except sqlite3.Error as err:
            raise sqlite_error(err, self._file) from err

    @property
    def _db(self) -> sqlite3.Connection:
        """For the own thread only."""
        if self._opened is None:
            self._opened = open_sqlite(self._file, self._migrations)
        return self._opened

    def _shut(self) -> None:
        if self._opened is not None:
            self._opened.close()

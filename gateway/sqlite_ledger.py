"""The ledger on SQLite: for one gateway, or several processes of one machine.

Budgets of money are in a file whose commits are synced before a block is handed out. Windows of seconds and places are
in a second file that is never synced: a power cut may forget the last minute, and no request waits for the disk. What
requests wait for there is done without a thread, unless another process holds the file.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from gateway.ledger import DURABLE, KEPT_SLOTS, Bill, Change, Dimension, Draw, Drawn, LedgerError, counts, grant
from protocol.clock import WallClock
from protocol.durable import open_sqlite, written

T = TypeVar("T")

BILL_DAYS = 400
"""Bills are kept so long: the year before can be looked up."""

_COUNTS = """
CREATE TABLE count (
    account TEXT NOT NULL, dimension TEXT NOT NULL, slot INTEGER NOT NULL, units INTEGER NOT NULL,
    PRIMARY KEY (account, dimension, slot)
) WITHOUT ROWID;
"""
BUDGETS = (
    _COUNTS
    + """
CREATE TABLE bill (
    tenant TEXT NOT NULL, day INTEGER NOT NULL, requests INTEGER NOT NULL, prompt_tokens INTEGER NOT NULL,
    completion_tokens INTEGER NOT NULL, nano_usd INTEGER NOT NULL,
    PRIMARY KEY (tenant, day)
) WITHOUT ROWID;
""",
)
WINDOWS = (
    _COUNTS
    + """
CREATE TABLE lease (
    account TEXT NOT NULL, holder TEXT NOT NULL, places INTEGER NOT NULL, until_s REAL NOT NULL, pid INTEGER NOT NULL,
    PRIMARY KEY (account, holder)
) WITHOUT ROWID;
""",
)


class SqliteLedger:
    """`folder` gets budgets.sqlite and windows.sqlite. Calls wait for the disk in threads, one at a time per file."""

    def __init__(self, folder: Path, wall: WallClock) -> None:
        self._wall = wall
        self._pruned_on = 0
        self._budgets = _File(folder / "budgets.sqlite", BUDGETS, synced=True)
        try:
            self._windows = _File(folder / "windows.sqlite", WINDOWS, synced=False)
        except BaseException:
            self._budgets.close()
            raise

    async def draw(self, draws: Sequence[Draw]) -> Sequence[Drawn]:
        drawn: dict[int, Drawn] = {}
        for file in (self._windows, self._budgets):
            mine = [at for at, draw in enumerate(draws) if self._of(draw.dimension) is file]
            if mine:
                found = await file.soon(lambda db, mine=mine: [_draw(db, draws[at]) for at in mine])  # type: ignore[misc]
                drawn.update(zip(mine, found, strict=True))
        return [drawn[at] for at in range(len(draws))]

    def draw_now(self, draws: Sequence[Draw]) -> Sequence[Drawn] | None:
        if any(draw.dimension in DURABLE for draw in draws):
            return None
        return self._windows.now(lambda db: [_draw(db, draw) for draw in draws])

    async def change(self, changes: Sequence[Change]) -> None:
        for file in (self._windows, self._budgets):
            mine = [change for change in changes if self._of(change.dimension) is file]
            if mine:
                await file.run(lambda db, mine=mine: _change(db, mine))  # type: ignore[misc]

    async def lease(self, account: str, holder: str, cap: int, wanted: int, ttl_s: float) -> int:
        now_s = self._wall().unix_s
        return await self._windows.soon(lambda db: _lease(db, account, holder, cap, wanted, now_s, ttl_s))

    async def taken(self, account: str, dimension: Dimension, slot: int) -> int:
        def ask(db: sqlite3.Connection) -> int:
            row = db.execute(
                "SELECT units FROM count WHERE account = ? AND dimension = ? AND slot = ?", (account, dimension, slot)
            ).fetchone()
            return int(row[0]) if row else 0

        return await self._of(dimension).run(ask)

    async def bill(self, bills: Sequence[Bill]) -> None:
        rows = [(b.tenant, b.day, b.requests, b.prompt_tokens, b.completion_tokens, b.nano_usd) for b in bills]

        newest = max((bill.day for bill in bills), default=0)

        def add(db: sqlite3.Connection) -> None:
            db.executemany(_ADD_BILL, rows)
            if newest > self._pruned_on:  # once a day
                db.execute("DELETE FROM bill WHERE day < ?", (newest - BILL_DAYS,))
                self._pruned_on = newest

        await self._budgets.run(add)

    async def bills(self, tenant: str, first_day: int, last_day: int) -> Sequence[Bill]:
        def ask(db: sqlite3.Connection) -> list[Bill]:
            rows = db.execute(
                "SELECT tenant, day, requests, prompt_tokens, completion_tokens, nano_usd FROM bill"
                " WHERE tenant = ? AND day BETWEEN ? AND ? ORDER BY day",
                (tenant, first_day, last_day),
            )
            return [Bill(*row) for row in rows]

        return await self._budgets.run(ask)

    async def close(self) -> None:
        await asyncio.to_thread(self._windows.close)
        await asyncio.to_thread(self._budgets.close)

    def _of(self, dimension: str) -> _File:
        return self._budgets if dimension in DURABLE else self._windows


class _File:
    """One database. Each call is one transaction that takes the write lock at its start. All raise LedgerError."""

    def __init__(self, path: Path, migrations: Sequence[str], *, synced: bool) -> None:
        self._path = path
        self._db = open_sqlite(path, migrations)
        self._db.execute(f"PRAGMA synchronous={'FULL' if synced else 'OFF'}")
        self._hasty = None if synced else _hasty(path)
        self._one_at_a_time = threading.Lock()

    async def run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """In a thread."""
        return await asyncio.to_thread(self._run, work)

    async def soon(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Here, if that needs no waiting: 40 microseconds, where the way to a thread and back takes 300, and all of a
        burst waits for it."""
        found = self.now(work)
        return found if found is not None else await self.run(work)

    def now(self, work: Callable[[sqlite3.Connection], T]) -> T | None:
        """Here and at once; None, and nothing is done, where that would be a wait."""
        if self._hasty is not None and self._one_at_a_time.acquire(blocking=False):
            try:
                with written(self._hasty):
                    return work(self._hasty)
            except sqlite3.Error as err:
                if not _is_busy(err):
                    raise self._unusable(err) from err
            finally:
                self._one_at_a_time.release()
        return None

    def _run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        with self._one_at_a_time:
            try:
                with written(self._db):
                    return work(self._db)
            except sqlite3.Error as err:
                raise self._unusable(err) from err

    def _unusable(self, err: sqlite3.Error) -> LedgerError:
        return LedgerError(
            f"the ledger {self._path.name} cannot be used: {err}", next_step="check disk space and the file"
        )

    def close(self) -> None:
        with self._one_at_a_time:
            if self._hasty is not None:
                self._hasty.close()
            self._db.close()


def _hasty(path: Path) -> sqlite3.Connection:
    """A second connection, that waits neither for other processes nor for the disk: checkpoints are the first one's."""
    db = sqlite3.connect(path, timeout=0.0, isolation_level=None, check_same_thread=False)
    db.execute("PRAGMA synchronous=OFF")
    db.execute("PRAGMA wal_autocheckpoint=0")
    return db


def _is_busy(err: sqlite3.Error) -> bool:
    return getattr(err, "sqlite_errorcode", 0) & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


def _draw(db: sqlite3.Connection, draw: Draw) -> Drawn:
    key = draw.account, draw.dimension
    gone = draw.slot - draw.span - KEPT_SLOTS[draw.dimension]
    db.execute("DELETE FROM count WHERE account = ? AND dimension = ? AND slot <= ?", (*key, gone))
    rows = db.execute("SELECT slot, units FROM count WHERE account = ? AND dimension = ?", key)
    room = draw.cap - sum(units for slot, units in rows if counts(slot, draw.slot, draw.span))
    granted = grant(room, draw.wanted, draw.least)
    if granted:
        db.execute(_ADD_COUNT, (*key, draw.slot, granted))
    return Drawn(granted, max(0, room - granted))


def _change(db: sqlite3.Connection, changes: Sequence[Change]) -> None:
    for change in changes:
        if change.units > 0:
            db.execute(_ADD_COUNT, (change.account, change.dimension, change.slot, change.units))
        else:
            db.execute(
                "UPDATE count SET units = max(0, units + ?) WHERE account = ? AND dimension = ? AND slot = ?",
                (change.units, change.account, change.dimension, change.slot),
            )


def _lease(db: sqlite3.Connection, account: str, holder: str, cap: int, wanted: int, now_s: float, ttl_s: float) -> int:
    db.execute(
        "DELETE FROM lease WHERE account = ? AND (until_s <= ? OR until_s > ? OR holder = ?)",
        (account, now_s, now_s + 10 * ttl_s, holder),  # far ahead: written before the clock was set back
    )
    others = db.execute("SELECT holder, places, pid FROM lease WHERE account = ?", (account,)).fetchall()
    dead = [name for name, _, pid in others if not _runs(pid)]
    db.executemany("DELETE FROM lease WHERE account = ? AND holder = ?", [(account, name) for name in dead])
    held: int = max(0, min(wanted, cap - sum(int(places) for name, places, _ in others if name not in dead)))
    if held:
        db.execute("INSERT INTO lease VALUES (?, ?, ?, ?, ?)", (account, holder, held, now_s + ttl_s, os.getpid()))
    return held


def _runs(pid: int) -> bool:
    """Whether a process of this machine is there: what a dead one held is free at once, not when its lease ends."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


_ADD_COUNT = (
    "INSERT INTO count VALUES (?, ?, ?, ?)"
    " ON CONFLICT (account, dimension, slot) DO UPDATE SET units = units + excluded.units"
)
_ADD_BILL = (
    "INSERT INTO bill VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT (tenant, day) DO UPDATE SET"
    " requests = requests + excluded.requests, prompt_tokens = prompt_tokens + excluded.prompt_tokens,"
    " completion_tokens = completion_tokens + excluded.completion_tokens, nano_usd = nano_usd + excluded.nano_usd"
)

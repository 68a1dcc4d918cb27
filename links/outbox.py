"""A bounded, expiring queue of messages to publish; what it has kept on disk survives the death of the process.

A message that the broker acknowledges at once never touches the disk: only `keep` writes. Not thread-safe; the database
belongs to the worker, one thread that keeps the order of the writes, so that an event loop never waits for the disk.
"""

from __future__ import annotations

import contextlib
import logging
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from pathlib import Path

from attrs import define, field, frozen

from protocol.clock import Clock, WallClock, wall_now
from protocol.durable import open_sqlite
from protocol.errors import ConfigError, Full, TooLarge

log = logging.getLogger("midstream.links.outbox")

_MIGRATIONS = (
    """
    CREATE TABLE message (
        number INTEGER PRIMARY KEY,
        topic TEXT NOT NULL,
        payload BLOB NOT NULL,
        retain INTEGER NOT NULL,
        expires_in_s REAL,
        stored_unix_s REAL NOT NULL,
        clock_trusted INTEGER NOT NULL
    );
    """,
)


@frozen
class Queued:
    """A message that waits for its acknowledgement; `expires_at_s` is monotonic."""

    number: int
    topic: str
    payload: bytes = field(repr=False)
    retain: bool
    expires_at_s: float | None

    @property
    def size_bytes(self) -> int:
        return len(self.topic) + len(self.payload)


@define
class _Slot:
    message: Queued
    on_disk: bool


class Outbox:
    """Messages in order of their number.

    Args:
        path: database file, made when something is first kept; None keeps everything in memory.
        worker: runs the writes, one at a time in order; None writes at once.
        max_count, max_bytes: what fits. When it is full, the oldest messages that may expire make room; when there are
            none, `add` raises Full.
    """

    def __init__(
        self,
        path: Path | None = None,
        *,
        max_count: int = 1000,
        max_bytes: int = 4 << 20,
        clock: Clock = time.monotonic,
        wall: WallClock = wall_now,
        worker: Executor | None = None,
    ) -> None:
        self._path = path
        self._max_count = max_count
        self._max_bytes = max_bytes
        self._clock = clock
        self._wall = wall
        self._worker = worker
        self._closed = False
        self._slots: dict[int, _Slot] = {}
        self._bytes = 0
        self._next = 1
        self._database: sqlite3.Connection | None = None
        self.dropped = 0
        """Messages that made room for newer ones or expired, since the start."""
        self._asked = 0
        self.written = 0
        """Writes that the worker has done, whatever came of them."""
        if path is not None and path.exists():
            self._load()

    @property
    def writing(self) -> bool:
        """Whether the worker has something to do."""
        return self._asked != self.written

    def __len__(self) -> int:
        return len(self._slots)

    def add(self, topic: str, payload: bytes, retain: bool, expires_in_s: float | None) -> Queued:
        """Queue a message in memory. A retained one takes the place of an older retained one of its topic.

        Raises TooLarge or Full.
        """
        expires_at_s = None if expires_in_s is None else self._clock() + expires_in_s
        message = Queued(self._next, topic, payload, retain, expires_at_s)
        if message.size_bytes > self._max_bytes:
            raise TooLarge(f"a message of {message.size_bytes} bytes does not fit into the outbox")
        if retain:
            for slot in [s for s in self._slots.values() if s.message.retain and s.message.topic == topic]:
                self.done(slot.message.number)
        self._make_room(message.size_bytes)
        self._insert(message, on_disk=False)
        return message

    def keep(self, number: int) -> Future[None] | None:
        """Write a queued message to disk; the future ends when it is there, None: nothing is left to wait for.

        A disk that cannot take it leaves the message in memory, with a warning.
        """
        slot = self._slots.get(number)
        if slot is None or slot.on_disk or self._path is None or self._closed:
            return None
        message, now = slot.message, self._wall()
        left_s = None if message.expires_at_s is None else message.expires_at_s - self._clock()
        row = (number, message.topic, message.payload, message.retain, left_s, now.unix_s, now.trusted)
        slot.on_disk = True

        def write() -> None:
            try:
                self._open().execute("INSERT INTO message VALUES (?, ?, ?, ?, ?, ?, ?)", row)
            except (sqlite3.Error, ConfigError) as err:
                slot.on_disk = False
                log.warning("message %d stays in memory only: %s", number, err)

        return self._submit(write)

    def done(self, number: int) -> None:
        """Forget a message: it was acknowledged, replaced or expired."""
        slot = self._slots.pop(number, None)
        if slot is None:
            return
        self._bytes -= slot.message.size_bytes
        if slot.on_disk and not self._closed:
            self._submit(lambda: self._delete(number))

    def pending(self) -> list[Queued]:
        """What waits, oldest first; expired messages are dropped."""
        now_s = self._clock()
        for slot in list(self._slots.values()):
            expires_at_s = slot.message.expires_at_s
            if expires_at_s is not None and expires_at_s <= now_s:
                self.dropped += 1
                self.done(slot.message.number)
        return [slot.message for slot in self._slots.values()]

    def close(self) -> None:
        """Keep everything that waits, then close the file; blocks until all is written. Nothing is kept after it."""
        for message in self.pending():
            self.keep(message.number)
        self._closed = True
        done = self._submit(self._close_database)
        if done is not None:
            done.result()

    def _submit(self, work: Callable[[], None]) -> Future[None] | None:
        if self._worker is not None:
            self._asked += 1
            return self._worker.submit(self._counted, work)
        work()
        return None

    def _counted(self, work: Callable[[], None]) -> None:
        try:
            work()
        finally:
            self.written += 1

    def _delete(self, number: int) -> None:
        if self._database is not None:
            with contextlib.suppress(sqlite3.Error):  # sent once more after a restart: delivery is at least once
                self._database.execute("DELETE FROM message WHERE number = ?", (number,))

    def _close_database(self) -> None:
        database, self._database = self._database, None
        if database is not None:
            database.close()

    def _insert(self, message: Queued, on_disk: bool) -> None:
        self._slots[message.number] = _Slot(message, on_disk)
        self._bytes += message.size_bytes
        self._next = max(self._next, message.number + 1)

    def _make_room(self, size_bytes: int) -> None:
        def fits() -> bool:
            return len(self._slots) < self._max_count and self._bytes + size_bytes <= self._max_bytes

        if fits():
            return
        for message in self.pending():
            if fits():
                return
            if message.expires_at_s is not None:
                self.dropped += 1
                self.done(message.number)
        if not fits():
            raise Full(
                f"the outbox is full: {len(self._slots)} messages, {self._bytes} bytes",
                retry_after_s=30.0,
                next_step="check the connection to the broker",
            )

    def _open(self) -> sqlite3.Connection:
        if self._database is None:
            assert self._path is not None
            self._database = open_sqlite(self._path, _MIGRATIONS)
        return self._database

    def _load(self) -> None:
        assert self._path is not None
        try:
            rows = self._open().execute("SELECT * FROM message ORDER BY number LIMIT ?", (self._max_count,)).fetchall()
        except (ConfigError, sqlite3.Error) as err:
            self._set_aside(err)
            return
        now_s, now = self._clock(), self._wall()
        for number, topic, payload, retain, left_s, stored_s, trusted in rows:
            # Without a trusted clock on both sides nobody knows how long we were away: then no time has passed.
            age_s = max(0.0, now.unix_s - stored_s) if trusted and now.trusted else 0.0
            expires_at_s = None if left_s is None else now_s + left_s - age_s
            self._insert(Queued(number, topic, bytes(payload), bool(retain), expires_at_s), on_disk=True)

    def _set_aside(self, err: Exception) -> None:
        """A damaged queue must not keep the device from connecting."""
        assert self._path is not None
        if self._database is not None:
            self._database.close()
            self._database = None
        broken = self._path.with_name(self._path.name + ".broken")
        log.warning("the outbox cannot be read (%s); it is kept as %s and a new one is begun", err, broken.name)
        with contextlib.suppress(OSError):
            self._path.replace(broken)
        for suffix in ("-wal", "-shm"):
            with contextlib.suppress(OSError):
                self._path.with_name(self._path.name + suffix).unlink()

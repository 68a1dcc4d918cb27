"""Results that apps sent over the control channel, kept once each, before they are acknowledged: a port and SQLite."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from attrs import frozen

from gateway.threaded_sqlite import ThreadedSqlite, stamp, sweepable
from protocol.clock import WallClock, WallTime, wall_now
from protocol.control_frames import Result
from protocol.durable import written

T = TypeVar("T")

_MIGRATIONS = (
    """
    CREATE TABLE sessions(
        number INTEGER PRIMARY KEY,
        tenant TEXT NOT NULL,
        id TEXT NOT NULL,
        received INTEGER NOT NULL,
        touched_unix_s REAL NOT NULL,
        UNIQUE(tenant, id)
    );
    CREATE INDEX sessions_touched ON sessions(touched_unix_s);
    CREATE TABLE results(
        session INTEGER NOT NULL REFERENCES sessions(number) ON DELETE CASCADE,
        seq INTEGER NOT NULL,
        of TEXT NOT NULL,
        kind TEXT NOT NULL,
        body TEXT NOT NULL,
        at_unix_s REAL NOT NULL,
        PRIMARY KEY(session, seq)
    ) WITHOUT ROWID;
    CREATE INDEX results_at ON results(at_unix_s);
    """,
)


MOST_RESULTS = 10_000
"""Of one session: what is kept, and what is read at once where nobody asks for less."""


@frozen
class ResultBounds:
    """results: of one session; sessions: of all tenants; age_s: of both. The oldest go first."""

    results: int = MOST_RESULTS
    sessions: int = 50_000
    age_s: float = 7 * 86_400.0


class ResultStore(Protocol):
    """Survives the gateway. Tenants never meet."""

    async def received(self, tenant: str, session: str) -> int:
        """Number of the last result that is kept; 0 for a session that is not known."""
        ...

    async def keep(self, tenant: str, session: str, results: Sequence[Result]) -> int:
        """Keep those that follow what is there without a gap; returns the last number that is kept now."""
        ...

    async def results(self, tenant: str, session: str, after: int = 0, most: int = MOST_RESULTS) -> Sequence[Result]:
        """In order, `most` of them."""
        ...

    async def close(self) -> None: ...


class SqliteResults(ThreadedSqlite):
    """One file, opened with its first use, in one thread of its own. Raises ConfigError when it cannot be used."""

    def __init__(self, file: Path, bounds: ResultBounds | None = None, wall: WallClock = wall_now) -> None:
        super().__init__(file, _MIGRATIONS, "midstream-results")
        self._bounds = bounds or ResultBounds()
        self._wall = wall
        self._kept = 0

    async def received(self, tenant: str, session: str) -> int:
        """See ResultStore."""
        return await self._do(self._received, tenant, session)

    async def keep(self, tenant: str, session: str, results: Sequence[Result]) -> int:
        """See ResultStore."""
        return await self._do(self._keep, tenant, session, tuple(results))

    async def results(self, tenant: str, session: str, after: int = 0, most: int = MOST_RESULTS) -> Sequence[Result]:
        """See ResultStore."""
        return await self._do(self._results, tenant, session, after, most)

    # Below: the store's own thread only.

    def _received(self, tenant: str, session: str) -> int:
        row = self._db.execute(
            "SELECT received FROM sessions WHERE tenant = ? AND id = ?", (tenant, session)
        ).fetchone()
        return int(row[0]) if row is not None else 0

    def _number(self, tenant: str, session: str) -> tuple[int, int]:
        """(its number, last result kept); the session is made when it is new."""
        row: tuple[int, int] = self._db.execute(
            "INSERT INTO sessions(tenant, id, received, touched_unix_s) VALUES(?,?,0,?) "
            "ON CONFLICT(tenant, id) DO UPDATE SET touched_unix_s = excluded.touched_unix_s RETURNING number, received",
            (tenant, session, stamp(self._wall())),
        ).fetchone()
        return row

    def _keep(self, tenant: str, session: str, results: tuple[Result, ...]) -> int:
        now = self._wall()
        with written(self._db):
            number, received = self._number(tenant, session)
            for result in results:
                if result.seq == received + 1:
                    received += 1
                    row = (number, received, result.of, result.kind, _body(result.body), stamp(now))
                    self._db.execute("INSERT OR REPLACE INTO results VALUES(?,?,?,?,?,?)", row)
            self._db.execute("UPDATE sessions SET received = ? WHERE number = ?", (received, number))
            self._db.execute(
                "DELETE FROM results WHERE session = ? AND seq <= ?", (number, received - self._bounds.results)
            )
            self._kept += len(results)
            if self._kept >= 1_000:
                self._sweep(now)
        return received

    def _sweep(self, now: WallTime) -> None:
        self._kept = 0
        if sweepable(self._db, now, ("results", "at_unix_s"), ("sessions", "touched_unix_s")):
            oldest_unix_s = now.unix_s - self._bounds.age_s
            self._db.execute("DELETE FROM results WHERE at_unix_s < ?", (oldest_unix_s,))
            self._db.execute("DELETE FROM sessions WHERE touched_unix_s < ?", (oldest_unix_s,))
        over = self._db.execute("SELECT count(*) FROM sessions").fetchone()[0] - self._bounds.sessions
        if over > 0:
            self._db.execute(
                "DELETE FROM sessions WHERE number IN (SELECT number FROM sessions ORDER BY touched_unix_s LIMIT ?)",
                (over,),
            )

    def _results(self, tenant: str, session: str, after: int, most: int) -> Sequence[Result]:
        rows = self._db.execute(
            "SELECT seq, of, kind, body FROM results JOIN sessions ON number = session "
            "WHERE tenant = ? AND id = ? AND seq > ? ORDER BY seq LIMIT ?",
            (tenant, session, after, most),
        )
        return [Result(seq=seq, of=of, kind=kind, body=json.loads(body)) for seq, of, kind, body in rows]


def _body(body: Mapping[str, Any]) -> str:
    return json.dumps(dict(body), separators=(",", ":"))

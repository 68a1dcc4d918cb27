"""Cached answers in SQLite: the truth from which the vectors' index is made anew at any time."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

from attrs import frozen

from gateway.ports import CachedAnswer
from protocol.durable import open_sqlite, written
from protocol.text import Usage

MAX_ANSWER_BYTES = 256 << 10
"""Longer answers are not kept: one of them would push out hundreds."""

_MIGRATIONS = (
    """
    CREATE TABLE entries(
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        exact TEXT NOT NULL UNIQUE,
        scope TEXT NOT NULL,
        tenant TEXT NOT NULL,
        embedder TEXT NOT NULL,
        question TEXT NOT NULL,
        vector BLOB,
        answer TEXT NOT NULL,
        created_unix_s REAL NOT NULL,
        used INTEGER NOT NULL
    );
    CREATE INDEX entries_used ON entries(used);
    CREATE INDEX entries_created ON entries(created_unix_s);
    """,
)


@frozen
class Entry:
    """One kept answer. vector: little-endian float16 bytes, or None where only the exact key finds it."""

    id: int
    scope: str
    question: str
    answer: CachedAnswer
    created_unix_s: float


@frozen
class Vector:
    """What the index is made from."""

    id: int
    scope: str
    data: bytes


def _encoded(answer: CachedAnswer) -> str:
    usage = answer.usage
    counts = [usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens]
    return json.dumps([list(answer.pieces), answer.finish, counts, answer.source])


def _decoded(text: str) -> CachedAnswer:
    pieces, finish, counts, source = json.loads(text)
    return CachedAnswer(tuple(pieces), finish, Usage(*counts), source)


class CacheStore:
    """Blocking; one thread at a time. Raises ConfigError when the file cannot be opened."""

    def __init__(self, file: Path | None) -> None:
        self._db = open_sqlite(file, _MIGRATIONS) if file is not None else _in_memory()
        row = self._db.execute("SELECT coalesce(max(used), 0) FROM entries").fetchone()
        self._turn = int(row[0])

    def __len__(self) -> int:
        return int(self._db.execute("SELECT count(*) FROM entries").fetchone()[0])

    def exact(self, key: str) -> Entry | None:
        """The entry of this exact key."""
        return self._one("exact = ?", key)

    def entry(self, entry: int) -> Entry | None:
        """The entry of this number."""
        return self._one("id = ?", entry)

    def _one(self, where: str, value: str | int) -> Entry | None:
        row = self._db.execute(
            f"SELECT id, scope, question, answer, created_unix_s FROM entries WHERE {where}", (value,)
        ).fetchone()
        if row is None:
            return None
        return Entry(int(row[0]), row[1], row[2], _decoded(row[3]), float(row[4]))

    def used(self, entry: int) -> None:
        """It served: it goes last."""
        self._turn += 1
        self._db.execute("UPDATE entries SET used = ? WHERE id = ?", (self._turn, entry))

    def put(
        self,
        exact: str,
        scope: str,
        tenant: str,
        embedder: str,
        question: str,
        vector: bytes | None,
        answer: CachedAnswer,
        now_unix_s: float,
    ) -> int:
        """Keep an answer in place of an older one with the same key; returns its number."""
        self._turn += 1
        row = (exact, scope, tenant, embedder, question, vector, _encoded(answer), now_unix_s, self._turn)
        done = self._db.execute(
            "INSERT OR REPLACE INTO "
            "entries(exact, scope, tenant, embedder, question, vector, answer, created_unix_s, used) "
            "VALUES(?,?,?,?,?,?,?,?,?)",
            row,
        )
        return int(done.lastrowid or 0)

    def together(self) -> AbstractContextManager[None]:
        """What is done within is kept whole at its end, or not at all; many changes are quicker so."""
        return written(self._db)

    def drop(self, entry: int) -> None:
        """Forget one."""
        self._db.execute("DELETE FROM entries WHERE id = ?", (entry,))

    def least_used(self, count: int) -> list[tuple[int, str]]:
        """(number, scope) of those that served longest ago."""
        rows = self._db.execute("SELECT id, scope FROM entries ORDER BY used LIMIT ?", (count,))
        return [(int(row[0]), row[1]) for row in rows]

    def older_than(self, unix_s: float, count: int) -> list[tuple[int, str]]:
        """(number, scope) of entries made before `unix_s`."""
        rows = self._db.execute("SELECT id, scope FROM entries WHERE created_unix_s < ? LIMIT ?", (unix_s, count))
        return [(int(row[0]), row[1]) for row in rows]

    def of_tenant(self, tenant: str | None) -> list[tuple[int, str]]:
        """(number, scope) of one tenant's entries, or of all."""
        where, values = ("WHERE tenant = ?", (tenant,)) if tenant is not None else ("", ())
        return [(int(row[0]), row[1]) for row in self._db.execute(f"SELECT id, scope FROM entries {where}", values)]

    def vectors(self, embedder: str) -> Iterator[Vector]:
        """Vectors made by this embedder; another's are of no use beside them."""
        rows = self._db.execute(
            "SELECT id, scope, vector FROM entries WHERE vector IS NOT NULL AND embedder = ? ORDER BY scope, id",
            (embedder,),
        )
        return (Vector(int(row[0]), row[1], row[2]) for row in rows)

    def close(self) -> None:
        """Close the file; idempotent."""
        self._db.close()


def _in_memory() -> sqlite3.Connection:
    db = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
    for script in _MIGRATIONS:
        db.executescript(script)
    return db

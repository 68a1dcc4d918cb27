"""Where conversations are kept: a port, SQLite for one machine, and memory. Bounded in turns, bytes, number and age."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, TypeVar

from attrs import frozen

from gateway.threaded_sqlite import ThreadedSqlite
from protocol.clock import WallClock, wall_now
from protocol.text import Message

T = TypeVar("T")

MAX_ID_CHARS = 200
MAX_TURN_BYTES = 256 << 10
"""Longer turns are refused with a conversation id; answers are bounded by policy far below it."""


@frozen
class ConversationBounds:
    """What is forgotten, oldest first.

    turns: of one conversation.
    conversations: of all tenants together. age_s: since the last turn.
    """

    turns: int = 400
    conversations: int = 20_000
    age_s: float = 30 * 86_400.0


class ConversationStore(Protocol):
    """Turns of a tenant's conversations. Tenants never meet, whatever ids they choose."""

    async def turns(self, tenant: str, conversation: str) -> tuple[Message, ...]:
        """In order; empty for one that is not known."""
        ...

    async def target(self, tenant: str, conversation: str) -> str | None:
        """Which target answered last; None for a conversation that is not known."""
        ...

    async def extend(self, tenant: str, conversation: str, turns: Sequence[Message], target: str) -> None:
        """Add turns; `target` answered them."""
        ...

    async def forget(self, tenant: str, conversation: str) -> bool:
        """Drop one; whether there was one."""
        ...

    async def close(self) -> None: ...


_MIGRATIONS = (
    """
    CREATE TABLE conversations(
        number INTEGER PRIMARY KEY,
        tenant TEXT NOT NULL,
        id TEXT NOT NULL,
        target TEXT NOT NULL,
        touched_unix_s REAL NOT NULL,
        UNIQUE(tenant, id)
    );
    CREATE INDEX conversations_touched ON conversations(touched_unix_s);
    CREATE TABLE turns(
        conversation INTEGER NOT NULL REFERENCES conversations(number) ON DELETE CASCADE,
        place INTEGER NOT NULL,
        turn TEXT NOT NULL,
        PRIMARY KEY(conversation, place)
    ) WITHOUT ROWID;
    """,
)


def encode_turn(turn: Message) -> str:
    """As JSON. Pictures are not kept: their turn keeps its text."""
    return json.dumps([turn.role, turn.content, turn.name, list(turn.tool_calls), turn.tool_call_id])


def decode_turn(text: str) -> Message:
    """Back from `encode_turn`."""
    role, content, name, calls, call_id = json.loads(text)
    return Message(role, content, name, tuple(calls), call_id)


class SqliteConversations(ThreadedSqlite):
    """One file, opened with its first use, in one thread of its own. All methods raise ConfigError when it cannot be
    used."""

    def __init__(self, file: Path, bounds: ConversationBounds | None = None, wall: WallClock = wall_now) -> None:
        super().__init__(file, _MIGRATIONS, "midstream-conversations")
        self._bounds = bounds or ConversationBounds()
        self._wall = wall

    async def turns(self, tenant: str, conversation: str) -> tuple[Message, ...]:
        """See ConversationStore."""
        return await self._do(self._turns, tenant, conversation)

    async def target(self, tenant: str, conversation: str) -> str | None:
        """See ConversationStore."""
        return await self._do(self._target, tenant, conversation)

    async def extend(self, tenant: str, conversation: str, turns: Sequence[Message], target: str) -> None:
        """See ConversationStore."""
        await self._do(self._extend, tenant, conversation, tuple(turns), target)

    async def forget(self, tenant: str, conversation: str) -> bool:
        """See ConversationStore."""
        return await self._do(self._forget, tenant, conversation)

    # Below: the store's own thread only.

    def _turns(self, tenant: str, conversation: str) -> tuple[Message, ...]:
        rows = self._db.execute(
            "SELECT turn FROM turns JOIN conversations ON number = conversation "
            "WHERE tenant = ? AND id = ? ORDER BY place",
            (tenant, conversation),
        )
        return tuple(decode_turn(row[0]) for row in rows)

    def _target(self, tenant: str, conversation: str) -> str | None:
        row = self._db.execute(
            "SELECT target FROM conversations WHERE tenant = ? AND id = ?", (tenant, conversation)
        ).fetchone()
        return str(row[0]) if row is not None else None

    def _extend(self, tenant: str, conversation: str, turns: tuple[Message, ...], target: str) -> None:
        encoded = [encode_turn(turn) for turn in turns]
        self._db.execute("BEGIN IMMEDIATE")
        try:
            self._add(tenant, conversation, encoded, target)
            self._sweep()
            self._db.execute("COMMIT")
        except BaseException:
            self._db.execute("ROLLBACK")
            raise

    def _add(self, tenant: str, conversation: str, encoded: list[str], target: str) -> None:
        number = self._db.execute(
            "INSERT INTO conversations(tenant, id, target, touched_unix_s) VALUES(?,?,?,?) "
            "ON CONFLICT(tenant, id) DO UPDATE SET target = excluded.target, touched_unix_s = excluded.touched_unix_s "
            "RETURNING number",
            (tenant, conversation, target, self._wall().unix_s),
        ).fetchone()[0]
        first = self._db.execute(
            "SELECT coalesce(max(place) + 1, 0) FROM turns WHERE conversation = ?", (number,)
        ).fetchone()[0]
        self._db.executemany(
            "INSERT INTO turns VALUES(?,?,?)", [(number, first + place, turn) for place, turn in enumerate(encoded)]
        )
        self._db.execute(
            "DELETE FROM turns WHERE conversation = ? AND place < ?",
            (number, first + len(encoded) - self._bounds.turns),
        )

    def _sweep(self) -> None:
        oldest_unix_s = self._wall().unix_s - self._bounds.age_s
        self._db.execute("DELETE FROM conversations WHERE touched_unix_s < ?", (oldest_unix_s,))
        over = self._db.execute("SELECT count(*) FROM conversations").fetchone()[0] - self._bounds.conversations
        if over > 0:
            self._db.execute(
                "DELETE FROM conversations WHERE number IN "
                "(SELECT number FROM conversations ORDER BY touched_unix_s LIMIT ?)",
                (over,),
            )

    def _forget(self, tenant: str, conversation: str) -> bool:
        done = self._db.execute("DELETE FROM conversations WHERE tenant = ? AND id = ?", (tenant, conversation))
        return done.rowcount > 0

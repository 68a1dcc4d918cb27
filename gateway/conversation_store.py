"""Where conversations are kept: a port, SQLite for one machine, and memory. Bounded in turns, bytes, number and age."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, TypeVar

from attrs import frozen

from gateway.threaded_sqlite import ThreadedSqlite, stamp, sweepable
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
    conversations: of all tenants together; the tenant that has most of them loses the first.
    age_s: since the last turn.
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

    async def stays(self, tenant: str, conversation: str) -> str:
        """Why it may not leave this machine; empty: it may."""
        ...

    async def extend(
        self, tenant: str, conversation: str, turns: Sequence[Message], target: str, stays: str = ""
    ) -> None:
        """Keep what `joined` makes of it and these turns, the answer last, in one step; `target` made it. stays: stands
        from now on, an empty one changes nothing."""
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
    "ALTER TABLE conversations ADD COLUMN stays TEXT NOT NULL DEFAULT '';",
)


def joined(kept: Sequence[Message], said: Sequence[Message]) -> tuple[Message, ...]:
    """A conversation with a request's turns. Turns that carry answers are the client's own telling of it: it goes on
    where they overlap the end of what is kept, and where they tell any of it otherwise (a turn edited or asked again),
    they are believed."""
    if not any(turn.role == "assistant" for turn in said):
        return (*kept, *said)
    for first in range(max(0, len(kept) - len(said)), len(kept)):
        if all(map(_same, kept[first:], said)):
            return (*kept[:first], *said)
    told = {turn.content.strip() for turn in kept if turn.role == "user"}
    if any(turn.role == "user" and turn.content.strip() in told for turn in said):
        return tuple(said)
    return (*kept, *said)


def _same(one: Message, other: Message) -> bool:
    """Clients often trim answers."""
    return (one.role, one.content.strip(), _ids(one)) == (other.role, other.content.strip(), _ids(other))


def _ids(turn: Message) -> tuple[object, ...]:
    return turn.tool_call_id, *(call.get("id") for call in turn.tool_calls)


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

    async def stays(self, tenant: str, conversation: str) -> str:
        """See ConversationStore."""
        return await self._do(self._stays, tenant, conversation)

    async def extend(
        self, tenant: str, conversation: str, turns: Sequence[Message], target: str, stays: str = ""
    ) -> None:
        """See ConversationStore."""
        await self._do(self._extend, tenant, conversation, tuple(turns), target, stays)

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

    def _stays(self, tenant: str, conversation: str) -> str:
        row = self._db.execute(
            "SELECT stays FROM conversations WHERE tenant = ? AND id = ?", (tenant, conversation)
        ).fetchone()
        return str(row[0]) if row is not None else ""

    def _extend(self, tenant: str, conversation: str, said: tuple[Message, ...], target: str, stays: str) -> None:
        db = self._db
        db.execute("BEGIN IMMEDIATE")
        try:
            kept = self._turns(tenant, conversation)
            answered = said[-1].role == "assistant" if said else False
            turns = (*joined(kept, said[:-1]), said[-1]) if answered else joined(kept, said)
            unchanged = 0
            while unchanged < min(len(kept), len(turns)) and kept[unchanged] == turns[unchanged]:
                unchanged += 1
            number = self._touched(tenant, conversation, target, stays)
            self._replace(number, len(kept) - unchanged, [encode_turn(turn) for turn in turns[unchanged:]])
            self._sweep()
            db.execute("COMMIT")
        except BaseException:
            if db.in_transaction:  # a full disk may have ended it
                db.execute("ROLLBACK")
            raise

    def _touched(self, tenant: str, conversation: str, target: str, stays: str) -> int:
        row = self._db.execute(
            "INSERT INTO conversations(tenant, id, target, touched_unix_s, stays) VALUES(?,?,?,?,?) "
            "ON CONFLICT(tenant, id) DO UPDATE SET target = excluded.target, touched_unix_s = excluded.touched_unix_s, "
            "stays = iif(excluded.stays = '', stays, excluded.stays) RETURNING number",
            (tenant, conversation, target, stamp(self._wall()), stays),
        ).fetchone()
        return int(row[0])

    def _replace(self, number: int, dropped: int, encoded: list[str]) -> None:
        """The last `dropped` turns go, these come, and the bound is kept."""
        last = self._db.execute(
            "SELECT coalesce(max(place), -1) FROM turns WHERE conversation = ?", (number,)
        ).fetchone()[0]
        first = last + 1 - dropped
        self._db.execute("DELETE FROM turns WHERE conversation = ? AND place >= ?", (number, first))
        self._db.executemany(
            "INSERT INTO turns VALUES(?,?,?)", [(number, first + place, turn) for place, turn in enumerate(encoded)]
        )
        self._db.execute(
            "DELETE FROM turns WHERE conversation = ? AND place < ?",
            (number, first + len(encoded) - self._bounds.turns),
        )

    def _sweep(self) -> None:
        now = self._wall()
        if sweepable(self._db, now, ("conversations", "touched_unix_s")):
            oldest_unix_s = now.unix_s - self._bounds.age_s
            self._db.execute("DELETE FROM conversations WHERE touched_unix_s < ?", (oldest_unix_s,))
        over = self._db.execute("SELECT count(*) FROM conversations").fetchone()[0] - self._bounds.conversations
        if over > 0:
            self._db.execute(
                "DELETE FROM conversations WHERE number IN "
                "(SELECT number FROM conversations WHERE tenant = "
                "(SELECT tenant FROM conversations GROUP BY tenant ORDER BY count(*) DESC LIMIT 1) "
                "ORDER BY touched_unix_s LIMIT ?)",
                (over,),
            )

    def _forget(self, tenant: str, conversation: str) -> bool:
        done = self._db.execute("DELETE FROM conversations WHERE tenant = ? AND id = ?", (tenant, conversation))
        return done.rowcount > 0

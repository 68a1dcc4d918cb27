"""Where conversations are kept: the port, what is kept of a request, and SQLite for one machine. Several machines share
a PostgreSQL (gateway/postgres_conversations.py). Bounded in turns, bytes, number and age."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, TypeVar

from attrs import frozen

from gateway.threaded_sqlite import ThreadedSqlite, stamp, sweepable
from protocol.clock import WallClock, wall_now
from protocol.durable import written
from protocol.text import Message

T = TypeVar("T")

MAX_ID_CHARS = 200
MAX_TURN_BYTES = 256 << 10
"""Longer turns are refused with a conversation id; answers are bounded by policy far below it."""


@frozen
class ConversationBounds:
    """What is forgotten, oldest first.

    turns: of one conversation.
    tenant_bytes: of all conversations of one tenant, as kept; a single one that is longer loses its first turns.
    conversations: of all tenants together; the tenant that has most of them loses the first.
    age_s: since the last turn.
    """

    turns: int = 400
    tenant_bytes: int = 64 << 20
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
    """
    ALTER TABLE conversations ADD COLUMN size_bytes INTEGER NOT NULL DEFAULT 0;
    UPDATE conversations SET size_bytes =
        (SELECT coalesce(sum(length(turn)), 0) FROM turns WHERE conversation = number);
    CREATE INDEX conversations_size ON conversations(tenant, size_bytes);
    """,
)


OVER_BYTES = (
    "DELETE FROM conversations WHERE number IN (SELECT number FROM (SELECT number, sum(size_bytes) OVER "
    "(ORDER BY number = ? DESC, touched_unix_s DESC, number DESC) AS until FROM conversations WHERE tenant = ?) "
    "WHERE until > ?)"
)
"""The tenant's conversations beyond its bytes, counted from the one that was touched last."""


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


@frozen
class Rewrite:
    """What becomes of the rows of a conversation: the first `unchanged` stay, the rest go, `added` come after them, and
    of the whole the first `forgotten` go. size_bytes: of what is kept then."""

    unchanged: int
    added: tuple[str, ...]
    forgotten: int
    size_bytes: int


def rewrite(rows: Sequence[str], said: Sequence[Message], bounds: ConversationBounds) -> Rewrite:
    """rows: of `encode_turn`, as kept. said: a request's turns and its answer."""
    kept = tuple(decode_turn(row) for row in rows)
    answered = said[-1].role == "assistant" if said else False
    turns = (*joined(kept, said[:-1]), said[-1]) if answered else joined(kept, said)
    unchanged = 0
    while unchanged < min(len(kept), len(turns)) and kept[unchanged] == turns[unchanged]:
        unchanged += 1
    added = tuple(encode_turn(turn) for turn in turns[unchanged:])
    sizes_bytes = [len(row) for row in (*rows[:unchanged], *added)]
    forgotten, size_bytes = len(sizes_bytes), 0
    least = max(0, forgotten - bounds.turns)
    while forgotten > least and size_bytes + sizes_bytes[forgotten - 1] <= bounds.tenant_bytes:
        forgotten -= 1
        size_bytes += sizes_bytes[forgotten]
    begin = next((at for at in range(forgotten, len(turns)) if turns[at].role == "user"), forgotten)
    if forgotten:  # what is left begins with a question, as models expect it
        forgotten, size_bytes = begin, size_bytes - sum(sizes_bytes[forgotten:begin])
    return Rewrite(unchanged, added, forgotten, size_bytes)


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

    def _rows(self, tenant: str, conversation: str) -> list[tuple[int, str]]:
        return self._db.execute(
            "SELECT place, turn FROM turns JOIN conversations ON number = conversation "
            "WHERE tenant = ? AND id = ? ORDER BY place",
            (tenant, conversation),
        ).fetchall()

    def _turns(self, tenant: str, conversation: str) -> tuple[Message, ...]:
        return tuple(decode_turn(turn) for _, turn in self._rows(tenant, conversation))

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
        with written(self._db):
            rows = self._rows(tenant, conversation)
            change = rewrite([turn for _, turn in rows], said, self._bounds)
            number = self._touched(tenant, conversation, target, stays, change.size_bytes)
            self._write(number, rows[0][0] if rows else 0, change)
            self._sweep(tenant, number)

    def _touched(self, tenant: str, conversation: str, target: str, stays: str, size_bytes: int) -> int:
        row = self._db.execute(
            "INSERT INTO conversations(tenant, id, target, touched_unix_s, stays, size_bytes) VALUES(?,?,?,?,?,?) "
            "ON CONFLICT(tenant, id) DO UPDATE SET target = excluded.target, touched_unix_s = excluded.touched_unix_s, "
            "size_bytes = excluded.size_bytes, stays = iif(excluded.stays = '', stays, excluded.stays) "
            "RETURNING number",
            (tenant, conversation, target, stamp(self._wall()), stays, size_bytes),
        ).fetchone()
        return int(row[0])

    def _write(self, number: int, first: int, change: Rewrite) -> None:
        """first: place of its first row."""
        fresh = first + change.unchanged
        self._db.execute("DELETE FROM turns WHERE conversation = ? AND place >= ?", (number, fresh))
        self._db.executemany(
            "INSERT INTO turns VALUES(?,?,?)", [(number, fresh + at, turn) for at, turn in enumerate(change.added)]
        )
        self._db.execute("DELETE FROM turns WHERE conversation = ? AND place < ?", (number, first + change.forgotten))

    def _sweep(self, tenant: str, current: int) -> None:
        now = self._wall()
        if sweepable(self._db, now, ("conversations", "touched_unix_s")):
            oldest_unix_s = now.unix_s - self._bounds.age_s
            self._db.execute("DELETE FROM conversations WHERE touched_unix_s < ?", (oldest_unix_s,))
        held_bytes = self._db.execute("SELECT sum(size_bytes) FROM conversations WHERE tenant = ?", (tenant,))
        if held_bytes.fetchone()[0] > self._bounds.tenant_bytes:
            self._db.execute(OVER_BYTES, (current, tenant, self._bounds.tenant_bytes))
        over = self._db.execute("SELECT count(*) FROM conversations").fetchone()[0] - self._bounds.conversations
        if over > 0:
            self._db.execute(
                "DELETE FROM conversations WHERE number IN "
                "(SELECT number FROM conversations WHERE tenant = "
                "(SELECT tenant FROM conversations GROUP BY tenant ORDER BY count(*) DESC LIMIT 1) "
                "ORDER BY number = ?, touched_unix_s LIMIT ?)",
                (current, over),
            )

    def _forget(self, tenant: str, conversation: str) -> bool:
        done = self._db.execute("DELETE FROM conversations WHERE tenant = ? AND id = ?", (tenant, conversation))
        return done.rowcount > 0

"""Conversations in PostgreSQL: for gateways on several machines. The only user of `asyncpg` (extra `postgres`).

Tables are made with the first use, in the schema that the connection's `search_path` names first. Each request's turns
are one transaction that holds its conversation's row, so gateways that answer in one conversation take turns. Texts
that PostgreSQL cannot hold (a NUL) are escaped.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

from gateway.conversation_store import ConversationBounds, Rewrite, decode_turn, rewrite
from gateway.threaded_sqlite import stamp
from protocol.clock import WallClock, wall_now
from protocol.errors import ConfigError
from protocol.extras import install_step
from protocol.text import Message

TIMEOUT_S = 3.0
"""For a connection, and for one statement; a request that needs its history waits no longer."""

MOST_CONNECTIONS = 8
IDLE_S = 60.0
SETTING = "conversations_postgres"

_LOCK = 0x6D696473
"""Of the advisory lock under which tables are made."""

_VERSION = 1
_TABLES = """
CREATE TABLE midstream_conversations(
    number BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    tenant TEXT NOT NULL,
    id TEXT NOT NULL,
    target TEXT NOT NULL,
    touched_unix_s DOUBLE PRECISION NOT NULL,
    stays TEXT NOT NULL DEFAULT '',
    size_bytes BIGINT NOT NULL DEFAULT 0,
    UNIQUE(tenant, id)
);
CREATE INDEX midstream_conversations_touched ON midstream_conversations(touched_unix_s);
CREATE INDEX midstream_conversations_size ON midstream_conversations(tenant, size_bytes);
CREATE TABLE midstream_turns(
    conversation BIGINT NOT NULL REFERENCES midstream_conversations(number) ON DELETE CASCADE,
    place BIGINT NOT NULL,
    turn TEXT NOT NULL,
    PRIMARY KEY(conversation, place)
);
CREATE TABLE midstream_conversations_version(version INTEGER NOT NULL);
INSERT INTO midstream_conversations_version VALUES(1);
"""

_TOUCH = """
INSERT INTO midstream_conversations AS c (tenant, id, target, touched_unix_s, stays) VALUES($1, $2, $3, $4, $5)
ON CONFLICT(tenant, id) DO UPDATE SET target = excluded.target, touched_unix_s = excluded.touched_unix_s,
    stays = CASE WHEN excluded.stays = '' THEN c.stays ELSE excluded.stays END
RETURNING number
"""

# Rows that another gateway writes to now are passed over: the next sweep finds them, and nobody waits for a circle.
_OVER_BYTES = """
DELETE FROM midstream_conversations WHERE number IN (
    SELECT number FROM midstream_conversations WHERE number IN (
        SELECT number FROM (
            SELECT number, sum(size_bytes) OVER (ORDER BY number = $1 DESC, touched_unix_s DESC, number DESC) AS until
            FROM midstream_conversations WHERE tenant = $2
        ) AS counted WHERE until > $3
    ) FOR UPDATE SKIP LOCKED
)
"""
# Zero: when nobody knew the time.
_STAMP = """
UPDATE midstream_conversations SET touched_unix_s = $1 WHERE number IN
    (SELECT number FROM midstream_conversations WHERE touched_unix_s = 0 FOR UPDATE SKIP LOCKED)
"""
_OVER_AGE = """
DELETE FROM midstream_conversations WHERE number IN (
    SELECT number FROM midstream_conversations WHERE touched_unix_s < $1 AND touched_unix_s <> 0
    FOR UPDATE SKIP LOCKED
)
"""
_OVER_NUMBER = """
DELETE FROM midstream_conversations WHERE number IN (
    SELECT number FROM midstream_conversations WHERE tenant =
        (SELECT tenant FROM midstream_conversations GROUP BY tenant ORDER BY count(*) DESC LIMIT 1)
    ORDER BY number = $2, touched_unix_s LIMIT $1 FOR UPDATE SKIP LOCKED
)
"""


class PostgresConversations:
    """A ConversationStore. Connects with its first use, `MOST_CONNECTIONS` at most; all methods raise ConfigError while
    the database cannot be used, and go on by themselves when it is back.

    url: `postgresql://[USER[:PASSWORD]@]HOST[:PORT]/DATABASE[?sslmode=verify-full]`.
    """

    def __init__(self, url: str, bounds: ConversationBounds | None = None, wall: WallClock = wall_now) -> None:
        self._url = _checked(url)
        self._asyncpg = _library()
        self._bounds = bounds or ConversationBounds()
        self._wall = wall
        self._pool: Any = None
        self._ready = False
        self._closed = False
        self._opening = asyncio.Lock()

    async def turns(self, tenant: str, conversation: str) -> tuple[Message, ...]:
        """See ConversationStore."""
        async with self._connection() as db:
            rows = await db.fetch(
                "SELECT turn FROM midstream_turns JOIN midstream_conversations ON number = conversation "
                "WHERE tenant = $1 AND id = $2 ORDER BY place",
                *_key(tenant, conversation),
            )
        return tuple(decode_turn(row[0]) for row in rows)

    async def target(self, tenant: str, conversation: str) -> str | None:
        """See ConversationStore."""
        return await self._one("target", tenant, conversation)

    async def stays(self, tenant: str, conversation: str) -> str:
        """See ConversationStore."""
        return await self._one("stays", tenant, conversation) or ""

    async def extend(
        self, tenant: str, conversation: str, turns: Sequence[Message], target: str, stays: str = ""
    ) -> None:
        """See ConversationStore."""
        async with self._connection() as db, db.transaction():
            touched_unix_s = stamp(self._wall())
            number = await db.fetchval(_TOUCH, *_key(tenant, conversation), target, touched_unix_s, stays)
            rows = await db.fetch(
                "SELECT place, turn FROM midstream_turns WHERE conversation = $1 ORDER BY place", number
            )
            change = rewrite([row[1] for row in rows], turns, self._bounds)
            await self._write(db, number, rows[0][0] if rows else 0, change)
            await self._sweep(db, _safe(tenant), number)

    async def forget(self, tenant: str, conversation: str) -> bool:
        """See ConversationStore."""
        async with self._connection() as db:
            done = await db.execute(
                "DELETE FROM midstream_conversations WHERE tenant = $1 AND id = $2", *_key(tenant, conversation)
            )
        return str(done) != "DELETE 0"

    async def close(self) -> None:
        """Idempotent; who comes later is told by a ConfigError."""
        self._closed = True
        pool, self._pool = self._pool, None
        if pool is not None:
            try:
                await asyncio.wait_for(pool.close(), TIMEOUT_S)
            except (TimeoutError, OSError, self._asyncpg.PostgresError, self._asyncpg.InterfaceError):
                pool.terminate()

    async def _one(self, column: str, tenant: str, conversation: str) -> str | None:
        async with self._connection() as db:
            found = await db.fetchval(
                f"SELECT {column} FROM midstream_conversations WHERE tenant = $1 AND id = $2",
                *_key(tenant, conversation),
            )
        return None if found is None else str(found)

    async def _write(self, db: Any, number: int, first: int, change: Rewrite) -> None:
        """first: place of its first row."""
        fresh = first + change.unchanged
        await db.execute("DELETE FROM midstream_turns WHERE conversation = $1 AND place >= $2", number, fresh)
        await db.executemany(
            "INSERT INTO midstream_turns VALUES($1, $2, $3)",
            [(number, fresh + at, turn) for at, turn in enumerate(change.added)],
        )
        await db.execute(
            "DELETE FROM midstream_turns WHERE conversation = $1 AND place < $2", number, first + change.forgotten
        )
        await db.execute(
            "UPDATE midstream_conversations SET size_bytes = $2 WHERE number = $1", number, change.size_bytes
        )

    async def _sweep(self, db: Any, tenant: str, current: int) -> None:
        now = self._wall()
        if now.trusted:
            await db.execute(_STAMP, now.unix_s)
            await db.execute(_OVER_AGE, now.unix_s - self._bounds.age_s)
        held_bytes = await db.fetchval("SELECT sum(size_bytes) FROM midstream_conversations WHERE tenant = $1", tenant)
        if held_bytes > self._bounds.tenant_bytes:
            await db.execute(_OVER_BYTES, current, tenant, self._bounds.tenant_bytes)
        over = await db.fetchval("SELECT count(*) FROM midstream_conversations") - self._bounds.conversations
        if over > 0:
            await db.execute(_OVER_NUMBER, over, current)

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[Any]:
        """A connection with tables. What goes wrong on it is a ConfigError, and the tables are looked at again."""
        try:
            pool = await self._opened()
            db = await pool.acquire(timeout=TIMEOUT_S)
            try:
                if not self._ready:
                    await self._make_tables(db)
                yield db
            finally:
                await asyncio.shield(pool.release(db, timeout=TIMEOUT_S))
        except (OSError, TimeoutError, self._asyncpg.PostgresError, self._asyncpg.InterfaceError) as err:
            self._ready = False
            said = str(err)[:300] or type(err).__name__
            raise ConfigError(
                f"the database of conversations cannot be used: {said}",
                next_step=f"check that the server is up and that its user may create tables ({SETTING})",
                field=SETTING,
            ) from err

    async def _opened(self) -> Any:
        async with self._opening:
            if self._closed:
                raise ConfigError("the store of conversations was closed", field=SETTING)
            if self._pool is None:
                self._pool = await self._asyncpg.create_pool(
                    self._url, min_size=0, max_size=MOST_CONNECTIONS, timeout=TIMEOUT_S, command_timeout=TIMEOUT_S,
                    max_inactive_connection_lifetime=IDLE_S,
                    # Poolers between here and the server (pgbouncer) hand statements to other connections.
                    statement_cache_size=0,
                )  # fmt: skip
            return self._pool

    async def _make_tables(self, db: Any) -> None:
        async with db.transaction():
            await db.execute("SELECT pg_advisory_xact_lock($1)", _LOCK)
            if await db.fetchval("SELECT to_regclass('midstream_conversations_version')") is None:
                await db.execute(_TABLES)
            version = await db.fetchval("SELECT version FROM midstream_conversations_version")
        if version != _VERSION:
            raise ConfigError(
                f"the tables of conversations have version {version}, this release knows {_VERSION}",
                next_step=f"run the release that made them, or name another database ({SETTING})",
                field=SETTING,
            )
        self._ready = True


def _library() -> Any:
    try:
        import asyncpg
    except ImportError as err:
        raise ConfigError(
            "conversations in PostgreSQL need the package asyncpg", next_step=install_step("postgres"),
            field=SETTING,
        ) from err  # fmt: skip
    return asyncpg


def _checked(url: str) -> str:
    """Raises ConfigError, without what may be a password."""
    wrong = ConfigError(
        "the address of PostgreSQL is not valid",
        next_step="write postgresql://USER:PASSWORD@HOST:5432/DATABASE, with %XX for special characters",
        field=SETTING,
    )
    try:
        parts = urlsplit(url)
        named = parts.port is None or parts.port > 0
    except ValueError:
        raise wrong from None
    if not named or parts.scheme not in ("postgresql", "postgres") or not parts.hostname or len(parts.path) < 2:
        raise wrong
    return url


def _key(tenant: str, conversation: str) -> tuple[str, str]:
    return _safe(tenant), _safe(conversation)


def _safe(text: str) -> str:
    """Without what PostgreSQL's texts cannot hold; two texts never become one."""
    return json.dumps(text, ensure_ascii=False)[1:-1]

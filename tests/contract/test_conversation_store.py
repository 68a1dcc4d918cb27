"""One suite over every ConversationStore: SQLite (two openings of a file), PostgreSQL (two pools on a real server)."""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from gateway.conversation_store import ConversationBounds, ConversationStore, SqliteConversations
from gateway.postgres_conversations import PostgresConversations
from protocol.clock import WallTime
from protocol.errors import ConfigError
from protocol.text import Message
from tests.conftest import PostgresServer, running_postgres

NUMBERS = itertools.count()
NO_BOUNDS = ConversationBounds()


class Place:
    """Where one test keeps its conversations; `open` may be called more than once. now: the time there is."""

    def __init__(self, make: Callable[[ConversationBounds, Callable[[], WallTime]], ConversationStore]) -> None:
        self.now = WallTime(1.8e9, True)
        self._make = make
        self._opened: list[ConversationStore] = []

    def open(self, bounds: ConversationBounds = NO_BOUNDS) -> ConversationStore:
        self._opened.append(self._make(bounds, lambda: self.now))
        return self._opened[-1]

    def later(self, seconds: float) -> None:
        self.now = WallTime(self.now.unix_s + seconds, True)

    async def close(self) -> None:
        for store in self._opened:
            await store.close()


def need_asyncpg() -> None:
    if importlib.util.find_spec("asyncpg") is None:
        if os.environ.get("CI"):
            pytest.fail("asyncpg is not installed; run `make setup`")
        pytest.skip("asyncpg is not installed; run `make setup`")


async def create_database(server: PostgresServer, name: str) -> None:
    import asyncpg

    db = await asyncpg.connect(server.url())
    await db.execute(f"CREATE DATABASE {name}")
    await db.close()


@pytest.fixture(params=("sqlite", "postgres"))
async def place(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Place]:
    if request.param == "sqlite":
        found = Place(lambda bounds, wall: SqliteConversations(tmp_path / "c.sqlite", bounds, wall))
    else:
        need_asyncpg()
        server: PostgresServer = request.getfixturevalue("postgres")
        name = f"d{next(NUMBERS)}"
        await create_database(server, name)
        found = Place(lambda bounds, wall: PostgresConversations(server.url(name), bounds, wall))
    yield found
    await found.close()


def turns(*texts: str) -> tuple[Message, ...]:
    """u… is the user's, a… an answer, t… a tool's."""
    roles = {"u": "user", "a": "assistant", "t": "tool"}
    return tuple(Message(roles[text.strip()[0]], text) for text in texts)


async def texts(store: ConversationStore, tenant: str, conversation: str) -> list[str]:
    return [turn.content for turn in await store.turns(tenant, conversation)]


async def there(store: ConversationStore, tenant: str, *names: str) -> list[str]:
    return [name for name in names if await store.turns(tenant, name)]


async def test_what_is_not_known_is_empty(place: Place) -> None:
    store = place.open()
    assert await store.turns("a", "c") == ()
    assert (await store.target("a", "c"), await store.stays("a", "c"), await store.forget("a", "c")) == (
        None,
        "",
        False,
    )


async def test_everything_is_there_after_a_restart(place: Place) -> None:
    store = place.open()
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    said = (
        Message("user", "x \u4f60\u597d \0 \U0001f600"),
        Message("assistant", "", tool_calls=(call,)),
        Message("tool", "7", tool_call_id="c1"),
    )
    await store.extend("a", "c1", said, "cloud")
    await store.close()
    store = place.open()
    assert await store.turns("a", "c1") == said
    assert (await store.target("a", "c1"), await store.target("a", "c9")) == ("cloud", None)


async def test_tenants_and_ids_never_meet_whatever_they_are_called(place: Place) -> None:
    store = place.open()
    keys = [
        ("a", "c"),
        ("b", "c"),
        ("a", "C"),
        ("a", "c\0"),
        ("a", "c\\u0000"),
        ("a", "'; --"),
        ("\u4f60", "\u597d" * 200),
    ]
    for number, (tenant, name) in enumerate(keys):
        await store.extend(tenant, name, turns(f"u{number}", "a"), "d")
    assert [(await texts(store, tenant, name))[0] for tenant, name in keys] == [f"u{n}" for n in range(len(keys))]
    assert await store.forget("a", "c") and not await store.forget("a", "c")
    assert await there(store, "a", "c", "C") == ["C"]


async def test_a_turn_that_is_asked_again_replaces_what_followed(place: Place) -> None:
    store = place.open()
    await store.extend("a", "c", turns("u1", "a1"), "d")
    await store.extend("a", "c", turns("u2", "a2"), "d")
    await store.extend("a", "c", turns("u1", "a1", "u3", "a3"), "e")
    assert await texts(store, "a", "c") == ["u1", "a1", "u3", "a3"]
    await store.extend("a", "c", turns("u4", "a4"), "e")
    assert await texts(store, "a", "c") == ["u1", "a1", "u3", "a3", "u4", "a4"]
    assert await store.target("a", "c") == "e"


async def test_answers_at_once_in_one_conversation_are_all_kept(place: Place) -> None:
    one, other = place.open(), place.open()
    await one.extend("a", "c", turns("u", "a"), "d")
    await asyncio.gather(
        *(store.extend("a", "c", turns(f"u{n}", f"a{n}"), "d") for n in range(8) for store in (one, other))
    )
    kept = await texts(one, "a", "c")
    assert len(kept) == 2 + 32 and kept == await texts(other, "a", "c")
    assert all(kept[at + 1] == "a" + kept[at][1:] for at in range(0, len(kept), 2)), "no two are mixed"


async def test_bounds_forget_the_oldest_first(place: Place) -> None:
    store = place.open(ConversationBounds(turns=4, conversations=2, age_s=50.0))
    for number in range(6):
        await store.extend("a", "long", turns(f"u{number}"), "d")
    assert await texts(store, "a", "long") == ["u2", "u3", "u4", "u5"]
    for name in ("one", "two"):
        place.later(1.0)
        await store.extend("a", name, turns("u"), "d")
    assert await there(store, "a", "long", "one", "two") == ["one", "two"]
    place.later(60.0)
    await store.extend("a", "late", turns("u"), "d")
    assert await there(store, "a", "one", "two", "late") == ["late"]


async def test_a_tenant_over_its_bytes_loses_its_oldest_and_nobody_elses(place: Place) -> None:
    store = place.open(ConversationBounds(tenant_bytes=10_000))
    await store.extend("b", "old", turns("u" * 9_000, "a"), "d")
    for name in ("one", "two", "three"):
        place.later(1.0)
        await store.extend("a", name, turns("u" * 3_000, "a"), "d")
    assert await there(store, "a", "one", "two", "three") == ["one", "two", "three"]
    place.later(1.0)
    await store.extend("a", "one", turns("u" * 3_000, "a"), "d")
    assert await there(store, "a", "one", "two", "three") == ["one", "three"]
    assert await there(store, "b", "old") == ["old"]
    for number in range(5):
        await store.extend("a", "one", turns(f"u{number}" * 1_500, f"a{number}"), "d")
    assert [text[:2] for text in await texts(store, "a", "one")] == ["u2", "a2", "u3", "a3", "u4", "a4"]
    assert await there(store, "a", "three") == []


async def test_an_answer_larger_than_all_there_is_leaves_nothing_behind(place: Place) -> None:
    store = place.open(ConversationBounds(tenant_bytes=10_000))
    await store.extend("a", "c", turns("u", "a"), "d", "a label")
    await store.extend("a", "c", turns("u", "a" * 20_000), "d")
    assert await texts(store, "a", "c") == [] and await store.stays("a", "c") == "a label"
    await store.extend("a", "c", turns("u1", "a1"), "d")
    assert await texts(store, "a", "c") == ["u1", "a1"]


async def test_what_kept_a_conversation_here_outlives_later_turns_and_a_restart(place: Place) -> None:
    store = place.open()
    await store.extend("a", "c1", turns("u1", "a1"), "device", "a label")
    await store.extend("a", "c1", turns("u2", "a2"), "device")
    await store.close()
    store = place.open()
    assert (await store.stays("a", "c1"), await store.stays("b", "c1")) == ("a label", "")


async def test_a_clock_that_is_set_later_forgets_nothing_that_was_just_said(place: Place) -> None:
    store = place.open()
    place.now = WallTime(100.0, False)
    await store.extend("a", "early", turns("u1", "a1"), "d")
    place.now = WallTime(1.8e9, True)
    await store.extend("a", "late", turns("u1", "a1"), "d")
    assert await there(store, "a", "early", "late") == ["early", "late"]
    place.now = WallTime(500.0, False)
    await store.extend("a", "back", turns("u1", "a1"), "d")
    place.now = WallTime(1.8e9 + 31 * 86_400.0, True)
    await store.extend("a", "later", turns("u1", "a1"), "d")
    assert await there(store, "a", "early", "late", "back", "later") == ["back", "later"]


async def test_conversations_from_before_the_clock_was_set_are_answered_in_at_once(place: Place) -> None:
    """Each gave the others their time, in a circle: PostgreSQL broke it at the cost of answers."""
    one, other = place.open(), place.open()
    names = [f"c{number}" for number in range(8)]
    for _ in range(3):
        place.now = WallTime(100.0, False)
        for name in names:
            await one.extend("a", name, turns("u1", "a1"), "d")
        place.now = WallTime(1.8e9, True)
        await asyncio.gather(
            *((one, other)[at % 2].extend("a", name, turns("u2", "a2"), "d") for at, name in enumerate(names))
        )
    assert [len(await texts(one, "a", name)) for name in names] == [12] * 8


async def test_one_tenant_does_not_push_out_the_conversations_of_others(place: Place) -> None:
    store = place.open(ConversationBounds(conversations=5))
    await store.extend("small", "only", turns("u1", "a1"), "d")
    for number in range(20):
        place.later(1.0)
        await store.extend("greedy", str(number), turns("u1", "a1"), "d")
    assert await there(store, "small", "only") and await there(store, "greedy", "0", "19") == ["19"]


async def test_tenants_that_push_out_their_own_at_once_stand_in_nobodys_way(place: Place) -> None:
    bounds = ConversationBounds(tenant_bytes=3_000)
    one, other = place.open(bounds), place.open(bounds)
    await one.extend("a", "first", turns("u" * 700, "a"), "d")
    for number in range(10):
        await asyncio.gather(
            *(
                store.extend("a", f"{name}{number}", turns("u" * 700, "a"), "d")
                for name in "xyz"
                for store in (one, other)
            )
        )
    place.later(1.0)
    await one.extend("a", "last", turns("u" * 700, "a"), "d")
    assert await texts(other, "a", "last") == ["u" * 700, "a"]
    left = await there(one, "a", *(f"{name}{number}" for name in "xyz" for number in range(10)))
    assert len(left) == 1


async def test_a_postgres_that_went_away_is_an_error_with_its_next_step_until_it_is_back(
    free_port: Callable[[], int],
) -> None:
    need_asyncpg()
    with running_postgres(free_port()) as server:
        store = PostgresConversations(server.url())
        await store.extend("a", "c", turns("u", "a"), "d")
        server.kill()
        for _ in range(2):
            with pytest.raises(ConfigError, match="database of conversations") as refused:
                await store.turns("a", "c")
            assert "server is up" in refused.value.next_step and "conversations_postgres" in refused.value.next_step
        server.restart()
        async with asyncio.timeout(20.0):
            while True:
                try:
                    assert await texts(store, "a", "c") == ["u", "a"]
                    break
                except ConfigError:
                    await asyncio.sleep(0.1)
        await store.close()
        await store.close()


@pytest.mark.parametrize(
    "url", ["", "postgresql://", "mysql://u:hush@h/d", "postgresql://u:hush@h", "postgresql://u:hush@h:x/d"]
)
def test_an_address_that_is_none_is_told_without_its_password(url: str) -> None:
    with pytest.raises(ConfigError) as refused:
        PostgresConversations(url)
    assert "hush" not in str(refused.value) and "postgresql://" in refused.value.next_step

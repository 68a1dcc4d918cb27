"""Histories by id: what is put before a turn, for whom, and what is forgotten."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from attrs import evolve

from gateway.context import Caller
from gateway.conversation_store import ConversationBounds, SqliteConversations, joined
from gateway.conversations import KeptConversations
from protocol.chat import ChatRequest
from protocol.errors import BadRequest, TooLarge
from protocol.text import Message
from tests.unit.gateway.test_compression import conversation

ANNA = Caller(tenant="a", conversation_id="c1")
SYSTEM = Message("system", "be short")


def ask(*texts: str) -> ChatRequest:
    roles = ("user", "assistant")
    turns = tuple(Message(roles[place % 2], text) for place, text in enumerate(texts))
    return ChatRequest("m", (SYSTEM, *turns))


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SqliteConversations]:
    made = SqliteConversations(tmp_path / "c.sqlite")
    yield made
    await made.close()


async def say(kept: KeptConversations, text: str, answer: str, caller: Caller = ANNA, target: str = "device") -> None:
    await kept.closed(caller, ask(text), Message("assistant", answer), "stop", target)


async def test_a_new_turn_gets_what_was_said_before(store: SqliteConversations) -> None:
    kept = KeptConversations(store)
    await say(kept, "my name is Ada", "hello Ada")
    opened = await kept.opened(ANNA, ask("what is my name?"))
    assert [message.content for message in opened.messages] == [
        "be short", "my name is Ada", "hello Ada", "what is my name?",
    ]  # fmt: skip


async def test_a_client_that_sends_everything_itself_is_believed(store: SqliteConversations) -> None:
    kept = KeptConversations(store)
    await say(kept, "my name is Ada", "hello Ada")
    whole = ask("my name is Ada", "hello Ada", "what is my name?")
    assert await kept.opened(ANNA, whole) is whole
    await kept.closed(ANNA, whole, Message("assistant", "Ada"), "stop", "device")
    assert [turn.content for turn in await store.turns("a", "c1")] == [
        "my name is Ada", "hello Ada", "what is my name?", "Ada",
    ]  # fmt: skip


async def test_tenants_and_ids_do_not_meet(store: SqliteConversations) -> None:
    kept = KeptConversations(store)
    await say(kept, "secret", "noted")
    for other in (evolve(ANNA, tenant="b"), evolve(ANNA, conversation_id="c2"), evolve(ANNA, conversation_id=None)):
        chat = ask("what did I say?")
        assert await kept.opened(other, chat) is chat


async def test_an_answer_that_was_cut_leaves_the_conversation_as_it_was(store: SqliteConversations) -> None:
    kept = KeptConversations(store)
    await kept.closed(ANNA, ask("hello"), Message("assistant", "he"), None, "device")
    assert await store.turns("a", "c1") == ()


async def test_another_target_gets_it_shorter_and_the_same_one_whole(store: SqliteConversations) -> None:
    kept = KeptConversations(store)
    chat, _ = conversation(1)
    await kept.closed(ANNA, evolve(chat, prompt=chat.messages[:-1]), Message("assistant", "yes"), "stop", "device")
    opened = await kept.opened(ANNA, ask("and now?"))
    assert (await kept.compressed(ANNA, opened, "device", 0)).chat is opened
    moved = await kept.compressed(ANNA, opened, "cloud", 0)
    assert moved.saved_tokens > 100 and moved.chat.messages[-1].content == "and now?"
    small = await kept.compressed(ANNA, opened, "device", 400)
    assert small.saved_tokens > 100


async def test_what_cannot_be_kept_is_refused_before_it_is_asked(store: SqliteConversations) -> None:
    kept = KeptConversations(store)
    with pytest.raises(BadRequest, match="conversation_id"):
        await kept.opened(evolve(ANNA, conversation_id="x" * 201), ask("hi"))
    with pytest.raises(TooLarge, match="too long"):
        await kept.opened(ANNA, ask("x" * (257 << 10)))


def turns(*texts: str) -> tuple[Message, ...]:
    """u… is the user's, a… an answer, t… a tool's."""
    roles = {"u": "user", "a": "assistant", "t": "tool"}
    return tuple(Message(roles[text.strip()[0]], text) for text in texts)


@pytest.mark.parametrize(
    ("kept", "said", "whole"),
    [
        (("u1", "a1"), ("u2",), ("u1", "a1", "u2")),
        (("u1", "a1"), ("u1",), ("u1", "a1", "u1")),
        (("u1", "a1"), ("u1", "a1", "u2"), ("u1", "a1", "u2")),
        (("u1", " a1\n"), ("u1", "a1", "u2"), ("u1", "a1", "u2")),
        (("u1", "a1", "u2", "a2"), ("u2", "a2", "u3"), ("u1", "a1", "u2", "a2", "u3")),
        (("u1", "a1", "u2", "a2"), ("a2", "t1"), ("u1", "a1", "u2", "a2", "t1")),
        (("u1", "a1", "u2", "a2"), ("u1", "a1", "u2"), ("u1", "a1", "u2")),
        (("u1", "a1", "u2", "a2"), ("u1", "a1", "u3"), ("u1", "a1", "u3")),
        (("u2", "a2"), ("u1", "a1", "u2", "a2", "u3"), ("u1", "a1", "u2", "a2", "u3")),
        (("u1", "a1"), ("u5", "a5", "u6"), ("u1", "a1", "u5", "a5", "u6")),
    ],
    ids=["new", "again", "whole", "trimmed", "last", "tool", "regenerated", "edited", "longer-than-kept", "example"],
)
def test_what_a_client_tells_of_a_conversation_itself_is_not_told_twice(
    kept: tuple[str, ...], said: tuple[str, ...], whole: tuple[str, ...]
) -> None:
    assert joined(turns(*kept), turns(*said)) == turns(*whole)


async def test_whole_histories_at_once_leave_one_history(store: SqliteConversations) -> None:
    kept = KeptConversations(store)
    await say(kept, "u1", "a1")
    for text in ("u2", "u3"):
        await kept.closed(ANNA, ask("u1", "a1", text), Message("assistant", "yes"), "stop", "device")
    assert [turn.content for turn in await store.turns("a", "c1")] == ["u1", "a1", "u3", "yes"]


async def test_a_history_longer_than_the_bound_is_not_doubled(tmp_path: Path) -> None:
    store = SqliteConversations(tmp_path / "c.sqlite", ConversationBounds(turns=4))
    kept = KeptConversations(store)
    said = ["u0"]
    for number in range(1, 6):
        chat = ask(*said)
        assert await kept.opened(ANNA, chat) is chat
        await kept.closed(ANNA, chat, Message("assistant", f"a{number}"), "stop", "device")
        said += [f"a{number}", f"u{number}"]
    assert [turn.content for turn in await store.turns("a", "c1")] == ["u3", "a4", "u4", "a5"]
    await store.close()

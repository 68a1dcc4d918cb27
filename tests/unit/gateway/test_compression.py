"""Long conversations made shorter: how much is saved, what is still said, and when nothing is touched."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from attrs import evolve

from gateway.compression import HEADING, Shape, compress, extractive, message_bytes, split
from gateway.extract import extract
from protocol.chat import ChatRequest
from protocol.errors import EngineError
from protocol.text import ImagePart, Message, TextPart

SYLLABLES = ["ka", "lo", "mi", "ren", "tu", "sha", "bel", "dor", "vin", "pex", "gra", "ulm", "tes", "wob", "nir", "zed"]
CHATTER = ["Thanks", "Okay", "I see", "Good", "Fine", "Alright", "Well"]
MEANT = [
    "that helps a lot",
    "this is clear now",
    "it makes sense so far",
    "we can go on",
    "that sounds good in general",
]
LATER = ["let me think about it", "could you say a little more", "tell me the rest when ready", "what else is there"]
OPENING = ["Of course", "In general", "Most of the time", "As a rule", "Often", "For many people"]
ADVICE = [
    "it is a good idea to go step by step",
    "it helps to look at the whole picture first",
    "people do this in different ways",
    "there are many ways and none of them is wrong",
    "it is best to write things down",
    "nothing has to be perfect at once",
    "a calm start makes the rest a lot easier",
    "one thing after the other is the way to go",
]
CLOSING = [
    "so take the one that feels right",
    "and come back to it later",
    "because it depends on what one wants in the end",
    "and the rest will follow by itself",
    "even if it takes a while",
    "as long as everybody agrees",
]
FACTS = (
    "The {w} is kept in the {v} behind the {n} shelves.",
    "{W} takes {n} drops of {v} with breakfast.",
    "We settled on {v} for the {w}, {n} pieces in all.",
    "Nobody but {W} may open the {v} after {n} o'clock.",
    "My aunt's {w} broke near {V} and the repair was {n}.",
    "They moved the {w} from {V} to {W}.",
    "Its {w} is painted {v} on the inside.",
    "{V} will bring the {w} when the {v} is ready.",
)


THINGS = (
    "lamp bread river garden uncle coat window bridge letter horse kitchen wheel story paper chair basket field "
    "candle market clock ticket summer doctor pencil mirror blanket engine button ladder pocket"
)


def word(draw: random.Random) -> str:
    """Half of them everyday words, half made up."""
    if draw.random() < 0.5:
        return draw.choice(THINGS.split())
    return "".join(draw.choice(SYLLABLES) for _ in range(draw.randint(2, 3)))


def conversation(seed: int) -> tuple[ChatRequest, list[list[str]]]:
    """20 turns; one fact in each of the first 18, half of its words made up. Also the words that each is known by."""
    draw = random.Random(seed)
    messages = [Message("system", "You are a patient assistant. Answer in short sentences.")]
    facts = []
    for turn in range(20):
        parts = [f"{draw.choice(CHATTER)}, {draw.choice(MEANT)}.", f"So {draw.choice(LATER)}?"]
        if turn < 18:
            w, v, n = word(draw), word(draw), str(draw.randint(3, 900))
            template = draw.choice(FACTS)
            fact = template.format(w=w, v=v, n=n, W=w.title(), V=v.title())
            facts.append([mark for mark, name in ((w, "w"), (v, "v"), (n, "n")) if f"{{{name}}}" in template.lower()])
            parts.insert(draw.randint(0, 1), fact)
        messages.append(Message("user", " ".join(parts)))
        replies = [f"{draw.choice(OPENING)} {draw.choice(ADVICE)}, {draw.choice(CLOSING)}." for _ in range(2)]
        messages.append(Message("assistant", " ".join(replies)))
    messages.append(Message("user", "What was the first thing that I told you?"))
    return ChatRequest("m", tuple(messages)), facts


def size(chat: ChatRequest) -> int:
    return sum(map(message_bytes, chat.messages))


async def test_a_third_to_a_half_is_saved_and_the_facts_are_still_there() -> None:
    saved, kept, all_facts = [], 0, 0
    for seed in range(200):
        chat, facts = conversation(seed)
        shorter = await compress(chat, Shape())
        saved.append(1 - size(shorter) / size(chat))
        text = " ".join(message.content for message in shorter.messages).lower()
        kept += sum(all(mark in text for mark in fact) for fact in facts)
        all_facts += len(facts)
    print(f"saved {min(saved):.3f}..{max(saved):.3f}, facts {kept / all_facts:.3f}")
    assert min(saved) >= 0.35 and max(saved) <= 0.50
    assert kept >= 0.9 * all_facts


async def test_the_system_prompt_and_the_last_turns_stay_word_for_word() -> None:
    chat, _ = conversation(1)
    shorter = await compress(chat, Shape())
    assert shorter.messages[0] == chat.messages[0]
    assert shorter.messages[-4:] == chat.messages[-4:]
    assert shorter.messages[1].content.startswith(HEADING)
    assert shorter.messages[1].content.endswith(chat.messages[-5].content)
    assert [message.role for message in shorter.messages[1:]] == ["user", "assistant"] * 2 + ["user"]


@pytest.mark.parametrize("turns", [1, 3, 5])
async def test_a_short_conversation_is_left_alone(turns: int) -> None:
    chat, _ = conversation(2)
    short = evolve(chat, prompt=chat.messages[: 1 + turns])
    assert await compress(short, Shape()) is short


async def test_a_failed_summary_leaves_every_turn() -> None:
    async def failing(turns: Sequence[Message], room_bytes: int) -> str:
        raise EngineError("the summariser is gone")

    async def silent(turns: Sequence[Message], room_bytes: int) -> str:
        return "  "

    async def long(turns: Sequence[Message], room_bytes: int) -> str:
        return "x" * 100_000

    chat, _ = conversation(3)
    for summarise in (failing, silent, long):
        assert await compress(chat, Shape(), summarise) is chat


async def test_a_call_and_its_result_stay_together_or_go_together() -> None:
    chat, _ = conversation(4)
    call = {"id": "c1", "type": "function", "function": {"name": "look_up", "arguments": '{"of": "Zanzibar"}'}}
    pair = (
        Message("assistant", "", tool_calls=(call,)),
        Message("tool", "It has 1,982,000 people.", tool_call_id="c1"),
    )
    for place in range(2, len(chat.messages) + 1, 2):
        mixed = evolve(chat, prompt=(*chat.messages[:place], *pair, *chat.messages[place:]))
        shorter = await compress(mixed, Shape())
        calls = {c["id"] for message in shorter.messages for c in message.tool_calls}
        results = {message.tool_call_id for message in shorter.messages if message.role == "tool"}
        assert calls == results
        text = " ".join(message.content for message in shorter.messages)
        assert "1,982,000" in text


async def test_turns_with_pictures_are_not_summarised_away() -> None:
    chat, _ = conversation(5)
    picture = Message("user", "look", parts=(TextPart("look"), ImagePart("image/png", b"x")))
    mixed = evolve(chat, prompt=(*chat.messages[:3], picture, *chat.messages[3:]))
    assert await compress(mixed, Shape()) is mixed


async def test_a_small_context_gets_what_it_can_hold() -> None:
    chat, _ = conversation(6)
    shorter = await compress(chat, Shape(), extractive, 1_500)
    assert size(shorter) <= 1_500
    assert await compress(chat, Shape(), extractive, 300) is chat


def test_nothing_is_made_up_and_nothing_is_over_the_room() -> None:
    chat, _ = conversation(7)
    _, older, _ = split(chat.messages, 2)
    said = " ".join(message.content for message in older)
    for room in (0, 50, 400, 2_000, 100_000):
        summary = extract(older, room)
        assert len(summary.encode()) <= room
        for line in summary.splitlines():
            assert all(part in said for part in line.split(": ", 1)[1].split(". "))


def test_chinese_turns_are_split_at_their_own_full_stops() -> None:
    turns = [Message("user", "谢谢你。我住在成都的第3条街。好的。"), Message("assistant", "没问题。")]
    assert "我住在成都的第3条街。" in extract(turns, 60)

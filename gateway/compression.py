"""A long conversation made shorter for a target that has not read it: a summary, then the last turns as they were.

The system prompt stays, tool calls and their results stay or go together, and a summary that fails or saves nothing
leaves everything as it was: history is never dropped in silence (NousResearch/hermes-agent#25585).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from attrs import evolve, frozen

from gateway.extract import extract
from protocol.chat import ChatRequest
from protocol.errors import MidstreamError
from protocol.text import Message

BYTES_PER_TOKEN = 4
KEPT_TURNS = 2
"""User turns, with what followed each, that stay word for word before the present one."""

HEADING = "Earlier in this conversation, shortened:"
LEAST_SAVING_RATIO = 0.1
"""A summary that saves less than this is not worth a changed prompt."""

Summarise = Callable[[Sequence[Message], int], Awaitable[str]]
"""(older turns, room in bytes) -> their summary. Raises MidstreamError when it cannot."""


@frozen
class Shape:
    """How short a conversation is made.

    keep_ratio: share of all bytes that is sent. min_bytes: shorter conversations are left alone. kept_turns: see above.
    """

    keep_ratio: float = 0.58
    min_bytes: int = 2_000
    kept_turns: int = KEPT_TURNS


async def extractive(turns: Sequence[Message], room_bytes: int) -> str:
    """The default summary: the sentences that carry facts (gateway/extract.py)."""
    return extract(turns, room_bytes)


def message_bytes(message: Message) -> int:
    """UTF-8 bytes of a turn's text and tool calls."""
    calls = sum(len(str(call)) for call in message.tool_calls)
    return len(message.content.encode("utf-8", "surrogatepass")) + calls


def split(messages: Sequence[Message], kept_turns: int) -> tuple[list[Message], list[Message], list[Message]]:
    """(system prompt, older turns, turns that stay); these begin at a user turn. Older is empty where all is short."""
    head = 0
    while head < len(messages) and messages[head].role in ("system", "developer"):
        head += 1
    users = [place for place in range(head, len(messages)) if messages[place].role == "user"]
    if len(users) <= kept_turns + 1:
        return list(messages[:head]), [], list(messages[head:])
    cut = users[-(kept_turns + 1)]
    return list(messages[:head]), list(messages[head:cut]), list(messages[cut:])


async def compress(
    chat: ChatRequest, shape: Shape, summarise: Summarise = extractive, most_bytes: int = 0
) -> ChatRequest:
    """The request with its older turns summarised; the same object when that would not help.

    most_bytes: the target takes no more than this (0: any); then the summary gets what is left, if that is anything.
    """
    messages = chat.messages
    total_bytes = sum(map(message_bytes, messages))
    system, older, kept = split(messages, shape.kept_turns)
    if not older or total_bytes < shape.min_bytes or any(message.parts for message in older):
        return chat
    aim_bytes = int(total_bytes * shape.keep_ratio)
    aim_bytes = min(aim_bytes, most_bytes) if most_bytes else aim_bytes
    room_bytes = aim_bytes - sum(map(message_bytes, [*system, *kept])) - len(HEADING) - 2
    if room_bytes <= 0:
        return chat
    try:
        summary = (await summarise(older, room_bytes)).strip()
    except MidstreamError:
        return chat
    if not summary:
        return chat
    first = evolve(kept[0], content=f"{HEADING}\n{summary}\n\n{kept[0].content}")
    shorter = evolve(chat, prompt=(*system, first, *kept[1:]))
    saved_bytes = total_bytes - sum(map(message_bytes, shorter.messages))
    return shorter if saved_bytes >= LEAST_SAVING_RATIO * total_bytes else chat


def saved_tokens(before: ChatRequest, after: ChatRequest) -> int:
    """Rough number of prompt tokens that were not sent."""
    saved_bytes = sum(map(message_bytes, before.messages)) - sum(map(message_bytes, after.messages))
    return max(0, saved_bytes) // BYTES_PER_TOKEN

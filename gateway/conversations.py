"""Histories by conversation id: put before a new turn, and said shorter when another target is to read them."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import evolve, field, frozen

from gateway.compression import (
    BYTES_PER_TOKEN,
    Shape,
    Summarise,
    compress,
    extractive,
    message_bytes,
    saved_tokens,
)
from gateway.context import Caller
from gateway.conversation_store import MAX_ID_CHARS, MAX_TURN_BYTES, ConversationStore
from gateway.ports import Compressed
from protocol.chat import ChatRequest
from protocol.errors import BadRequest, TooLarge
from protocol.text import FinishReason, Message


@frozen
class KeptConversations:
    """The Conversations port over a store. A request without `conversation_id` keeps nothing and is only shortened when
    it would not fit.

    summarise: makes the summary; the extractive one by default, a model's where one is configured.
    """

    store: ConversationStore
    shape: Shape = field(factory=Shape)
    summarise: Summarise = extractive

    async def opened(self, caller: Caller, chat: ChatRequest) -> ChatRequest:
        """The request with its conversation before it. A client that sends the whole history itself is believed.

        Raises BadRequest for an id, TooLarge for a turn that cannot be kept.
        """
        if not caller.conversation_id or chat.endpoint != "chat":
            return chat
        _check(caller.conversation_id, chat.messages)
        kept = await self.store.turns(caller.tenant, caller.conversation_id)
        system, said = _parted(chat.messages)
        if not kept or _repeats(said, kept):
            return chat
        return evolve(chat, prompt=(*system, *kept, *said))

    async def compressed(self, caller: Caller, chat: ChatRequest, target: str, context_tokens: int) -> Compressed:
        """Shorter when `target` is another than the one that read this conversation last, or holds less than it."""
        most_bytes = context_tokens * BYTES_PER_TOKEN
        too_long = bool(most_bytes) and _size(chat) > most_bytes
        if not too_long and not await self._moved(caller, target):
            return Compressed(chat)
        shorter = await compress(chat, self.shape, self.summarise, most_bytes if too_long else 0)
        return Compressed(shorter, saved_tokens(chat, shorter))

    async def _moved(self, caller: Caller, target: str) -> bool:
        if not caller.conversation_id:
            return False
        last = await self.store.target(caller.tenant, caller.conversation_id)
        return last is not None and last != target

    async def closed(
        self, caller: Caller, chat: ChatRequest, answer: Message, finish: FinishReason | None, target: str
    ) -> None:
        """Keep what was asked and answered; an answer that was cut leaves the conversation as it was."""
        if not caller.conversation_id or chat.endpoint != "chat" or finish is None:
            return
        kept = await self.store.turns(caller.tenant, caller.conversation_id)
        _, said = _parted(chat.messages)
        fresh = said[len(kept) :] if _repeats(said, kept) else said
        await self.store.extend(caller.tenant, caller.conversation_id, (*fresh, answer), target)


def _check(conversation_id: str, messages: Sequence[Message]) -> None:
    if len(conversation_id) > MAX_ID_CHARS:
        raise BadRequest(
            f"conversation_id has {len(conversation_id)} characters, {MAX_ID_CHARS} at most",
            next_step="use a shorter id",
            field="conversation_id",
        )
    longest_bytes = max(map(message_bytes, messages), default=0)
    if longest_bytes > MAX_TURN_BYTES:
        raise TooLarge(
            f"a message of {longest_bytes} bytes is too long for a kept conversation, {MAX_TURN_BYTES} at most",
            next_step="shorten it, or send it without conversation_id",
            field="messages",
        )


def _parted(messages: Sequence[Message]) -> tuple[tuple[Message, ...], tuple[Message, ...]]:
    """(system prompt, the rest). The system prompt is the request's own and never kept."""
    head = 0
    while head < len(messages) and messages[head].role in ("system", "developer"):
        head += 1
    return tuple(messages[:head]), tuple(messages[head:])


def _repeats(said: Sequence[Message], kept: Sequence[Message]) -> bool:
    """Whether the client sent the kept history itself."""
    return len(said) > len(kept) > 0 and all(
        (one.role, one.content) == (other.role, other.content) for one, other in zip(said, kept, strict=False)
    )


def _size(chat: ChatRequest) -> int:
    return sum(map(message_bytes, chat.messages))

"""Histories by conversation id: what was said is put before a new turn, and said shorter when another target reads it."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import evolve, frozen

from gateway.compression import BYTES_PER_TOKEN, Shape, Summarise, compress, extractive, saved_tokens
from gateway.context import Caller
from gateway.conversation_store import ConversationStore
from gateway.ports import Compressed
from protocol.chat import ChatRequest
from protocol.text import FinishReason, Message


@frozen
class KeptConversations:
    """The Conversations port over a store. A request without `conversation_id` keeps nothing and is only shortened when
    it would not fit.

    summarise: makes the summary; the extractive one by default, a model's where one is configured.
    """

    store: ConversationStore
    shape: Shape = Shape()
    summarise: Summarise = extractive

    async def opened(self, caller: Caller, chat: ChatRequest) -> ChatRequest:
        """The request with its conversation before it. A client that sends the whole history itself is believed."""
        if not caller.conversation_id or chat.endpoint != "chat":
            return chat
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
        self,
        caller: Caller,
        chat: ChatRequest,
        answer: str,
        finish: FinishReason | None,
        sides: Sequence[tuple[str, int]],
    ) -> None:
        """Keep what was asked and answered; an answer that was cut leaves the conversation as it was."""
        if not caller.conversation_id or chat.endpoint != "chat" or finish is None or finish == "tool_calls":
            return
        kept = await self.store.turns(caller.tenant, caller.conversation_id)
        _, said = _parted(chat.messages)
        fresh = said[len(kept) :] if _repeats(said, kept) else said
        target = sides[-1][0] if sides else ""
        turns = (*fresh, Message("assistant", answer))
        await self.store.extend(caller.tenant, caller.conversation_id, turns, target)


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
    return sum(len(message.content.encode("utf-8", "surrogatepass")) for message in chat.messages)

"""Histories by conversation id: put before a new turn, and said shorter when another target is to read them."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

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
from gateway.conversation_store import MAX_ID_CHARS, MAX_TURN_BYTES, ConversationStore, joined
from gateway.ports import Compressed
from protocol.chat import ChatRequest
from protocol.errors import BadRequest, ConfigError, Full, TooLarge
from protocol.text import FinishReason, Message

log = logging.getLogger("midstream.gateway.conversations")

RETRY_S = 10.0
"""A disk that is full or gone is seldom back sooner."""


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

        Raises BadRequest for an id, TooLarge for a turn that cannot be kept, Full where the history cannot be read: an
        answer that forgot it in silence would be worse than none.
        """
        if not caller.conversation_id or chat.endpoint != "chat":
            return chat
        _check(caller.conversation_id, chat.messages)
        with _readable():
            kept = await self.store.turns(caller.tenant, caller.conversation_id)
        system, said = _parted(chat.messages)
        turns = joined(kept, said)
        return chat if len(turns) == len(said) else evolve(chat, prompt=(*system, *turns))

    async def stays(self, caller: Caller, chat: ChatRequest) -> str:
        """Why an earlier turn keeps all of the conversation here. Raises Full where that cannot be read."""
        if not caller.conversation_id or chat.endpoint != "chat":
            return ""
        with _readable():
            return await self.store.stays(caller.tenant, caller.conversation_id)

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
        with _readable():
            last = await self.store.target(caller.tenant, caller.conversation_id)
        return last is not None and last != target

    async def closed(
        self,
        caller: Caller,
        chat: ChatRequest,
        answer: Message,
        finish: FinishReason | None,
        target: str,
        stays: str = "",
    ) -> None:
        """Keep what was asked and answered; an answer that was cut leaves the conversation as it was."""
        if not caller.conversation_id or chat.endpoint != "chat" or finish is None:
            return
        _, said = _parted(chat.messages)
        try:
            await self.store.extend(caller.tenant, caller.conversation_id, (*said, answer), target, stays)
        except ConfigError as err:
            log.warning("a turn of a conversation is not kept: %s", err)


@contextmanager
def _readable() -> Iterator[None]:
    """The operator reads what is wrong with the disk, the client that it may come back."""
    try:
        yield
    except ConfigError as err:
        log.warning("conversations cannot be read: %s", err)
        raise Full(
            "the conversation cannot be read now",
            retry_after_s=RETRY_S,
            next_step="try again later, or send its turns yourself without conversation_id",
        ) from err


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


def _size(chat: ChatRequest) -> int:
    return sum(map(message_bytes, chat.messages))

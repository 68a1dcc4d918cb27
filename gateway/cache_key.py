"""What makes two requests the same for the cache: everything that shapes the answer, and who asked; pure."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import attrs
from attrs import frozen

from gateway.ports import CacheKey
from protocol.chat import ChatRequest

KEY_VERSION = 1
"""Raised when the meaning of a key changes: entries under older keys are then never found and age out."""

OUTSIDE = ("prompt", "stream", "include_usage", "user")
"""Fields that do not shape the text of an answer, and the prompt, which is split; new fields count."""

MAX_SEMANTIC_CHARS = 2_000
"""Longer questions are looked up exactly only: a vector of a page says little about what it asks."""


@frozen
class LookupKey:
    """exact: names the whole request. scope: names all of it but the last user turn. question: that turn's text, or
    empty where no semantic lookup may happen."""

    exact: str
    scope: str
    question: str


def lookup_key(key: CacheKey, embedder_id: str) -> LookupKey:
    """The key of a request in its final form: model chosen, overrides made, turns as they are sent.

    A tenant never meets another's entries, nor one embedder's vectors another's. The shape of the answer (streamed or
    not, usage asked for) is no part of it. Pictures count by their bytes through the message's own fields.
    """
    chat = key.chat
    question = _question(chat)
    shared = {name.name: _plain(getattr(chat, name.name)) for name in attrs.fields(ChatRequest)}
    for name in OUTSIDE:
        shared.pop(name, None)
    shared |= {"version": KEY_VERSION, "tenant": key.tenant, "embedder": embedder_id}
    turns = _plain(chat.prompt)
    before = turns[:-1] if question and isinstance(turns, list) else turns
    return LookupKey(
        exact=_digest(shared | {"prompt": turns}),
        scope=_digest(shared | {"prompt": before, "semantic": True}),
        question=question,
    )


def _question(chat: ChatRequest) -> str:
    """The last user turn of a chat; empty for anything that a vector does not describe."""
    if chat.endpoint != "chat" or not chat.messages or chat.tools:
        return ""
    last = chat.messages[-1]
    plain = last.role == "user" and not last.parts
    return last.content if plain and 0 < len(last.content) <= MAX_SEMANTIC_CHARS else ""


def _plain(value: Any) -> Any:
    """JSON-ready, in one form only: mappings by sorted key, sets sorted, bytes by their digest."""
    if attrs.has(type(value)):
        return {name.name: _plain(getattr(value, name.name)) for name in attrs.fields(type(value))}
    if hasattr(value, "items"):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted(map(str, value))
    if isinstance(value, (bytes, bytearray, memoryview)):
        return hashlib.sha256(value).hexdigest()
    return value


def _digest(document: dict[str, Any]) -> str:
    text = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()

"""The texts of a request by their places, and the request with other texts in them. Pure.

Texts are: the prompt or each turn, the arguments of tool calls, tool definitions and the schema of the answer. Of JSON
the strings count, and whole numbers long enough to be a number of somebody.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from attrs import evolve

from protocol.chat import ChatRequest
from protocol.text import Message, TextPart

LEAST_NUMBER = 1_000_000
"""Whole numbers from here on have seven digits, like the shortest phone number."""

Change = Callable[[str, str], str]
"""(path, text) -> the text that stands there now; the same object where nothing changes."""


def texts(chat: ChatRequest) -> Iterator[tuple[str, str]]:
    """(path, text) of every text, in order. Token ids have none."""
    if isinstance(chat.prompt, str):
        yield "prompt", chat.prompt
        return
    for at, message in enumerate(chat.prompt):
        if isinstance(message, Message):
            yield from _of_message(message, f"messages[{at}]")
    for at, tool in enumerate(chat.tools):
        yield from _leaves(tool, f"tools[{at}]")
    if chat.response_format is not None:
        yield from _leaves(chat.response_format, "response_format")


def joined(chat: ChatRequest) -> str:
    """All texts of a request, a line break between them."""
    if not (isinstance(chat.prompt, str) or chat.tools) and chat.response_format is None:
        plain = [item.content for item in chat.prompt if type(item) is Message and not _more(item)]
        if len(plain) == len(chat.prompt):
            return "\n".join(plain)
    return "\n".join([text for _, text in texts(chat)])


def _more(message: Message) -> bool:
    """Whether it holds texts besides its content."""
    return bool(message.parts or message.name or message.tool_calls)


def with_texts(chat: ChatRequest, changed: Mapping[str, str]) -> ChatRequest:
    """The request with `changed` texts at their paths; everything else stays as it is."""

    def change(path: str, text: str) -> str:
        return changed.get(path, text)

    if isinstance(chat.prompt, str):
        return evolve(chat, prompt=change("prompt", chat.prompt))
    prompt = tuple(
        _message(item, f"messages[{at}]", change) if isinstance(item, Message) else item
        for at, item in enumerate(chat.prompt)
    )
    tools = tuple(_map(tool, f"tools[{at}]", change) for at, tool in enumerate(chat.tools))
    answer = None if chat.response_format is None else _map(chat.response_format, "response_format", change)
    return evolve(chat, prompt=prompt, tools=tools, response_format=answer)  # type: ignore[arg-type]


def _of_message(message: Message, path: str) -> Iterator[tuple[str, str]]:
    if message.parts:
        for at, part in enumerate(message.parts):
            if isinstance(part, TextPart):
                yield f"{path}.parts[{at}]", part.text
    else:
        yield path, message.content
    if message.name:
        yield f"{path}.name", message.name
    for at, call in enumerate(message.tool_calls):
        here = f"{path}.tool_calls[{at}].arguments"
        arguments = _parsed(call)
        if arguments is None:
            yield here, str(call["function"]["arguments"])
        else:
            yield from _leaves(arguments, here)


def _message(message: Message, path: str, change: Change) -> Message:
    parts = tuple(
        TextPart(change(f"{path}.parts[{at}]", part.text)) if isinstance(part, TextPart) else part
        for at, part in enumerate(message.parts)
    )
    joined = "\n".join(part.text for part in parts if isinstance(part, TextPart))
    calls = tuple(
        _call(call, f"{path}.tool_calls[{at}].arguments", change) for at, call in enumerate(message.tool_calls)
    )
    content = joined if parts else change(path, message.content)
    name = change(f"{path}.name", message.name) if message.name else message.name
    return evolve(message, content=content, name=name, parts=parts, tool_calls=calls)


def _call(call: Mapping[str, Any], path: str, change: Change) -> Mapping[str, Any]:
    """The call with changed arguments; their JSON text stays as it was written when nothing in it changes."""
    before = _parsed(call)
    if before is None:
        written = change(path, str(call["function"]["arguments"]))
    else:
        after = _map(before, path, change)
        written = call["function"]["arguments"] if after == before else json.dumps(after, ensure_ascii=False)
    return {**call, "function": {**call["function"], "arguments": written}}


def _parsed(call: Mapping[str, Any]) -> Any:
    """Arguments as JSON; None when they are none (a small model wrote them) and have to be read as text."""
    try:
        return json.loads(call["function"]["arguments"])
    except (ValueError, RecursionError):
        return None


def _leaves(value: Any, path: str) -> Iterator[tuple[str, str]]:
    """Strings and long numbers inside JSON; paths count them in order, as `_map` does."""
    for at, leaf in enumerate(_walk(value)):
        yield f"{path}#{at}", leaf


def _walk(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _walk(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _walk(item)
    elif _is_long(value):
        yield str(value)


def _map(value: Any, path: str, change: Change) -> Any:
    seen = 0

    def renew(item: Any) -> Any:
        nonlocal seen
        if isinstance(item, str) or _is_long(item):
            text = item if isinstance(item, str) else str(item)
            now = change(f"{path}#{seen}", text)
            seen += 1
            return item if now == text else now
        if isinstance(item, Mapping):
            return {key: renew(below) for key, below in item.items()}
        return [renew(below) for below in item] if isinstance(item, (list, tuple)) else item

    return renew(value)


def _is_long(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) >= LEAST_NUMBER

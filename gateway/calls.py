"""Tool calls out of the text of models that write them as text, piece by piece. Pure.

Taken are calls between the marks that open models use (`<tool_call>`, `[TOOL_CALLS]`, `<|python_tag|>`) and an answer
that is a call and nothing else, each as `{"name": ..., "arguments": {...}}` (`parameters` is taken for `arguments`).
Arguments go out as they come. What turns out to be no call is text after all, and nothing here ever raises for it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal

from attrs import define

from protocol.chat import tool_call
from protocol.text import CallDelta

OPENINGS = ("<tool_call>", "[TOOL_CALLS]", "<|python_tag|>")
CLOSING = "</tool_call>"
MAX_HEAD_CHARS = 512
"""A name and its key are shorter; a longer beginning is read as a whole."""
MAX_WHOLE_CHARS = 256 << 10
MAX_CALLS = 64

_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"\\]{1,128})"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=[{"])')
_BARE = '{"name":"'
_SEPARATORS = " \t\r\n,;[]"

Part = str | CallDelta
State = Literal["text", "head", "arguments", "whole", "between"]


@define
class Call:
    """A call as far as it was written. whole: its JSON was seen to end; such engines end by themselves otherwise."""

    id: str
    name: str
    arguments: str = ""
    whole: bool = False

    def message_call(self) -> Mapping[str, Any]:
        """The call as a turn of a conversation carries it."""
        return tool_call(self.id, self.name, self.arguments)

    def parsed(self) -> Mapping[str, Any] | None:
        """The arguments as an object; None when they are none, as when the answer was cut in them."""
        try:
            found = json.loads(self.arguments or "{}")
        except ValueError:
            return None
        return found if isinstance(found, dict) else None


class CallScanner:
    """Feed text, take text and pieces of calls in order; `calls` has all of them.

    Args:
        names: functions that may be called; an answer without marks is a call only with one of these names.
        new_id: makes ids for calls that have none.
    """

    def __init__(self, names: Collection[str], new_id: Callable[[int], str]) -> None:
        self.calls: list[Call] = []
        self._names = frozenset(names)
        self._new_id = new_id
        self._state: State = "text"
        self._told: dict[int, int] = {}
        self._held = ""
        self._begun = False
        self._opening = ""
        self._nesting = _Nesting()
        self._followed = 0
        self._as_text = False

    @property
    def broken(self) -> tuple[int, ...]:
        """Calls whose arguments are no JSON object."""
        return tuple(number for number, call in enumerate(self.calls) if call.parsed() is None)

    def take(self, delta: CallDelta) -> CallDelta:
        """A piece of a call that an engine told apart by itself, numbered in order; id and name on its first piece."""
        first = delta.index not in self._told
        number = self._told.setdefault(delta.index, len(self.calls))
        if first:
            self.calls.append(Call(delta.id or self._new_id(number), delta.name))
        call = self.calls[number]
        call.arguments += delta.arguments
        return CallDelta(number, call.id if first else "", call.name if first else "", delta.arguments)

    def feed(self, text: str) -> list[Part]:
        """What `text` settles."""
        self._held += text
        parts: list[Part] = []
        while self._step(parts):
            pass
        return parts

    def flush(self) -> list[Part]:
        """The end of the answer: what was held is text after all; a call under way stays as it is."""
        parts: list[Part] = []
        while self._state in ("head", "whole") and not self._whole_call(self._held, parts):
            self._no_call(parts)
            while self._step(parts):
                pass
        if self._state == "text" and self._held:
            parts.append(self._held)
        elif self._state == "arguments" and self._as_text:
            self._call_from_text(parts)
        self._held, self._opening, self._state = "", "", "text"
        return parts

    def _no_call(self, parts: list[Part]) -> None:
        """The mark was text; what follows it is looked at again."""
        if self._opening:
            parts.append(self._opening)
        self._opening, self._begun = "", True
        self._enter("text")

    def _step(self, parts: list[Part]) -> bool:
        """One step; True when another one may follow."""
        if not self._held:
            return False
        steps = {
            "text": self._in_text, "head": self._in_head, "arguments": self._in_arguments, "whole": self._in_whole,
            "between": self._between,
        }  # fmt: skip
        return steps[self._state](parts)

    def _in_text(self, parts: list[Part]) -> bool:
        if not self._begun and (bare := self._bare()) != "no":
            if bare == "yes":
                self._state = "head"
            return bare == "yes"
        found = [(at, mark) for mark in OPENINGS if (at := self._held.find(mark)) >= 0]
        if found:
            at, mark = min(found)
            self._say(self._held[:at], parts)
            self._held, self._opening, self._state = self._held[at + len(mark) :], mark, "head"
            return True
        keep = max((n for mark in OPENINGS for n in range(1, len(mark)) if self._held.endswith(mark[:n])), default=0)
        self._say(self._held[: len(self._held) - keep], parts)
        self._held = self._held[len(self._held) - keep :]
        return False

    def _say(self, text: str, parts: list[Part]) -> None:
        if text:
            self._begun = self._begun or bool(text.strip())
            parts.append(text)

    def _bare(self) -> Literal["yes", "maybe", "no"]:
        """Whether the whole answer is a call without marks."""
        compact = re.sub(r"\s+", "", self._held[:MAX_HEAD_CHARS])
        if not compact or _BARE.startswith(compact):
            return "maybe" if len(self._held) < MAX_HEAD_CHARS else "no"
        if not compact.startswith(_BARE):
            return "no"
        head = _HEAD.match(self._held)
        if head is not None:
            return "yes" if head.group(1) in self._names else "no"
        return "maybe" if len(self._held) < MAX_HEAD_CHARS else "no"

    def _in_head(self, parts: list[Part]) -> bool:
        stripped = self._held.lstrip(_SEPARATORS)
        self._opening += self._held[: len(self._held) - len(stripped)]
        self._held = stripped
        head = _HEAD.match(self._held)
        if head is not None and len(self.calls) < MAX_CALLS:
            self._open(head.group(1), parts)
            self._held = self._held[head.end() :]
            self._as_text = self._held.startswith('"')
            self._enter("arguments", 1)
            return True
        if len(self._held) >= MAX_HEAD_CHARS or self._no_object() or _Nesting().follow(self._held) is not None:
            self._enter("whole")
            return True
        return False

    def _no_object(self) -> bool:
        return bool(self._held) and not self._held.startswith("{")

    def _open(self, name: str, parts: list[Part]) -> None:
        number = len(self.calls)
        self.calls.append(Call(self._new_id(number), name))
        parts.append(CallDelta(number, self.calls[-1].id, name))
        self._begun = True

    def _in_arguments(self, parts: list[Part]) -> bool:
        end = self._nesting.follow(self._held[self._followed :], 1)
        end = None if end is None else end + self._followed
        if self._as_text:
            self._followed = len(self._held)
            if end is None:
                return False
            text, self._held = self._held[:end], self._held[end:]
            self._call_from_text(parts, text)
        else:
            text, self._held = (self._held, "") if end is None else (self._held[:end], self._held[end:])
            self._argue(text, parts)
            if end is None:
                return False
        self.calls[-1].whole = True
        self._enter("between", 1)
        return True

    def _enter(self, state: State, depth: int = 0) -> None:
        self._state, self._nesting, self._followed = state, _Nesting(depth), 0

    def _argue(self, text: str, parts: list[Part]) -> None:
        if text:
            self.calls[-1].arguments += text
            parts.append(CallDelta(len(self.calls) - 1, arguments=text))

    def _call_from_text(self, parts: list[Part], text: str | None = None) -> None:
        """Arguments that are a JSON text in a JSON string, as some models write them."""
        raw = self._held if text is None else text
        try:
            self._argue(str(json.loads(raw)), parts)
        except ValueError:
            self._argue(raw, parts)

    def _between(self, parts: list[Part]) -> bool:
        """After a call's arguments: its closing brace and mark go, another call or text may follow."""
        if self._nesting.depth:
            end = self._nesting.follow(self._held)
            self._held = "" if end is None else self._held[end:]
            return end is not None
        self._held = self._held.lstrip(_SEPARATORS)
        for mark in (CLOSING, *OPENINGS):
            if self._held.startswith(mark):
                self._held = self._held[len(mark) :]
                return True
            if mark.startswith(self._held):
                return False
        self._state = "head" if self._held.startswith("{") else "text"
        self._opening = ""
        return True

    def _in_whole(self, parts: list[Part]) -> bool:
        end = self._nesting.follow(self._held[self._followed :])
        end = None if end is None else end + self._followed
        self._followed = len(self._held)
        if end is None and len(self._held) < MAX_WHOLE_CHARS and not self._no_object():
            return False
        body, rest = (self._held, "") if end is None else (self._held[:end], self._held[end:])
        if self._whole_call(body, parts):
            self._enter("between")
            self._held = rest
            return True
        self._no_call(parts)
        return True

    def _whole_call(self, body: str, parts: list[Part]) -> bool:
        try:
            found = json.loads(body)
        except ValueError:
            return False
        if not isinstance(found, dict) or not isinstance(found.get("name"), str) or len(self.calls) >= MAX_CALLS:
            return False
        arguments = found.get("arguments", found.get("parameters"))
        self._open(found["name"], parts)
        self._argue(arguments if isinstance(arguments, str) else json.dumps(arguments or {}), parts)
        self.calls[-1].whole = True
        return True


class _Nesting:
    """Follows braces of JSON text over pieces; `depth` objects and lists are open."""

    def __init__(self, depth: int = 0) -> None:
        self.depth = depth
        self._quoted = False
        self._escaped = False

    def follow(self, text: str, floor: int = 0) -> int | None:
        """Where `text` comes down to `floor` open ones, or ends a string there; None when it goes on."""
        for at, char in enumerate(text):
            if self._see(char) and self.depth <= floor and not self._quoted:
                return at + 1
        return None

    def _see(self, char: str) -> bool:
        """Whether `char` closed something."""
        if self._quoted:
            self._quoted = self._escaped or char != '"'
            self._escaped = char == "\\" and not self._escaped
            return not self._quoted
        if char == '"':
            self._quoted = True
        elif char in "{[":
            self.depth += 1
        elif char in "}]":
            self.depth = max(0, self.depth - 1)
            return True
        return False

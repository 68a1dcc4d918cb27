"""GBNF grammars (llama.cpp's notation) as state machines: what may follow a text, as a grammar again. Pure.

A grammar that constrains an answer must not begin anew where another engine goes on with it: `rest(grammar, text)` is
the grammar of everything that completes `text`. A state is a set of stacks, as in llama.cpp's own sampler.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from attrs import define, field, frozen

from protocol.errors import BadRequest, Unsupported

MAX_GRAMMAR_CHARS = 256 << 10
MAX_STACKS = 1024
"""States of one place of a text; more come from grammars that are ambiguous without end."""

MAX_REPEAT = 1000
MAX_DEPTH = 64
_LAST_CHAR = 0x10FFFF
_NAME = re.compile(r"[A-Za-z0-9_-]+")
_BLANK = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_BLANK_IN_LINE = re.compile(r"(?:[ \t]|#[^\n]*)*")
_TIMES = re.compile(r"\{\s*(\d+)\s*(,)?\s*(\d+)?\s*\}")
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t"}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}


@frozen
class Chars:
    """One character out of ascending ranges, or out of all others."""

    ranges: tuple[tuple[int, int], ...]
    negated: bool = False

    def takes(self, char: str) -> bool:
        """Whether `char` fits."""
        return any(low <= ord(char) <= high for low, high in self.ranges) is not self.negated


@frozen
class Ref:
    """Another rule, by number."""

    rule: int


Element = Chars | Ref
Alternative = tuple[Element, ...]
Stack = tuple[tuple[Alternative, int], "Stack"] | None
"""What is left to match: the top is an alternative and how far it was matched; None: everything was."""


@frozen
class Grammar:
    """Alternatives by rule number; rule 0 is the root."""

    rules: tuple[tuple[Alternative, ...], ...]

    def start(self) -> frozenset[Stack]:
        """The state before the first character."""
        return self._open([((alternative, 0), None) for alternative in self.rules[0]])

    def after(self, state: Iterable[Stack], text: str) -> frozenset[Stack]:
        """The state after `text`; empty when the grammar does not allow it. Raises Unsupported for endless states."""
        now = frozenset(state)
        for char in text:
            now = self._open([_behind(stack) for stack in now if stack is not None and _takes(stack, char)])
            if not now:
                break
        return now

    def _open(self, stacks: Sequence[Stack]) -> frozenset[Stack]:
        """The same stacks with a character, or nothing, on top."""
        found: set[Stack] = set()
        seen: set[Stack] = set()
        waiting = list(stacks)
        while waiting:
            stack = waiting.pop()
            if stack in seen:
                continue
            seen.add(stack)
            if len(seen) > MAX_STACKS:
                raise Unsupported("this grammar has too many readings of one text", field="grammar")
            if stack is None:
                found.add(stack)
                continue
            (alternative, at), rest = stack
            if at == len(alternative):
                waiting.append(rest)
                continue
            top = alternative[at]
            if isinstance(top, Chars):
                found.add(stack)
                continue
            behind: Stack = ((alternative, at + 1), rest) if at + 1 < len(alternative) else rest
            waiting += [((inner, 0), behind) for inner in self.rules[top.rule]]
        return frozenset(found)


def _takes(stack: tuple[tuple[Alternative, int], Stack], char: str) -> bool:
    top = stack[0][0][stack[0][1]]
    return isinstance(top, Chars) and top.takes(char)


def _behind(stack: tuple[tuple[Alternative, int], Stack]) -> Stack:
    (alternative, at), rest = stack
    return ((alternative, at + 1), rest) if at + 1 < len(alternative) else rest


def rest(grammar: str, text: str) -> str:
    """The grammar of what may follow `text`, in GBNF.

    Raises BadRequest when `grammar` is none or does not allow `text`, Unsupported when its states have no end.
    """
    parsed = parse(grammar)
    state = parsed.after(parsed.start(), text)
    if not state:
        raise BadRequest("the answer so far does not fit its grammar", field="grammar")
    # The same order each time.
    tails = sorted({_flat(stack) for stack in state}, key=_shown)
    root = " | ".join(_shown(tail) for tail in tails)
    lines = [f"root ::= {root}"]
    for number in _needed(parsed, tails):
        lines.append(f"r{number} ::= " + " | ".join(_shown(one) for one in parsed.rules[number]))
    return "\n".join(lines) + "\n"


def _flat(stack: Stack) -> Alternative:
    found: list[Element] = []
    while stack is not None:
        (alternative, at), stack = stack
        found += alternative[at:]
    return tuple(found)


def _needed(grammar: Grammar, tails: Iterable[Alternative]) -> list[int]:
    found: set[int] = set()
    waiting = [one.rule for tail in tails for one in tail if isinstance(one, Ref)]
    while waiting:
        rule = waiting.pop()
        if rule not in found:
            found.add(rule)
            waiting += [one.rule for tail in grammar.rules[rule] for one in tail if isinstance(one, Ref)]
    return sorted(found)


def _shown(alternative: Alternative) -> str:
    """An alternative as GBNF; single characters in a row become one literal."""
    parts: list[str] = []
    literal = ""
    for one in alternative:
        single = isinstance(one, Chars) and not one.negated and one.ranges and one.ranges[0][0] == one.ranges[-1][1]
        if isinstance(one, Chars) and single:
            literal += _escaped(one.ranges[0][0])
            continue
        if literal:
            parts.append(f'"{literal}"')
            literal = ""
        parts.append(f"r{one.rule}" if isinstance(one, Ref) else _class(one))
    if literal or not parts:
        parts.append(f'"{literal}"')
    return " ".join(parts)


def _class(chars: Chars) -> str:
    shown = "".join(_escaped(low) + (f"-{_escaped(high)}" if high > low else "") for low, high in chars.ranges)
    return f"[{'^' if chars.negated else ''}{shown}]"


def _escaped(code: int) -> str:
    if chr(code).isalnum() and code < 0x80:
        return chr(code)
    return f"\\x{code:02X}" if code < 0x80 else (f"\\u{code:04X}" if code <= 0xFFFF else f"\\U{code:08X}")


def parse(text: str) -> Grammar:
    """Read GBNF. Raises BadRequest with the place, Unsupported for grammars in another notation."""
    if len(text) > MAX_GRAMMAR_CHARS:
        raise BadRequest(f"a grammar has at most {MAX_GRAMMAR_CHARS} characters", field="grammar")
    if text.lstrip().startswith("%llguidance"):
        raise Unsupported("this grammar is not GBNF", field="grammar")
    return _Parser(text).grammar()


@define
class _Parser:
    text: str
    at: int = 0
    numbers: dict[str, int] = field(factory=dict)
    rules: dict[int, tuple[Alternative, ...]] = field(factory=dict)

    def grammar(self) -> Grammar:
        self._number("root")
        self._skip(_BLANK)
        while self.at < len(self.text):
            name = self._name()
            self._skip(_BLANK_IN_LINE)
            self._expect("::=")
            self._skip(_BLANK)
            self.rules[self._number(name)] = self._alternatives(0)
            self._skip(_BLANK)
        missing = [name for name, number in self.numbers.items() if number not in self.rules]
        if missing:
            raise BadRequest(f"the grammar has no rule {missing[0]!r}", field="grammar")
        return Grammar(tuple(self.rules[number] for number in range(len(self.rules))))

    def _number(self, name: str) -> int:
        return self.numbers.setdefault(name, len(self.numbers))

    def _new(self, alternatives: tuple[Alternative, ...]) -> Ref:
        number = self._number(f" {len(self.numbers)}")
        self.rules[number] = alternatives
        return Ref(number)

    def _wrong(self, what: str) -> BadRequest:
        return BadRequest(f"grammar, character {self.at}: {what}", field="grammar")

    def _skip(self, blank: re.Pattern[str]) -> None:
        found = blank.match(self.text, self.at)
        self.at = found.end() if found else self.at

    def _expect(self, mark: str) -> None:
        if not self.text.startswith(mark, self.at):
            raise self._wrong(f"{mark!r} is missing")
        self.at += len(mark)

    def _name(self) -> str:
        found = _NAME.match(self.text, self.at)
        if found is None:
            raise self._wrong("a rule's name is missing")
        self.at = found.end()
        return found[0]

    def _alternatives(self, depth: int) -> tuple[Alternative, ...]:
        if depth > MAX_DEPTH:
            raise self._wrong(f"parentheses are nested more than {MAX_DEPTH} deep")
        found = [self._sequence(depth)]
        while self.text.startswith("|", self.at):
            self.at += 1
            self._skip(_BLANK)
            found.append(self._sequence(depth))
        return tuple(found)

    def _sequence(self, depth: int) -> Alternative:
        found: list[Element] = []
        while (part := self._part(depth)) is not None:
            found += self._repeated(part)
            # Within parentheses lines may break; elsewhere the next line is another rule, unless it goes on with `|`.
            self._skip(_BLANK if depth else _BLANK_IN_LINE)
            if not depth:
                self._go_on()
        return tuple(found)

    def _go_on(self) -> None:
        found = _BLANK.match(self.text, self.at)
        if found is not None and self.text.startswith("|", found.end()):
            self.at = found.end()

    def _part(self, depth: int) -> Alternative | None:
        char = self.text[self.at : self.at + 1]
        if char == '"':
            return self._literal()
        if char == "[":
            return (self._chars(),)
        if char == ".":
            self.at += 1
            return (Chars((), negated=True),)
        if char == "(":
            self.at += 1
            self._skip(_BLANK)
            inner = self._alternatives(depth + 1)
            self._skip(_BLANK)
            self._expect(")")
            return (self._new(inner),)
        if _NAME.match(self.text, self.at):
            return (Ref(self._number(self._name())),)
        return None

    def _repeated(self, part: Alternative) -> Alternative:
        self._skip(_BLANK_IN_LINE)
        char = self.text[self.at : self.at + 1]
        if char in ("*", "+", "?") and char:
            self.at += 1
            least, most = {"*": (0, None), "+": (1, None), "?": (0, 1)}[char]
        elif found := _TIMES.match(self.text, self.at):
            self.at = found.end()
            least = int(found[1])
            most = (int(found[3]) if found[3] else None) if found[2] else least
        else:
            return part
        if max(least, most or 0) > MAX_REPEAT:
            raise self._wrong(f"more than {MAX_REPEAT} repetitions")
        if most is not None and most < least:
            raise self._wrong("a range of repetitions runs backwards")
        return (*part * least, *self._optional(part, None if most is None else most - least))

    def _optional(self, part: Alternative, most: int | None) -> Alternative:
        """Up to `most` times; without end when None."""
        if most is None:
            number = self._number(f" {len(self.numbers)}")
            self.rules[number] = ((*part, Ref(number)), ())
            return (Ref(number),)
        last: Alternative = ()
        for _ in range(most):
            last = (self._new(((*part, *last), ())),)
        return last

    def _literal(self) -> Alternative:
        self.at += 1
        found: list[Element] = []
        while not self.text.startswith('"', self.at):
            code = self._char()
            found.append(Chars(((code, code),)))
        self.at += 1
        return tuple(found)

    def _chars(self) -> Chars:
        self.at += 1
        negated = self.text.startswith("^", self.at)
        self.at += negated
        ranges: list[tuple[int, int]] = []
        while not self.text.startswith("]", self.at):
            low = high = self._char()
            if self.text.startswith("-", self.at) and not self.text.startswith("-]", self.at):
                self.at += 1
                high = self._char()
            if high < low:
                raise self._wrong("a range of characters runs backwards")
            ranges.append((low, high))
        self.at += 1
        return Chars(tuple(sorted(ranges)), negated)

    def _char(self) -> int:
        if self.at >= len(self.text):
            raise self._wrong("the grammar ends inside a literal or a set of characters")
        char = self.text[self.at]
        self.at += 1
        if char != "\\":
            return ord(char)
        kind = self.text[self.at : self.at + 1]
        self.at += 1
        if kind in _HEX_DIGITS:
            digits = self.text[self.at : self.at + _HEX_DIGITS[kind]]
            self.at += len(digits)
            try:
                code = int(digits, 16)
            except ValueError as err:
                raise self._wrong(f"{digits!r} is not hexadecimal") from err
            if code > _LAST_CHAR:
                raise self._wrong(f"there is no character {digits}")
            return code
        if not kind:
            raise self._wrong("the grammar ends with a backslash")
        return ord(_ESCAPES.get(kind, kind))

"""A conversation's older turns said shorter, with the sentences that carry facts; pure, no model.

A sentence is worth the more the rarer its words are in this conversation and the more it holds what cannot be guessed:
numbers, names, what the user said of themselves. Sentences keep their words and their order, so nothing is made up.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence

from attrs import frozen

from protocol.text import Message

MAX_SENTENCE_CHARS = 400
"""Longer stretches without a full stop (code, tables) are cut into pieces of this length."""

_BREAK = re.compile(r"(?<=[.!?])\s+|(?<=[\u3002\uff01\uff1f])|\n+")
_WORD = re.compile(r"[\u3400-\u9fff]|[^\W_]+(?:[-'][^\W_]+)*", re.UNICODE)
_NAME = re.compile(r"(?<=[\w,;:] )[A-Z][\w-]+|\b[A-Z]{2,}\b|\b\w*\d\w*\b|[\"'`“][^\"'`”]{2,40}[\"'`”]")
_NUMBER = re.compile(r"\d")
_SELF = re.compile(r"\b(?:i|i'm|i've|my|mine|we|we're|our|me)\b|我|我们|咱", re.IGNORECASE)
_FIXED = re.compile(
    r"\b(?:must|never|always|only|prefer|allergic|because|instead|decided|agreed|deadline|budget|except|remember|"
    r"called|named|lives?|born|works?|costs?|needs?)\b|必须|不要|只能|喜欢|叫|住|预算|记住",
    re.IGNORECASE,
)
_ASKS = re.compile(r"[?\uff1f]\s*$")
_POLITE = re.compile(
    r"^(?:\W*(?:thanks?|thank you|ok(?:ay)?|sure|great|perfect|hello|hi|hey|you're welcome|no problem|of course|got it|"
    r"sounds good|happy to help|let me know|feel free|i hope|good question|absolutely|certainly|"
    r"谢谢|好的|不客气|当然|没问题)\b)",
    re.IGNORECASE,
)

_NAMES, _NUMBERS, _OWN, _FIRM = 1.2, 1.5, 0.8, 0.8
_USER, _QUESTION, _COURTESY = 1.3, 0.55, 0.3
"""How much a mark adds to a sentence's worth, and what its place multiplies it by."""


@frozen
class Sentence:
    """One sentence of one turn. `place` orders all sentences of the conversation."""

    place: int
    role: str
    text: str


def sentences(turns: Sequence[Message]) -> list[Sentence]:
    """Every sentence of every turn; a tool call counts as one, its result as its text."""
    found: list[Sentence] = []
    for turn in turns:
        calls = "; ".join(f"{c['function']['name']}({c['function']['arguments']})" for c in turn.tool_calls)
        for text in (turn.content, calls):
            for piece in _BREAK.split(text):
                found += [Sentence(len(found) + n, turn.role, part) for n, part in enumerate(_parts(piece))]
    return found


def _parts(text: str) -> list[str]:
    text = " ".join(text.split())
    return [text[at : at + MAX_SENTENCE_CHARS] for at in range(0, len(text), MAX_SENTENCE_CHARS)]


def words(text: str) -> list[str]:
    """Lower-case words; a Chinese or Japanese character is one."""
    return [word.lower() for word in _WORD.findall(text)]


def worth(sentence: Sentence, seen_in: Counter[str], total: int) -> float:
    """Value per character; seen_in: in how many of `total` sentences each word stands."""
    mine = words(sentence.text)
    if not mine:
        return 0.0
    rare = sum(math.log((1 + total) / (seen_in[word])) for word in set(mine)) / (len(mine) + 3)
    marks = 1.0
    marks += _NAMES * min(3, len(_NAME.findall(sentence.text))) / 3
    marks += _NUMBERS * bool(_NUMBER.search(sentence.text))
    marks += _OWN * bool(_SELF.search(sentence.text)) * (sentence.role == "user")
    marks += _FIRM * bool(_FIXED.search(sentence.text))
    marks *= _USER if sentence.role in ("user", "tool") else 1.0
    marks *= _QUESTION if _ASKS.search(sentence.text) else 1.0
    marks *= _COURTESY if _POLITE.match(sentence.text) else 1.0
    return rare * marks


def extract(turns: Sequence[Message], room_bytes: int) -> str:
    """The best sentences of these turns within `room_bytes` of UTF-8, one line per run of a role, in order.

    Each is counted with its role's name, so the result is never over the room. A sentence that stands there already,
    word for word, is not taken twice.
    """
    every = sentences(turns)
    seen_in = Counter(word for sentence in every for word in set(words(sentence.text)))
    ranked = sorted(every, key=lambda sentence: (-worth(sentence, seen_in, len(every)), sentence.place))
    taken: dict[str, Sentence] = {}
    left_bytes = room_bytes
    for sentence in ranked:
        cost_bytes = len(sentence.text.encode("utf-8", "surrogatepass")) + len(sentence.role) + 3
        if cost_bytes <= left_bytes and sentence.text not in taken:
            taken[sentence.text] = sentence
            left_bytes -= cost_bytes
    return _lines(sorted(taken.values(), key=lambda sentence: sentence.place))


def _lines(chosen: Sequence[Sentence]) -> str:
    lines: list[str] = []
    role = ""
    for sentence in chosen:
        if sentence.role != role:
            role = sentence.role
            lines.append(f"{role}: {sentence.text}")
        else:
            lines[-1] += f" {sentence.text}"
    return "\n".join(lines)

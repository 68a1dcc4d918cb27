"""How far a shadow's answer lies from the one that was delivered: sizes, times, money, words in common. Pure.

Words are counted, never kept: a difference holds numbers and names of targets only.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from attrs import frozen

from protocol.text import Message

MAX_WORDS = 4096
"""Of each text; what follows hardly moves the measure."""

_WORD = re.compile(r"\d+(?:[.,]\d+)*|[\u3040-\u30ff\u3400-\u9fff]|[^\W\d_]+")


@frozen
class Told:
    """One answer to a request. status: `ok`, or the code of what ended it. target: who made it; empty: nobody did."""

    target: str
    model: str
    status: str
    finish: str | None
    chars: int
    tokens: int
    calls: tuple[str, ...]
    ttft_s: float | None
    total_s: float
    usd: float


@frozen
class Difference:
    """An answer that was delivered and the one that the other path gave. level, reason, intent: of the route taken.

    similarity_ratio: words in common, see `similarity`; None where the shadow did not end well.
    """

    request_id: str
    tenant: str
    intent: str | None
    level: str
    reason: str
    old: Told
    other: Told
    similarity_ratio: float | None
    alike: bool


def similarity(old: str, other: str) -> float:
    """Share of words in common, 0 to 1: the Dice coefficient of both texts' words, each counted as often as it stands.

    Case and order do not count; a character of Chinese or Japanese is a word. Two texts without words are alike.

    >>> similarity("The bridge is old.", "the old bridge"), similarity("yes", "no")
    (0.8571428571428571, 0.0)
    """
    mine, others = _words(old), _words(other)
    total = mine.total() + others.total()
    return 2 * (mine & others).total() / total if total else 1.0


def _words(text: str) -> Counter[str]:
    found: Counter[str] = Counter()
    for number, match in enumerate(_WORD.finditer(text)):
        if number >= MAX_WORDS:
            break
        found[match.group().casefold()] += 1
    return found


def told(
    target: str, model: str, status: str, finish: str | None, message: Message, tokens: int, ttft_s: float | None,
    total_s: float, usd: float,
) -> Told:  # fmt: skip
    """An answer's numbers, with the names of the functions that it calls."""
    calls = tuple(str(call["function"]["name"])[:128] for call in message.tool_calls)
    return Told(target, model, status, finish, len(message.content), tokens, calls, ttft_s, total_s, usd)


def compared(old: Message, other: Message, alike_ratio: float) -> tuple[float, bool]:
    """(words in common, whether both say the same): the same functions called, and enough words in common."""
    ratio = similarity(_text(old), _text(other))
    same_calls = [call["function"]["name"] for call in old.tool_calls] == [
        call["function"]["name"] for call in other.tool_calls
    ]
    return ratio, same_calls and ratio >= alike_ratio


def fields_of(difference: Difference) -> dict[str, Any]:
    """As the audit keeps it."""
    return {
        "request_id": difference.request_id,
        "tenant": difference.tenant,
        "intent": difference.intent,
        "level": difference.level,
        "reason": difference.reason[:256],
        "old": _side(difference.old),
        "other": _side(difference.other),
        "similarity_ratio": None if difference.similarity_ratio is None else round(difference.similarity_ratio, 4),
        "alike": difference.alike,
    }


def _side(one: Told) -> Mapping[str, Any]:
    return {
        "target": one.target,
        "model": one.model[:256],
        "status": one.status,
        "finish": one.finish,
        "chars": one.chars,
        "tokens": one.tokens,
        "calls": list(one.calls),
        "ttft_s": None if one.ttft_s is None else round(one.ttft_s, 4),
        "total_s": round(one.total_s, 4),
        "usd": round(one.usd, 9),
    }


def _text(message: Message) -> str:
    arguments = (str(call["function"]["arguments"]) for call in message.tool_calls)
    return "\n".join((message.content, *arguments))

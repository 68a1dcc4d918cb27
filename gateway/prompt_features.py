"""What a prompt is made of, as hashed words and pairs of words; Chinese by characters. Pure.

Only the head and the tail of a text are read: that is where an instruction stands, and it bounds the time.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from zlib import crc32

from attrs import frozen

HEAD, TAIL = 120, 90
"""Characters of a text that are read."""

WIDE_HEAD, WIDE_TAIL = 48, 36
"""The same for texts in Chinese, where a character says more."""

WIDE_BYTES_RATIO = 1.5
"""UTF-8 bytes per character from which a text counts as Chinese."""

MAX_TOKENS = 100
"""Of what is read; only rows of signs have more."""

STEM, STEM_SALT = 5, 77
"""Longer words count by their first letters too: `summarise` and `summary` are alike."""

MAX_FEATURES = 2 * MAX_TOKENS + (HEAD + TAIL) // (STEM + 1)

_TOKENS = re.compile(rb"[a-z]+|0+|[\xe4-\xe9][\x80-\xbf]{2}|[^\sa-z0\x80-\xff.,'\"]")
_NO_DIGITS = bytes(ord("0") if chr(code).isdigit() else code for code in range(128)) + bytes(range(128, 256))


@frozen
class Features:
    """What was read of a text.

    tokens: how many there are: words in lower case, digits as 0, Chinese characters, signs. hashes: CRC-32 of each
    token, of each two in a row, and of the beginnings of long words. chinese: whether it is mostly Chinese.
    """

    tokens: int
    hashes: tuple[int, ...]
    chinese: bool


def features(text: str) -> Features:
    """Features of one text; at most MAX_FEATURES hashes, whatever its length."""
    wide = not text.isascii() and len(text[:HEAD].encode("utf-8", "replace")) > WIDE_BYTES_RATIO * len(text[:HEAD])
    head, tail = (WIDE_HEAD, WIDE_TAIL) if wide else (HEAD, TAIL)
    if len(text) > head + tail:
        text = f"{text[:head]} {text[-tail:]}"
    tokens = _tokens(text)
    stems = [crc32(token[:STEM], STEM_SALT) for token in tokens if len(token) > STEM]
    return Features(len(tokens), (*_hashes(tokens), *stems), wide)


def hashed(text: str) -> tuple[int, ...]:
    """The hashes of all of `text`: of n tokens first, then of the n - 1 pairs."""
    return _hashes(_tokens(text))


def _tokens(text: str) -> list[bytes]:
    return _TOKENS.findall(text.lower().encode("utf-8", "replace").translate(_NO_DIGITS))[:MAX_TOKENS]


def _hashes(tokens: Sequence[bytes]) -> tuple[int, ...]:
    single = list(map(crc32, tokens))
    # CRC-32 goes on where it stopped: the hash of a pair costs as much as that of its second word.
    return (*single, *map(crc32, tokens[1:], single))

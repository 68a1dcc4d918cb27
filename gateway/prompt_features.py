"""What a prompt is made of: words, signs, pairs of words, pairs of Chinese characters. Pure.

Only the head and the tail of a text are read: that is where an instruction stands, and it bounds the time. Words and
signs are told apart by tables over bytes, which takes a tenth of what a pattern takes.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Sequence
from itertools import chain, pairwise

from attrs import define

HEAD, TAIL = 76, 52
"""Characters of a text that are read."""

WIDE_HEAD, WIDE_TAIL = 30, 20
"""The same for texts in Chinese, where a character says more."""

WIDE_BYTES_RATIO = 1.5
"""UTF-8 bytes per character from which a text counts as Chinese."""

MAX_FEATURES = 2 * (HEAD + TAIL + 1) - 1
"""n words or signs make n - 1 pairs; one blank stands between head and tail."""

Key = bytes | tuple[bytes, bytes] | int
"""A word, in lower case, its digits as 0; two words in a row; a sign by its code; two signs or two Chinese characters
in a row by their UTF-16 units, as one number of 32 bits. A Chinese character alone says too little."""

_HAN = re.compile("[\u4e00-\u9fff]+")
WORDS = bytes(
    ord("0") if chr(code).isdigit() else ord(chr(code).lower()) if chr(code).isalpha() else ord(" ")
    for code in range(128)
) + bytes(b" " * 128)
"""What each byte of a text is to its words: a letter in lower case, 0 for a digit, or a blank."""

_PAIRS = tuple(struct.Struct(f"<{count}I").unpack_from for count in range(HEAD + TAIL + 2))
_NO_SIGNS = bytes(
    code for code in range(256) if code <= ord(" ") or code >= 127 or chr(code).isalnum() or chr(code) in ".,'\""
)


@define
class Features:
    """What was read of a text. pairs: of signs and of Chinese characters. chinese: whether it is mostly in Chinese.

    tokens: words, signs and Chinese characters. Not frozen, as all that is made anew for each decision and
    changed by nobody: it would take three times as long.
    """

    words: Sequence[bytes]
    signs: bytes
    pairs: Sequence[int]
    tokens: int
    chinese: bool

    def keys(self) -> Iterator[Key]:
        """All of them, some perhaps more than once."""
        return chain(self.words, pairwise(self.words), self.signs, self.pairs)


def features(text: str) -> Features:
    """Features of one text; at most MAX_FEATURES keys, whatever its length."""
    plain, wide = text.isascii(), False
    if not plain:
        begun = text[:HEAD]
        wide = len(begun.encode("utf-8", "replace")) > WIDE_BYTES_RATIO * len(begun)
    head, tail = (WIDE_HEAD, WIDE_TAIL) if wide else (HEAD, TAIL)
    if len(text) > head + tail:
        text = f"{text[:head]} {text[-tail:]}"
    data = text.encode("utf-8", "replace")
    words = data.translate(WORDS).split()
    signs = data.translate(None, _NO_SIGNS)
    characters = signs.decode("ascii") if signs else ""
    if not plain:
        characters += "".join(_HAN.findall(text))
    return Features(words, signs, _pairs(characters), len(words) + len(characters), wide)


def _pairs(characters: str) -> tuple[int, ...]:
    """Each two in a row: two UTF-16 units read as one number, first at even places, then at odd ones."""
    count = len(characters)
    if count < 2:
        return ()
    units = characters.encode("utf-16-le")
    pairs: tuple[int, ...] = _PAIRS[count // 2](units) + _PAIRS[(count - 1) // 2](units, 2)
    return pairs


def key_of(phrase: str) -> Key:
    """The key of a word, a sign, or two of a kind in a row; what a phrase is looked up by. IndexError: it has none."""
    found = features(phrase)
    if found.pairs:
        return found.pairs[0]
    if found.signs:
        return found.signs[0]
    return found.words[0] if found.tokens == 1 else (found.words[0], found.words[1])


def phrase_of(key: Key) -> str:
    """The other way round: `key_of` of it gives `key`."""
    if isinstance(key, int):
        return key.to_bytes(2 if key < 1 << 16 else 4, "little").decode("utf-16-le")
    return (b" ".join(key) if isinstance(key, tuple) else key).decode("ascii")

"""Where a text holds keys, tokens and passwords: by their makers' marks, and by the words before. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import AnyStr

MAX_PEM = 16 << 10
"""A private key block is looked for within this many characters."""

_TOKEN = r"[A-Za-z0-9_\-]"
_MARKED = re.compile(
    "|".join(
        (
            "sk-" + _TOKEN + "{16,220}",
            "[sr]k_(?:live|test)_[A-Za-z0-9]{16,120}",
            "gh[oprsu]_[A-Za-z0-9]{20,255}",
            "github_pat_[A-Za-z0-9_]{20,255}",
            "glpat-" + _TOKEN + "{16,120}",
            r"xox[abeprs]-[A-Za-z0-9\-]{12,250}",
            "A(?:KIA|SIA)[A-Z0-9]{16}",
            "LTAI[A-Za-z0-9]{12,30}",
            "AKID[A-Za-z0-9]{13,60}",
            "AIza" + _TOKEN + "{35}",
            "hf_[A-Za-z0-9]{20,120}",
            "npm_[A-Za-z0-9]{36}",
            "pypi-" + _TOKEN + "{16,250}",
            r"eyJ[A-Za-z0-9_\-]{13,4096}\.[A-Za-z0-9_\-]{8,8192}\.[A-Za-z0-9_\-]{8,2048}",
        )
    )
)
"""Each begins with its maker's mark and has at least LEAST_TOKEN characters of one run."""

_CAPITALS = b"AA"

LEAST_TOKEN = 16
_RUNS = bytes(ord("a") if chr(code).isalnum() or chr(code) in "_-" else ord(" ") for code in range(128)) + b" " * 128
_LONG = b"a" * LEAST_TOKEN
_BEARER = re.compile(r"Bearer ([A-Za-z0-9_\-.=+/]{16,4096})")
MAX_SEARCHED = 512
"""In a run longer than this (a picture as text) a mark counts at its beginning only."""

_IN_ADDRESS = re.compile(r"://[^\s/@:]{1,64}:([^\s/@]{1,128})@")
MAX_IN_ADDRESS = 3 + 64 + 1 + 128
_KEY = b"key"
_WORDS = (_KEY, b"secret", b"token", b"pass", b"pwd")
_HAN = ("密", "令")
"""Of 密码, 密钥, 口令 and 令牌; one character is found many times sooner than two."""

_TAKEN_FOR_LETTERS = {0x212A: "k", 0x17F: "s", 0x130: "i", 0x131: "i"}
"""What re.IGNORECASE takes for k, s and i."""

_QUOTES = "\"'`"
SAID = re.compile(
    r"(?:api[ _-]?key|secret(?:[ _-]?key)?|access[ _-]?key|token|passw(?:or)?d|passphrase|pwd|密码|口令|密钥|令牌)"
    r"[\"']?\s{0,3}(?:is\s|是|为|[:=\uff1a\uff1d])\s{0,3}[\"'`]?([A-Za-z0-9+/_\-.~!#$%^&*@=]{6,200})",
    re.IGNORECASE,
)
MAX_BEFORE_WORD, MAX_BEFORE_CHARACTER = len("access "), len("口")
MAX_SAID = len("passphrase") + len(" key") + len("'") + 3 + len("is ") + 3 + len("'") + 200
"""Of a match: from the beginning of its word to the end of its value, at the most."""

_BEGIN, _END = "-----BEGIN ", "-----END "


def secrets(text: str, plain: bytes, shape: bytes) -> Iterator[tuple[int, int]]:
    """Start and end of each; of `password: value` only the value. plain, shape: as gateway.detectors.Seen has them."""
    if _may_be_marked(text, shape):
        yield from _marked(text, plain)
    if "Bearer " in text:
        yield from (found.span(1) for found in _BEARER.finditer(text))
    if "://" in text and "@" in text:
        yield from _in_addresses(text)
    if _BEGIN in text:
        yield from _private_keys(text)
    yield from said(text, plain, shape)


def _may_be_marked(text: str, shape: bytes) -> bool:
    """Each mark has a dash, an underscore, an A beside another capital, or `eyJ`. One character is found in no time."""
    if "-" in text or "_" in text:
        return True
    return ("A" in text and _CAPITALS in shape) or ("J" in text and "eyJ" in text)


def _marked(text: str, plain: bytes) -> Iterator[tuple[int, int]]:
    """Marks are looked for in long runs only; a mark in the middle of a word is none."""
    runs = plain.translate(_RUNS)
    start = runs.find(_LONG)
    while start >= 0:
        stop = runs.find(b" ", start)
        stop = stop if stop >= 0 else len(text)
        found = _MARKED.match(text, start)
        if found is None and stop - start <= MAX_SEARCHED:
            found = _MARKED.search(text, start, stop)
        if found is not None and not (found.start() > start and text[found.start() - 1].isalnum()):
            yield found.span()
            stop = max(stop, found.end())
        start = runs.find(_LONG, stop)


def said(text: str, plain: bytes, shape: bytes) -> Iterator[tuple[int, int]]:
    """What `values` finds in the whole text, looked for where a digit or a quote is near."""
    # The first digit or quote of the text is not far behind the word, and the last one is not before it.
    first = [at for at in (shape.find(b"0"), *map(text.find, _QUOTES)) if at >= 0]
    last = max(shape.rfind(b"0"), *map(text.rfind, _QUOTES))
    if not first:
        return
    yield from values(text, after_words(text, plain, max(0, min(first) - MAX_SAID), last))


def values(text: str, found_words: Iterable[re.Match[str]]) -> Iterator[tuple[int, int]]:
    """Values that follow a word for a secret. A plain word there is a variable or prose, unless it stands in quotes."""
    for found in found_words:
        value = found.group(1)
        quoted = text[found.start(1) - 1] in _QUOTES
        mixed = any(map(str.isdigit, value)) and any(map(str.isalpha, value))
        called = text[found.end(1) : found.end(1) + 1] in ("(", "[")
        if (quoted or mixed or value.isdigit()) and not called:
            yield found.span(1)


def after_words(text: str, plain: bytes, start: int = 0, stop: int | None = None) -> Iterator[re.Match[str]]:
    """What `SAID.finditer` finds, looked for around its words only: over a long text that is hundreds of times less.

    start, stop: where the words may stand.
    """
    stop = len(text) if stop is None else stop
    wide = not text.isascii()
    if wide and any(chr(letter) in text for letter in _TAKEN_FOR_LETTERS):
        plain = text.translate(_TAKEN_FOR_LETTERS).encode("ascii", "replace")
    lowered = plain[start:stop].lower()
    # What is said of a key has a word before it; of the others the match begins with them.
    places = [
        (start + at, MAX_BEFORE_WORD if word is _KEY else 0)
        for word in _WORDS
        if word in lowered
        for at in _places_of(word, lowered)
    ]
    if wide:
        places += [(start + at, MAX_BEFORE_CHARACTER) for sign in _HAN for at in _places_of(sign, text[start:stop])]
    done = 0
    for at, before in sorted(places):
        if at < done:
            continue
        starts = range(max(done, at - before), at + 1)
        found = next((one for start in starts if (one := SAID.match(text, start, at + MAX_SAID))), None)
        if found is not None:
            done = found.end()
            yield found


def _places_of(wanted: AnyStr, text: AnyStr) -> Iterator[int]:
    at = text.find(wanted)
    while at >= 0:
        yield at
        at = text.find(wanted, at + len(wanted))


def _in_addresses(text: str) -> Iterator[tuple[int, int]]:
    """Passwords of `scheme://user:password@host`."""
    at = text.find("@")
    while at >= 0:
        begun = text.rfind("://", max(0, at - MAX_IN_ADDRESS), at)
        found = _IN_ADDRESS.match(text, begun) if begun >= 0 else None
        if found is not None:
            yield found.span(1)
        at = text.find("@", at + 1)


def _private_keys(text: str) -> Iterator[tuple[int, int]]:
    start = text.find(_BEGIN)
    while start >= 0:
        stop = start + len(_BEGIN)
        if "PRIVATE KEY" in text[start : start + 64]:
            end = text.find(_END, stop, start + MAX_PEM)
            close = text.find("-----", end + len(_END), end + 80) if end >= 0 else -1
            stop = close + 5 if close >= 0 else min(len(text), start + MAX_PEM)
            yield start, stop
        start = text.find(_BEGIN, stop)

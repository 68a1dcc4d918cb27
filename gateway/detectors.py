"""Where a text holds e-mail addresses, numbers of people and accounts, keys, addresses of hosts, listed names. Pure.

Every pattern is bounded and tried at places that a plain search has found, so that time grows with the text's length
and never with its shape.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator

from attrs import frozen

from gateway import privacy_checks as checks
from gateway.secrets_found import secrets
from protocol.policy_privacy import Kind, PrivacyPolicy

LOCAL_CHARACTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._%+-"
MAX_LOCAL = 64

Place = tuple[int, int]

_WIDE = {0xFF10 + digit: str(digit) for digit in range(10)} | {0xFF20: "@", 0xFF0B: "+", 0xFF0D: "-", 0xFF0E: "."}
_WIDE_MARKS = tuple(chr(code) for code in _WIDE)
_SHAPES = bytes(
    ord("0") if chr(code).isdigit() else ord("A") if chr(code).isupper() else code if chr(code) in ".:" else ord("?")
    for code in range(128)
) + bytes(128)

_DOMAIN = re.compile(r"(?:[A-Za-z0-9][A-Za-z0-9-]{0,62}\.){1,8}[A-Za-z]{2,24}")
_NUMBER = re.compile(r"[0-9]{3}[0-9 ().\-]{4}")
_RUN = re.compile(r"[0-9]+")
_PLUS = re.compile(r"\+ ?[1-9][0-9]{0,3}(?:[ \-.]?\(?[0-9]{1,11}\)?){1,6}(?![0-9])")
_RESIDENT = re.compile(r"[1-8][0-9]{5}[ \-]?[12][0-9]{7}[ \-]?[0-9]{3}[0-9Xx](?![0-9A-Za-z])")
_SOCIAL = re.compile(r"[0-9]{3}-[0-9]{2}-[0-9]{4}(?![0-9\-])")
_CARD = re.compile(r"[2-6][0-9]{3}(?:[ \-]?[0-9]){9,15}(?![0-9])")
_CN_MOBILE = re.compile(r"(?:(?:00)?86[ \-]?)?1[3-9][0-9][ \-]?[0-9]{4}[ \-]?[0-9]{4}(?![0-9])")
_CN_LANDLINE = re.compile(r"0[1-9][0-9]{1,2}(?:\)|-|\) ?| )[2-9][0-9]{6,7}(?![0-9])")
_NORTH_AMERICA = re.compile(r"[2-9][0-9]{2}\)?[ \-.]{1,2}[2-9][0-9]{2}[ \-.][0-9]{4}(?![0-9])")
_IBAN = re.compile(r"[A-Z]{2}[0-9]{2}(?: ?[A-Z0-9]){11,30}")
_QUAD = re.compile(r"[0-9]{1,3}(?:\.[0-9]{1,3}){3}")
_COLONS = re.compile(r"[0-9A-Fa-f:]{0,39}(?:(?<=:)[0-9]{1,3}(?:\.[0-9]{1,3}){3})?")


@frozen
class Span:
    """Characters start..end of a text are of this kind."""

    start: int
    end: int
    kind: Kind


@frozen
class Seen:
    """A text, the same as ASCII (one byte a character), its shape (`0` for digits, `A` for capitals, `.` and `:`),
    where numbers begin.

    Searching bytes for `000` is many times faster than a pattern over the text.
    """

    text: str
    plain: bytes
    shape: bytes
    numbers: tuple[int, ...]


Detector = Callable[[Seen], Iterable[Place]]


class Detectors:
    """What a privacy policy looks for; made once per policy, used for every text."""

    def __init__(self, policy: PrivacyPolicy) -> None:
        wanted = frozenset(policy.redact_kinds) | frozenset(policy.local_only_kinds)
        self._plain: list[tuple[Kind, Detector]] = [item for item in _PLAIN if item[0] in wanted]
        self._of_digits: list[tuple[Kind, Detector]] = [item for item in _OF_DIGITS if item[0] in wanted]
        if policy.names and "name" in wanted:
            self._plain.append(("name", name_detector(policy.names)))

    def spans(self, text: str) -> tuple[Span, ...]:
        """What was found, in order, none over another; full-width digits and signs count as the plain ones."""
        if not text.isascii() and any(mark in text for mark in _WIDE_MARKS):
            text = text.translate(_WIDE)
        seen = look(text)
        found = [Span(start, end, kind) for kind, seek in self._plain for start, end in seek(seen)]
        if b"0" in seen.shape or b":" in seen.shape:
            found += [Span(start, end, kind) for kind, seek in self._of_digits for start, end in seek(seen)]
        return _apart(found) if found else ()


def look(text: str) -> Seen:
    """What detectors are given."""
    plain = text.encode("ascii", "replace")
    shape = plain.translate(_SHAPES)
    return Seen(text, plain, shape, tuple(_number_starts(text, shape)))


def _apart(found: list[Span]) -> tuple[Span, ...]:
    """Overlaps become one span, so that no part of either is left in the text; the longest gives the kind."""
    found.sort(key=lambda span: (span.start, -span.end))
    kept: list[Span] = []
    for span in found:
        last = kept[-1] if kept else None
        if last is None or span.start >= last.end:
            kept.append(span)
            continue
        longer = span if span.end - span.start > last.end - last.start else last
        kept[-1] = Span(last.start, max(last.end, span.end), longer.kind)
    return tuple(kept)


def emails(seen: Seen) -> Iterator[Place]:
    """Addresses as people write them; quoted local parts and addresses without a dot are left alone."""
    text = seen.text
    at = text.find("@")
    while at >= 0:
        before = text[max(0, at - MAX_LOCAL) : at]
        local = before[len(before.rstrip(LOCAL_CHARACTERS)) :].lstrip(".")
        domain = _DOMAIN.match(text, at + 1) if local else None
        if domain is not None:
            yield at - len(local), domain.end()
        at = text.find("@", at + 1)


def phones(seen: Seen) -> Iterator[Place]:
    """Chinese mobile and fixed numbers, North American ones, and all with a plus and a country code."""
    text = seen.text
    for start in seen.numbers:
        for pattern in (_CN_MOBILE, _CN_LANDLINE, _NORTH_AMERICA):
            found = pattern.match(text, start)
            if found is not None:
                opened = start > 0 and text[start - 1] == "(" and ")" in found.group()
                yield start - opened, found.end()
                break
    at = text.find("+")
    while at >= 0:
        found = _PLUS.match(text, at)
        if found is not None and 8 <= sum(map(str.isdigit, found.group())) <= 15:
            yield at, found.end()
        at = text.find("+", at + 1)


def id_cards(seen: Seen) -> Iterator[Place]:
    """Chinese resident numbers with a right check character, and US social security numbers."""
    for start in seen.numbers:
        found = _RESIDENT.match(seen.text, start)
        if found is not None and checks.resident_id(_joined(found.group())):
            yield start, found.end()
            continue
        found = _SOCIAL.match(seen.text, start)
        if found is not None and checks.social_security(_joined(found.group())):
            yield start, found.end()


def cards(seen: Seen) -> Iterator[Place]:
    """Payment cards: 13 to 19 digits, in groups or not, with a right check digit."""
    for start in seen.numbers:
        found = _CARD.match(seen.text, start)
        while found is not None and not checks.card(_joined(found.group())):
            # Another number may follow the card behind one blank: try again without the last group.
            shorter = max(found.group().rfind(" "), found.group().rfind("-"))
            found = _CARD.match(seen.text, start, start + shorter) if shorter > 0 else None
        if found is not None:
            yield start, found.end()


def ibans(seen: Seen) -> Iterator[Place]:
    """Account numbers with a right check, in groups or not; what stands behind the country's length is not taken."""
    text = seen.text
    for start in _places(seen.shape, b"AA00"):
        found = _IBAN.match(text, start)
        if found is None or _joins(text, start - 1, start):
            continue
        end = _end_of(text, start, checks.IBAN_CHARACTERS.get(text[start : start + 2], 0), found.end())
        if end and checks.iban(text[start:end].replace(" ", "")):
            yield start, end


def hosts(seen: Seen) -> Iterator[Place]:
    """IPv4 and IPv6 addresses."""
    text, done = seen.text, 0
    for dot in _places(seen.shape, b"0.0"):
        if dot < done:
            continue
        before = text[max(0, dot - 2) : dot + 1]
        start = dot + 1 - (len(before) - len(before.rstrip("0123456789")))
        found = _QUAD.match(text, start)
        done = found.end() if found is not None else dot + 1
        if found is not None and _stands_alone(seen.shape, start, done) and checks.ipv4(found.group()):
            yield start, done
    if seen.shape.count(b":") >= 2:
        yield from _ipv6(text)


def _stands_alone(shape: bytes, start: int, end: int) -> bool:
    """Whether a dotted quad is not a part of a longer row of digits and dots."""
    if start and shape[start - 1 : start] in (b"0", b"."):
        return False
    return not (shape[end : end + 1] == b"0" or shape[end : end + 2] == b".0")


def _ipv6(text: str) -> Iterator[Place]:
    at = text.find(":")
    while at >= 0:
        before = text[max(0, at - 4) : at]
        start = at - (len(before) - len(before.rstrip("0123456789abcdefABCDEF")))
        found = _COLONS.match(text, start)
        end = found.end() if found is not None else at + 1
        while end > start and text[end - 1] == ":" and text[end - 2 : end] != "::":
            end -= 1
        alone = not (_joins(text, start - 1, start) or _joins(text, end - 1, end))
        if end - start > 2 and alone and checks.ipv6(text[start:end]):
            yield start, end
        at = text.find(":", max(end, at + 1))


def secret_places(seen: Seen) -> Iterator[Place]:
    """Keys, tokens and passwords."""
    return secrets(seen.text, seen.plain, seen.shape)


def name_detector(names: Iterable[str]) -> Detector:
    """Finds listed names in any case, but not inside a longer word of ASCII letters and digits."""
    pattern = re.compile(_trie_pattern({name.strip().lower() for name in names}), re.IGNORECASE)

    def seek(seen: Seen) -> Iterator[Place]:
        for found in pattern.finditer(seen.text):
            start, end = found.span()
            if not (_joins(seen.text, start - 1, start) or _joins(seen.text, end - 1, end)):
                yield start, end

    return seek


def _joins(text: str, left: int, right: int) -> bool:
    """Whether the characters at two places belong to one word of ASCII letters and digits."""
    if left < 0 or right >= len(text):
        return False
    pair = text[left] + text[right]
    return pair.isascii() and pair.isalnum()


def _trie_pattern(words: set[str]) -> str:
    """One pattern for all words that branches on each character once; the longest word at a place is found."""
    root: dict[str, dict[str, dict]] = {}  # type: ignore[type-arg]
    for word in words:
        node = root
        for character in word:
            node = node.setdefault(character, {})
        node[""] = {}

    def render(node: dict[str, dict]) -> str:  # type: ignore[type-arg]
        tail = ""
        while len(node) == 1 and "" not in node:
            character, node = next(iter(node.items()))
            tail += re.escape(character)
        branches = [re.escape(character) + render(below) for character, below in sorted(node.items()) if character]
        if not branches:
            return tail
        group = f"(?:{'|'.join(branches)})"
        return tail + (f"{group}?" if "" in node else group)

    return render(root)


def _places(shape: bytes, wanted: bytes) -> Iterator[int]:
    place = shape.find(wanted)
    while place >= 0:
        yield place
        place = shape.find(wanted, place + 1)


def _number_starts(text: str, shape: bytes) -> Iterator[int]:
    """Places where a run of digits begins that can be a number of some length, separators counted."""
    start = shape.find(b"000")
    while start >= 0:
        if _NUMBER.match(text, start) is not None:
            yield start
        run = _RUN.match(text, start)
        start = shape.find(b"000", run.end() if run is not None else start + 1)


def _joined(text: str) -> str:
    return text.replace(" ", "").replace("-", "")


def _end_of(text: str, start: int, characters: int, bound: int) -> int:
    """Where `characters` letters and digits from `start` on end, spaces skipped; 0: not before `bound`."""
    if not characters:
        return 0
    place = start
    while place < bound:
        characters -= text[place] != " "
        place += 1
        if not characters:
            return place
    return 0


_PLAIN: tuple[tuple[Kind, Detector], ...] = (("email", emails), ("secret", secret_places))
_OF_DIGITS: tuple[tuple[Kind, Detector], ...] = (
    ("id_card", id_cards), ("card", cards), ("phone", phones), ("iban", ibans), ("ip", hosts),
)  # fmt: skip

"""Reversible placeholders: what a detector found leaves as `EMAIL_K3F9QA7T`, and comes back as itself. Pure.

A placeholder is a kind and a tag; the tag is an HMAC of the value under a secret of this process, so that the same
value has the same placeholder through a conversation (prefix caches stay warm) and nobody can write one without the
secret. One that stands in the request already, by whatever chance, is never given out.
"""

from __future__ import annotations

import base64
import hmac
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence

from attrs import define, field, frozen

from gateway.detectors import Span
from protocol.policy_privacy import Kind

TAG_BYTES, TAG_CHARACTERS = 5, 8
"""Of a tag, as bytes and in base32."""

MAX_ATTEMPTS = 16

WORDS: Mapping[Kind, str] = {
    "email": "EMAIL", "phone": "PHONE", "id_card": "IDCARD", "card": "CARDNO", "iban": "IBAN", "secret": "SECRET",
    "ip": "IPADDR", "name": "NAME",
}  # fmt: skip
"""No word ends in another one, so a placeholder never holds a second."""


@frozen
class Placeholders:
    """The values of one request by their placeholders. secret: of this process; scope: whose values these are."""

    values: Mapping[str, str] = field(factory=dict, repr=False)

    def restorer(self, *, all_json: bool = False) -> StreamRestorer:
        """One for each answer. all_json: its text is JSON too, as its request asked for."""
        return StreamRestorer(self.values, all_json)


def placeholders_for(
    texts: Sequence[tuple[str, Sequence[Span]]], secret: bytes, scope: str
) -> tuple[Placeholders, list[str]]:
    """Placeholders for the spans of all texts of a request, and the texts with them in place.

    Restoring gives the texts back, letter by letter: a text that holds one of the placeholders already (its writer has
    seen it before) gets others. Raises ValueError when there are none left, which takes somebody with the secret.
    """
    wanted = {(span.kind, text[span.start : span.end]) for text, spans in texts for span in spans}
    for attempt in range(MAX_ATTEMPTS):
        names = {item: _name(item, f"{scope}\n{attempt}", secret) for item in wanted}
        made = Placeholders({name: value for (_, value), name in names.items()})
        changed = [_replaced(text, spans, names) if spans else text for text, spans in texts]
        restorer = made.restorer()
        if all(restorer.whole(new) == old for new, (old, _) in zip(changed, texts, strict=True)):
            return made, changed
    raise ValueError("the request holds placeholders of its own values")


def _name(item: tuple[Kind, str], salt: str, secret: bytes) -> str:
    kind, value = item
    return f"{WORDS[kind]}_{_tag(f'{salt} {kind} {value}', secret)}"


def _tag(text: str, secret: bytes) -> str:
    digest = hmac.digest(secret, text.encode("utf-8", "surrogatepass"), "sha256")
    return base64.b32encode(digest[:TAG_BYTES]).decode("ascii")


def _replaced(text: str, spans: Iterable[Span], names: Mapping[tuple[Kind, str], str]) -> str:
    pieces: list[str] = []
    place = 0
    for span in spans:
        pieces += (text[place : span.start], names[span.kind, text[span.start : span.end]])
        place = span.end
    return "".join(pieces) + text[place:]


@define
class StreamRestorer:
    """Puts values back into a text that comes in pieces: the same text whatever the pieces.

    Only the placeholders that were given out are known, so nothing else is touched. At most one placeholder's length
    less one is held back.
    """

    values: Mapping[str, str] = field(repr=False)
    all_json: bool = False
    _by_tag: dict[str, str] = field(init=False, repr=False)
    _beginnings: frozenset[str] | None = field(default=None, init=False, repr=False)
    _longest: int = field(default=0, init=False)
    _held: str = field(default="", init=False, repr=False)
    _in_json: bool = field(default=False, init=False)

    def __attrs_post_init__(self) -> None:
        self._by_tag = {name.partition("_")[2]: name for name in self.values}

    def feed(self, text: str, in_json: bool = False) -> str:
        """What may be shown so far. in_json: `text` is JSON, a value comes back as a part of a JSON string."""
        held = self._held + text
        self._in_json = in_json or self.all_json
        beginnings = self._begin()
        whole_to = max((end for _, end, _ in self._found(held)), default=0)
        place = max(whole_to, len(held) - self._longest)
        while place < len(held) and held[place:] not in beginnings:
            place += 1
        self._held = held[place:]
        return self.whole(held[:place])

    def flush(self) -> str:
        """The rest at the end of the text: the beginning of a placeholder that never came whole stays as it is."""
        rest, self._held = self._held, ""
        return rest

    def whole(self, text: str) -> str:
        """A text that is here in one piece, restored."""
        pieces: list[str] = []
        place = 0
        for start, end, name in self._found(text):
            pieces += (text[place:start], self._value(name))
            place = end
        return "".join(pieces) + text[place:] if pieces else text

    def _found(self, text: str) -> Iterator[tuple[int, int, str]]:
        """Start, end and name of each placeholder that was given out; the first of two that overlap."""
        done, bar = 0, text.find("_")
        while bar >= 0:
            name = self._by_tag.get(text[bar + 1 : bar + 1 + TAG_CHARACTERS])
            start = bar + 1 + TAG_CHARACTERS - len(name) if name is not None else 0
            if name is not None and start >= done and text.startswith(name, start):
                done = bar + 1 + TAG_CHARACTERS
                yield start, done, name
            bar = text.find("_", bar + 1)

    def _value(self, name: str) -> str:
        value = self.values[name]
        return json.dumps(value, ensure_ascii=False)[1:-1] if self._in_json else value

    def _begin(self) -> frozenset[str]:
        """All proper beginnings of placeholders."""
        if self._beginnings is None:
            self._beginnings = frozenset(name[:length] for name in self.values for length in range(1, len(name)))
            self._longest = max(map(len, self.values), default=1) - 1
        return self._beginnings

"""Token bytes to text, as they come: a character split over tokens is held until it is whole."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from protocol.errors import BadRequest
from protocol.text import Token


class PieceDecoder:
    """UTF-8 bytes in, text out; every byte is looked at once.

    Bytes that cannot become a character are shown as U+FFFD as soon as that is certain, and a part of a character that
    is still open at the end becomes U+FFFD in `flush()`; nothing is dropped.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, data: bytes) -> str:
        """The text that `data` completes, possibly empty."""
        return self._decoder.decode(data)

    def flush(self) -> str:
        """What the end of the answer settles: empty, or one U+FFFD for an unfinished character."""
        return self._decoder.decode(b"", final=True)

    @property
    def held(self) -> bytes:
        """The part of a character that waits for its rest (at most 3 bytes)."""
        return self._decoder.getstate()[0]


def unfinished_bytes(data: bytes) -> int:
    """Length of the unfinished character at the end of `data`: 0 when it ends on a boundary.

    >>> unfinished_bytes("a\\u00e9".encode()), unfinished_bytes("a\\u00e9".encode()[:-1])
    (0, 1)
    """
    decoder = PieceDecoder()
    decoder.feed(data[-3:] if len(data) >= 3 else data)
    return len(decoder.held)


def is_piece(piece: bytes | None, token: Token) -> bool:
    """Whether `piece`, what an engine has under the token's id, is what the token says; ids may come alone."""
    return piece is not None and (not token.data or piece == token.data)


def check_bytes(tokens: Sequence[Token]) -> None:
    """Raises BadRequest when tokens whose ids are of no use have no bytes either."""
    if any(not token.data for token in tokens):
        raise BadRequest(
            "the answer so far has tokens without bytes, whose ids are not of this vocabulary",
            next_step="send it with its bytes",
            field="prefix",
        )

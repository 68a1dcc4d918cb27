"""Stop strings over token bytes: they may span tokens and the seam between two engines, and no part of one leaks."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen

from engines.pieces import unfinished_bytes
from protocol.text import CallDelta, Token


@frozen
class Owned:
    """A token of the answer and the name of the target that made it."""

    token: Token
    side: str


@frozen
class Piece:
    """Text that may be shown, with the tokens it came from.

    `text` may be shorter than the tokens at a stop string, and longer where a placeholder was put back. calls: pieces
    of tool calls after the text.
    """

    text: str
    tokens: tuple[Owned, ...]
    calls: tuple[CallDelta, ...] = ()

    @property
    def side(self) -> str:
        """Who made it (its last token's maker); empty for a piece without tokens."""
        return self.tokens[-1].side if self.tokens else ""

    @property
    def index(self) -> int:
        """Index of its first token in the answer; -1 for a piece without tokens."""
        return self.tokens[0].token.index if self.tokens else -1


class StopScanner:
    """Feed tokens in order, take pieces of whole characters that cannot be a part of a stop string any more.

    After a hit `hit` names the stop string, and later tokens are not part of the answer.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.hit: str | None = None
        self._stops = tuple((stop, stop.encode("utf-8")) for stop in stops if stop)
        self._held: list[Owned] = []

    def feed(self, owned: Owned) -> list[Piece]:
        """Pieces that `owned` settles, often none while a stop string may have begun."""
        if self.hit is not None:
            return []
        self._held.append(owned)
        data = b"".join(held.token.data for held in self._held)
        found = self._find(data)
        if found is not None:
            self.hit, at = found
            return self._take(at, b"".join(held.token.data for held in self._held)[:at])
        keep_bytes = max(self._begun_bytes(data), unfinished_bytes(data[-4:]))
        return self._release(len(data) - keep_bytes)

    def flush(self) -> list[Piece]:
        """The end of the answer: what was held is text after all; an unfinished character becomes U+FFFD."""
        data = b"".join(held.token.data for held in self._held)
        return self._take(len(data), data) if self.hit is None else []

    def _find(self, data: bytes) -> tuple[str, int] | None:
        """The stop string that is whole first, and where it begins: the same one however the answer is divided."""
        hits = [(at + len(raw), at, stop) for stop, raw in self._stops if (at := data.find(raw)) >= 0]
        if not hits:
            return None
        _, at, stop = min(hits)
        return stop, at

    def _begun_bytes(self, data: bytes) -> int:
        """Length of the longest end of `data` with which a stop string begins."""
        longest = 0
        for _, raw in self._stops:
            for length in range(min(len(raw) - 1, len(data)), longest, -1):
                if data.endswith(raw[:length]):
                    longest = length
                    break
        return longest

    def _release(self, size_bytes: int) -> list[Piece]:
        """Pieces out of the held tokens that lie wholly within the first `size_bytes`."""
        pieces: list[Piece] = []
        group: list[Owned] = []
        used_bytes, taken = 0, 0
        for place, held in enumerate(self._held):
            used_bytes += len(held.token.data)
            if used_bytes > size_bytes:
                break
            group.append(held)
            data = b"".join(one.token.data for one in group)
            if unfinished_bytes(data[-4:]) == 0:
                pieces.append(Piece(data.decode("utf-8", "replace"), tuple(group)))
                group, taken = [], place + 1
        del self._held[:taken]
        return pieces

    def _take(self, at_byte: int, data: bytes) -> list[Piece]:
        """Everything held before `at_byte`; a token that `at_byte` divides comes with its part."""
        begins = 0
        tokens: list[Owned] = []
        for held in self._held:
            if begins < at_byte or not held.token.data:
                tokens.append(held)
            begins += len(held.token.data)
        self._held.clear()
        return [Piece(data.decode("utf-8", "replace"), tuple(tokens))] if tokens else []

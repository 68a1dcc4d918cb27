"""The one line of an answer: tokens in order, how far its characters are whole, how much the client was given."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gateway.seam import ends_whole, inside_tool_call, may_cut
from gateway.stops import Owned
from protocol.text import Token


class AnswerLine:
    """Accepts the token at `next` only. What lies behind `whole` is part of a character and is not given out yet."""

    def __init__(self) -> None:
        self._made: list[Owned] = []
        self._answer = bytearray()
        self._whole = 0
        self._given = 0
        self.called = False
        """A tool call came as such, which no other engine could go on with."""

    @property
    def next(self) -> int:
        """Index of the token to come."""
        return len(self._made)

    @property
    def whole(self) -> int:
        """Tokens whose characters are whole."""
        return self._whole

    @property
    def makers(self) -> frozenset[str]:
        """Names of those who made the whole tokens."""
        return frozenset(owned.side for owned in self._made[: self._whole])

    @property
    def sides(self) -> tuple[tuple[str, int], ...]:
        """(target, tokens) in order of delivery."""
        runs: list[tuple[str, int]] = []
        for owned in self._made[: self._given]:
            if runs and runs[-1][0] == owned.side:
                runs[-1] = (owned.side, runs[-1][1] + 1)
            else:
                runs.append((owned.side, 1))
        return tuple(runs)

    def accept(self, token: Token, side: str) -> None:
        """Append the token at `next`; a pure finish mark is no token of the answer."""
        if token.index != self.next:
            raise AssertionError(f"token {token.index} offered at {self.next}")
        self.called = self.called or token.call is not None
        if token.data or token.call is not None or token.finish is None:
            self._made.append(Owned(token, side))
            self._answer += token.data
        if ends_whole(bytes(self._answer[-4:])):
            self._whole = len(self._made)

    def drop_part(self) -> int:
        """Forget the part of a character at the end; returns the index to go on at."""
        dropped_bytes = sum(len(owned.token.data) for owned in self._made[self._whole :])
        del self._made[self._whole :]
        del self._answer[len(self._answer) - dropped_bytes :]
        return self._whole

    def take_back(self) -> list[Owned]:
        """Forget an answer of which nothing was given; returns it for put_back()."""
        if self._given:
            raise AssertionError(f"{self._given} tokens were given already")
        made, self._made = self._made, []
        self._answer.clear()
        self._whole = 0
        return made

    def put_back(self, made: list[Owned]) -> None:
        """Undo take_back()."""
        self.take_back()
        for owned in made:
            self.accept(owned.token, owned.side)

    @property
    def made(self) -> Sequence[Token]:
        """All tokens so far."""
        return [owned.token for owned in self._made]

    def give(self, ended: bool) -> Owned | None:
        """The next token for the client, or None; after the end also those of an unfinished character."""
        if self._given >= (len(self._made) if ended else self._whole):
            return None
        self._given += 1
        return self._made[self._given - 1]

    def may_cut(self, following: bytes | None, by_ids: bool) -> bool:
        """Whether the answer may go on elsewhere at `next`; see gateway.seam.may_cut."""
        return not self.called and self._whole == len(self._made) and may_cut(bytes(self._answer), following, by_ids)

    @property
    def in_call(self) -> bool:
        """Whether the answer so far ends inside a tool call that is written as text."""
        return inside_tool_call(bytes(self._answer))

    def tokens(self, first: int, end: int, by_ids: bool) -> Sequence[Token]:
        """Tokens [first, end) as another engine may see them: no more than it needs to go on from there."""
        part = [owned.token for owned in self._made[first:end]]
        return [Token(index=token.index, id=token.id if by_ids else None, data=token.data) for token in part]


Vocabulary = Callable[[str], str | None]
"""Vocabulary hash of a target by name, None when unknown."""


def ids_may_cross(target: str | None, makers: frozenset[str], vocabulary: Vocabulary) -> bool:
    """Whether all makers have the vocabulary `target` (a hash, None when unknown)."""
    return target is not None and all(vocabulary(maker) == target for maker in makers)

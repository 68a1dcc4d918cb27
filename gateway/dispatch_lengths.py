"""Prompt lengths as they came: token sums below any length, kept incrementally. Pure.

A Fenwick tree over lengths: adding a prompt and finding the length up to which prompts hold a given number of tokens
take a few steps each, however many prompts there are.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Protocol

WINDOW = 4096
"""Prompts remembered."""

MAX_TOKENS = 1 << 17
"""A longer prompt counts as this long; it bounds the tree's memory."""

PROMPT_PRIOR_TOKENS = (16, 32, 64, 128, 256, 512, 1024, 2048)
"""Stands for prompts that nobody has sent yet; each real one displaces one of these."""


class Lengths(Protocol):
    """A distribution of prompt lengths, weighted by their tokens."""

    @property
    def total_tokens(self) -> int:
        """Tokens of all prompts."""
        ...

    def upto(self, tokens: float) -> tuple[int, int, int]:
        """(length, tokens of shorter prompts, tokens of prompts of this length): the length at which the running sum
        of ascending lengths passes `tokens`. Needs 0 <= tokens < total_tokens.
        """
        ...


class LengthHistory:
    """The last `limit` prompts."""

    def __init__(self, limit: int = WINDOW, prior_tokens: Sequence[int] = PROMPT_PRIOR_TOKENS) -> None:
        self._limit = limit
        self._order: deque[int] = deque()
        self._counts = array("q", [0])
        self._tree = array("q", [0])
        self.total_tokens = 0
        self._priors = 0
        for tokens in prior_tokens:
            self._put(tokens)
        self._priors = len(self._order)

    def __len__(self) -> int:
        return len(self._order)

    @property
    def mean_tokens(self) -> float:
        """Mean prompt length; 0 without prompts."""
        return self.total_tokens / len(self._order) if self._order else 0.0

    def counts(self) -> Iterator[tuple[int, int]]:
        """(length, prompts of this length), ascending."""
        return ((length, count) for length, count in enumerate(self._counts) if count)

    def add(self, tokens: int) -> None:
        """A prompt of `tokens` tokens came."""
        self._put(tokens)
        if self._priors:
            self._priors -= 1
        elif len(self._order) <= self._limit:
            return
        self._change(self._order.popleft(), -1)

    def upto(self, tokens: float) -> tuple[int, int, int]:
        """See Lengths. Raises ValueError outside of its domain."""
        if not 0 <= tokens < self.total_tokens:
            raise ValueError(f"{tokens} is not within the {self.total_tokens} tokens of the history")
        place, below = 0, 0
        step = (len(self._tree) - 1).bit_length() - 1
        for size in (1 << k for k in range(step, -1, -1)):
            if place + size < len(self._tree) and below + self._tree[place + size] <= tokens:
                place += size
                below += self._tree[place]
        length = place + 1
        return length, below, length * self._counts[length]

    def _put(self, tokens: int) -> None:
        length = max(0, min(MAX_TOKENS, tokens))
        if length >= len(self._counts):
            self._grow(length)
        self._order.append(length)
        self._change(length, 1)

    def _change(self, length: int, by: int) -> None:
        self._counts[length] += by
        tokens = by * length
        self.total_tokens += tokens
        while 0 < length < len(self._tree):
            self._tree[length] += tokens
            length += length & -length

    def _grow(self, length: int) -> None:
        """Room for `length`, doubled so that growing stays rare.

        A node stands for the lengths since its lowest bit: of the new ones only powers of two have older ones below.
        """
        size, power = 1 << length.bit_length(), 1 << (len(self._tree) - 1).bit_length()
        for counted in (self._counts, self._tree):
            counted.frombytes(bytes(counted.itemsize * (size + 1 - len(counted))))
        while power <= size:
            self._tree[power] = self.total_tokens
            power <<= 1

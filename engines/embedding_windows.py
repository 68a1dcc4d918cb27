"""Texts longer than an engine can embed at once: window by window, and the mean of their vectors. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

from attrs import frozen


@frozen
class Window:
    """A part of a text: which text, and its token ids."""

    text: int
    ids: tuple[int, ...]


def windows(texts: Sequence[Sequence[int]], most_tokens: int) -> list[Window]:
    """Every text in parts of nearly equal size, none over `most_tokens` (at least 1).

    >>> [window.ids for window in windows([(1, 2, 3, 4, 5)], 4)]
    [(1, 2, 3), (4, 5)]
    """
    found = []
    for number, ids in enumerate(texts):
        count = max(1, -(-len(ids) // most_tokens))
        size = max(1, -(-len(ids) // count))
        found += [Window(number, tuple(ids[at : at + size])) for at in range(0, max(1, len(ids)), size)]
    return found


def joined(parts: Sequence[Window], vectors: Sequence[Sequence[float]], texts: int) -> list[tuple[float, ...]]:
    """One vector of length 1 per text: the mean of its windows' vectors, each by its tokens."""
    found: list[tuple[float, ...]] = []
    for number in range(texts):
        mine = [(part, vector) for part, vector in zip(parts, vectors, strict=True) if part.text == number]
        if len(mine) == 1:
            found.append(tuple(mine[0][1]))
            continue
        sums = [sum(len(part.ids) * vector[place] for part, vector in mine) for place in range(len(mine[0][1]))]
        length = sqrt(sum(value * value for value in sums)) or 1.0
        found.append(tuple(value / length for value in sums))
    return found

"""Plans from raw arrays of past requests, with numpy where it is present: same tables as the pure path, to the bit.

Lengths are counted and not sorted. TTFTs are sorted once, since the plan's ECDF is their order.
"""

from __future__ import annotations

from typing import Any

from gateway.dispatch_lengths import MAX_TOKENS
from gateway.dispatch_table import DispatchTable, Regime, make_table
from gateway.ttft import rank


class ArrayLengths:
    """Lengths of an integer array (any shape (n,), values >= 0)."""

    def __init__(self, lengths: Any) -> None:
        import numpy as np

        clipped = np.minimum(lengths, MAX_TOKENS) if len(lengths) and int(lengths.max()) > MAX_TOKENS else lengths
        self._counts = np.bincount(clipped)
        self._sums = np.cumsum(self._counts * np.arange(len(self._counts)))
        self.total_tokens = int(self._sums[-1]) if len(self._sums) else 0

    def upto(self, tokens: float) -> tuple[int, int, int]:
        """See Lengths."""
        length = int(self._sums.searchsorted(tokens, side="right"))
        below = int(self._sums[length - 1]) if length else 0
        return length, below, length * int(self._counts[length])


class ArrayTtfts:
    """TTFTs of a float array (any shape (n,), infinite for failures): the ECDF is the sorted array."""

    def __init__(self, ttfts_s: Any) -> None:
        import numpy as np

        self._ordered = np.sort(ttfts_s)
        self.samples = len(self._ordered)
        self._finite = int(self._ordered.searchsorted(np.inf, side="left"))
        self.last_s = float(self._ordered[self._finite - 1]) if self._finite else 0.0

    def at(self, seconds: float) -> float:
        """F(seconds)."""
        return int(self._ordered[: self._finite].searchsorted(seconds, side="right")) / self.samples

    def quantile_s(self, ratio: float) -> float:
        """The smallest value with F >= ratio."""
        place = rank(ratio, self.samples)
        return float(self._ordered[place - 1])


def table_of_arrays(
    regime: Regime, lengths: Any, ttfts_s: Any, budget_ratio: float, tail_ratio: float
) -> tuple[DispatchTable, ArrayTtfts]:
    """The plan and the server's distribution from numpy arrays of past requests. Raises ValueError for bad arrays."""
    ttft = ArrayTtfts(ttfts_s)
    return make_table(regime, ArrayLengths(lengths), ttft, budget_ratio, tail_ratio), ttft

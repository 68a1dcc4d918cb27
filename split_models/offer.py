"""Which cuts are worth files: each sends fewer bytes than those before it, and int8 must keep the answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from attrs import frozen

from split_models.codec import INT8, RAW, wire_bytes
from split_models.cuts import Cut

GOOD_ERROR_RATIO = 0.01
"""int8 is offered where every calibration answer keeps its labels and each box an IoU of 0.99."""


@frozen
class Offered:
    """One cut and codec to make files for; `error_ratio` is the task's error on the calibration inputs."""

    cut: Cut
    codec: str
    error_ratio: float


def offers(
    cuts: Sequence[Cut], error_of: Callable[[Cut], float], max_cuts: int, go_on: Callable[[], bool]
) -> Iterator[Offered]:
    """Walk the cuts from the input on; a cut is offered when it sends less than every one before it.

    Of cuts with equal bytes the first whose int8 error is at most GOOD_ERROR_RATIO wins. `error_of` is costly; `go_on`
    ends the walk. The first cut is always offered raw, so that there is one that needs no calibration.
    """
    least: int | None = None
    chosen = 0
    for index, cut in enumerate(cuts):
        if chosen >= max_cuts or not go_on():
            return
        size_bytes = wire_bytes(INT8, crossing_of(cut))
        if least is not None and size_bytes >= least:
            continue
        error_ratio = error_of(cut)
        good = error_ratio <= GOOD_ERROR_RATIO
        if good or index == 0:
            yield Offered(cut, RAW, 0.0)
            chosen += 1
        if good:
            yield Offered(cut, INT8, error_ratio)
            least = size_bytes


def crossing_of(cut: Cut) -> tuple[tuple[str, str, tuple[int, ...]], ...]:
    """The cut's tensors as (name, datatype, shape)."""
    return tuple((tensor.name, tensor.datatype, tensor.shape) for tensor in cut.crossing)

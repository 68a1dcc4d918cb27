"""Which cuts are worth files: each sends fewer bytes than those before it, and its form must keep the answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from attrs import frozen

from split_models.codec import FP16, INT8, RAW, wire_bytes
from split_models.cuts import Cut

GOOD_ERROR_RATIO = 0.01
"""fp16 and int8 are offered where every calibration answer keeps its labels and each box an IoU of 0.99, or, without
a recipe, where no output moves by more than this. Policies may ask for less error, and by default allow twice it."""


ONE_PACKET_BYTES = 1_024
"""What travels in a single packet beside the headers: a shorter form would not arrive earlier."""


@frozen
class Offered:
    """One cut and codec to make files for; `error_ratio` is the task's error on the calibration inputs."""

    cut: Cut
    codec: str
    error_ratio: float


def offers(
    cuts: Sequence[Cut], error_of: Callable[[Cut, str], float], max_cuts: int, go_on: Callable[[], bool]
) -> Iterator[Offered]:
    """Walk the cuts from the input on; a cut is offered when its smallest good form sends less than every one before.

    Of cuts with equal bytes the first whose error is at most GOOD_ERROR_RATIO wins. `error_of` is costly; `go_on`
    ends the walk. A cut that is offered is offered raw as well, which needs no calibration, and the first cut always.
    """
    least: int | None = None
    chosen = 0
    for index, cut in enumerate(cuts):
        if chosen >= max_cuts or not go_on():
            return
        if least is not None and _size(cut, INT8) >= least:
            continue
        good = [Offered(cut, RAW, 0.0), *_good_forms(cut, error_of)]
        smallest = min(_size(cut, offered.codec) for offered in good)
        worth = len(good) > 1 or _is_small(cut)
        if index == 0 or (worth and (least is None or smallest < least)):
            yield from good
            chosen += 1
            if worth:
                least = smallest


def _good_forms(cut: Cut, error_of: Callable[[Cut, str], float]) -> Iterator[Offered]:
    """int8 first, for where it is good fp16 is as a rule."""
    if _is_small(cut):
        return
    for codec in (INT8, FP16):
        error_ratio = error_of(cut, codec)
        if error_ratio <= GOOD_ERROR_RATIO:
            yield Offered(cut, codec, error_ratio)


def _is_small(cut: Cut) -> bool:
    """Nothing that a codec could make faster: an int8 model hands over int8, and one packet takes what it takes."""
    return all(tensor.datatype != "FP32" for tensor in cut.crossing) or _size(cut, RAW) <= ONE_PACKET_BYTES


def _size(cut: Cut, codec: str) -> int:
    return wire_bytes(codec, crossing_of(cut))


def crossing_of(cut: Cut) -> tuple[tuple[str, str, tuple[int, ...]], ...]:
    """The cut's tensors as (name, datatype, shape)."""
    return tuple((tensor.name, tensor.datatype, tensor.shape) for tensor in cut.crossing)

"""Which cuts are worth files: each sends fewer bytes than those before it, and its form must keep the answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import inf

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
    cuts: Sequence[Cut],
    error_of: Callable[[Cut, str], float],
    max_cuts: int,
    go_on: Callable[[], bool],
    raw: frozenset[str] = frozenset(),
) -> Iterator[Offered]:
    """Walk the cuts from the input on; a cut is offered when its smallest good form sends less than every one before.

    Of cuts with equal bytes the first whose error is at most GOOD_ERROR_RATIO wins; one that is good with fp16 only
    gives way to the next of its size that is good with int8. `error_of` is costly; `go_on` ends the walk. A cut that is
    offered is offered raw as well, which needs no calibration, and the first cut always. raw: names of tensors that are
    an input as it came; cuts without them compete among themselves only, for a policy may allow no others.
    """
    walk = _Walk(error_of, max_cuts, raw)
    for index, cut in enumerate(cuts):
        if walk.chosen >= max_cuts or not go_on():
            break
        yield from walk.at(cut, index == 0)
    if walk.chosen < max_cuts:
        yield from walk.waiting


class _Walk:
    """least: bytes of the smallest form so far, of all cuts and of those that send no input as it came.

    waiting: a cut that is good with fp16 and not with int8.
    """

    def __init__(self, error_of: Callable[[Cut, str], float], max_cuts: int, raw: frozenset[str]) -> None:
        self._error_of = error_of
        self._max_cuts = max_cuts
        self._raw = raw
        self._least: dict[bool, float] = {False: inf, True: inf}
        self.chosen = 0
        self.waiting: list[Offered] = []

    def at(self, cut: Cut, first: bool) -> Iterator[Offered]:
        private = not any(tensor.name in self._raw for tensor in cut.crossing)
        if _size(cut, INT8) >= self._least[private]:
            return
        good = [Offered(cut, RAW, 0.0), *self._good_forms(cut, self._least[private])]
        worth = len(good) > 1 or _is_small(cut)
        smallest = min(_size(cut, offered.codec) for offered in good)
        if not first and (not worth or smallest >= self._least[private]):
            return
        halved_only = worth and good[-1].codec == FP16 and len(good) == 2
        larger = self.waiting and _size(self.waiting[0].cut, INT8) > _size(cut, INT8)
        if larger and self.chosen + 1 < self._max_cuts:  # else the last place is for the cut that sends less
            yield from self._taken(self.waiting)
        self.waiting = good if halved_only and not first else []
        if not self.waiting:
            yield from self._taken(good)
        if worth:
            self._least[False] = min(self._least[False], smallest)
            if private:
                self._least[True] = min(self._least[True], smallest)

    def _taken(self, offered: list[Offered]) -> Iterator[Offered]:
        self.chosen += bool(offered)
        yield from offered

    def _good_forms(self, cut: Cut, least: float) -> Iterator[Offered]:
        """int8 first, for where it is good fp16 is as a rule."""
        if _is_small(cut):
            return
        found = False
        for codec in (INT8, FP16):
            if not found and _size(cut, codec) >= least:
                return
            error_ratio = self._error_of(cut, codec)
            if error_ratio <= GOOD_ERROR_RATIO:
                found = True
                yield Offered(cut, codec, error_ratio)


def _is_small(cut: Cut) -> bool:
    """Nothing that a codec could make faster: an int8 model hands over int8, and one packet takes what it takes."""
    return all(tensor.datatype != "FP32" for tensor in cut.crossing) or _size(cut, RAW) <= ONE_PACKET_BYTES


def _size(cut: Cut, codec: str) -> int:
    return wire_bytes(codec, crossing_of(cut))


def crossing_of(cut: Cut) -> tuple[tuple[str, str, tuple[int, ...]], ...]:
    """The cut's tensors as (name, datatype, shape)."""
    return tuple((tensor.name, tensor.datatype, tensor.shape) for tensor in cut.crossing)

"""The file that keeps calibration curves: `calibrations.json` in a state folder, written whole."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from attrs import evolve, frozen

from gateway.calibration import Calibration
from protocol.decode import check_schema, decode, encode
from protocol.durable import read_durable, write_durable

SCHEMA = "midstream/calibrations/1.0"
FILE = "calibrations.json"
MAX_CURVES = 500
MAX_POINTS = 2_000
"""Of one curve; a longer one is made coarser when it is kept."""


@frozen
class Calibrations:
    """The document."""

    schema: str
    curves: tuple[Calibration, ...] = ()


def read_calibrations(folder: Path) -> tuple[Calibration, ...]:
    """Every curve; none where there is no file or it is damaged beyond its previous copy."""
    found = read_durable(folder / FILE, _decoded)
    return found.curves if found is not None else ()


class CurvesFile:
    """The curves of a folder as they are now: the file is read again when it was replaced."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: tuple[int, tuple[Calibration, ...]] = (-1, ())

    def __call__(self) -> tuple[Calibration, ...]:
        try:
            changed_ns = (self._folder / FILE).stat().st_mtime_ns
        except OSError:
            return ()
        if changed_ns != self._read[0]:
            self._read = changed_ns, read_calibrations(self._folder)
        return self._read[1]


def keep_calibrations(folder: Path, fresh: Sequence[Calibration]) -> tuple[Calibration, ...]:
    """Put curves in place of older ones of the same scope; the oldest go past MAX_CURVES. Returns all that are kept."""
    scopes = {curve.scope for curve in fresh}
    kept = [curve for curve in read_calibrations(folder) if curve.scope not in scopes]
    curves = tuple([*kept, *map(_coarser, fresh)][-MAX_CURVES:])
    write_durable(folder / FILE, encode(Calibrations(SCHEMA, curves)))
    return curves


def _decoded(data: bytes) -> Calibrations:
    document = decode(Calibrations, data, what="the calibrations", max_bytes=4 << 20)
    check_schema(document.schema, SCHEMA)
    return document


def _coarser(curve: Calibration) -> Calibration:
    step = -(-len(curve.scores) // MAX_POINTS)
    if step == 1:
        return curve
    last = len(curve.scores) - 1
    places = sorted({*range(0, last, step), last})
    return evolve(
        curve,
        scores=tuple(curve.scores[place] for place in places),
        probabilities=tuple(curve.probabilities[place] for place in places),
    )

"""Both sides of a cut with the ranges that calibration found, and the task's error of each form."""

from __future__ import annotations

from pathlib import Path

from attrs import evolve, frozen

from engines.arrays import to_array, to_tensor
from engines.port import TensorModel, TensorRuntime
from protocol import zstd
from protocol.errors import MidstreamError
from protocol.tensors import Tensor
from split_models.backend import Partitioner
from split_models.calibration import Calibration, Observed
from split_models.codec import FINEST, FP16, INT8, RAW, Affine, Coarseness, dequantise, halve, quantise
from split_models.cuts import Cut
from split_models.graph import Graph
from split_models.offer import GOOD_ERROR_RATIO
from split_models.partition_onnx import Parts
from split_models.task import Task

MIN_QUANTISED_ANSWER = 4_096
"""Elements from which a tail's single one-channel FP32 output travels as UINT8 with the int8 codec."""

CLIPS = (0.0, 0.0001, 0.001, 0.01)
"""Shares of values cut off at each end, tried in this order: a rare outlier may cost the others their resolution."""

COARSER = tuple(
    evolve(FINEST, levels=levels, evenness=even) for levels in (255, 180, 127, 90, 63, 31) for even in (0.0, 0.5, 1.0)
)
"""Tried from the fewest compressed bytes on, once the finest form is known to keep the answers."""

UNSEEN_ERROR_RATIO = 2 * GOOD_ERROR_RATIO
"""What policies allow by default: asked of inputs that a form has not seen."""

WEIGHED_INPUTS = 2
"""Of the last ones: a user's samples come after those that are drawn, which compress too well."""

LEAST_TO_HALVE = 4
"""Inputs from which half of them are enough to learn ranges from."""

WORTH_COARSER_RATIO = 0.95
"""A coarser form must save this much over the finest."""

HOPELESS_ERROR_RATIO = 0.05
"""From here no other range was ever seen to help."""


@frozen
class Bench:
    """What a seam is tried with: a scratch file, a runtime and its threads."""

    trial: Path
    runtime: TensorRuntime
    threads: int = 0


class Seam:
    """One prepared model's seams."""

    def __init__(self, graph: Graph, partitioner: Partitioner, calibration: Calibration, task: Task) -> None:
        self.calibration = calibration
        self.answer: Affine | None = None
        self._partitioner = partitioner
        self._task = task
        self._order = list(range(len(calibration.observed)))
        self._forms: dict[str, Coarseness] = {}
        self._affines: dict[tuple[str, Coarseness, bool], Affine] = {}
        outputs = graph.outputs
        # A range that nobody has seen on real inputs is not put on what leaves the model.
        if task.real and len(outputs) == 1 and outputs[0].datatype == "FP32":
            found = calibration.affine(outputs[0].name) if outputs[0].elements >= MIN_QUANTISED_ANSWER else None
            self.answer = found if found is not None and len(found.scales) == 1 else None

    def affines(self, cut: Cut, learning: bool = False) -> dict[str, Affine]:
        """The ranges in use by tensor: the form that was found for this cut, else the finest."""
        form = self._forms.get(cut.id, FINEST)
        names = [tensor.name for tensor in cut.crossing if tensor.datatype == "FP32"]
        return {name: self._affine(name, form, learning) for name in names}

    def parts(self, cut: Cut, codec: str, learning: bool = False) -> Parts:
        """Head and tail files of a cut."""
        if codec != INT8:
            return self._partitioner.split(cut, codec)
        return self._partitioner.split(cut, codec, self.affines(cut, learning), self.answer)

    def sent(self, seen: Observed, cut: Cut, codec: str, parts: Parts, learning: bool = False) -> list[Tensor]:
        """What a head would send for this input."""
        affines = self.affines(cut, learning) if codec == INT8 else {}
        sent: list[Tensor] = []
        for tensor, (name, _, _) in zip(cut.crossing, parts.crossing, strict=True):
            given = seen.tensor(tensor.name)
            if codec == RAW or tensor.datatype != "FP32":
                sent.append(Tensor(name, given.datatype, given.shape, given.data))
            elif codec == FP16:
                sent.append(to_tensor(name, halve(to_array(given))))
            else:
                sent.append(to_tensor(name, quantise(to_array(given), affines[tensor.name])))
        return sent

    def plain(self, outputs: list[Tensor], codec: str) -> list[Tensor]:
        """A tail's outputs as the whole model would give them."""
        answer = self.answer if codec == INT8 else None
        return [dequantise(tensor, answer) if answer else tensor for tensor in outputs]

    def error_ratio(self, cut: Cut, codec: str, bench: Bench) -> float:
        """The task's error of a form on the calibration inputs; a form that cannot be loaded or run counts as wrong.

        int8 looks for the fewest compressed bytes that keep every answer, and is judged with ranges of half the inputs
        as well, where there are enough of them.
        """
        if codec != INT8:
            return self._error_ratio(cut, codec, bench)
        error_ratio = self._best_clip(cut, bench)
        return self._coarsest(cut, error_ratio, bench) if error_ratio <= GOOD_ERROR_RATIO else error_ratio

    def _best_clip(self, cut: Cut, bench: Bench) -> float:
        """Made-up inputs have no rare outliers that mean anything: there the ranges stay whole."""
        best: tuple[float, Coarseness] | None = None
        for clip in CLIPS if self._task.real else CLIPS[:1]:
            self._forms[cut.id] = evolve(FINEST, clip=clip)
            error_ratio = self._int8_error(cut, bench)
            if best is None or error_ratio < best[0]:
                best = (error_ratio, self._forms[cut.id])
            if best[0] <= GOOD_ERROR_RATIO or error_ratio > HOPELESS_ERROR_RATIO:
                break
        assert best is not None
        self._forms[cut.id] = best[1]
        return best[0]

    def _coarsest(self, cut: Cut, error_ratio: float, bench: Bench) -> float:
        """Keep the form with the fewest compressed bytes whose error is still good; returns its error.

        Errors grow as bytes shrink, so the forms are halved, not walked.
        """
        best, found = self._forms[cut.id], error_ratio
        most = WORTH_COARSER_RATIO * self._packed_bytes(cut, best)
        sized = [(self._packed_bytes(cut, form), form) for form in (evolve(c, clip=best.clip) for c in COARSER)]
        forms = [form for size_bytes, form in sorted(sized, key=lambda one: one[0]) if size_bytes < most]
        low, high = 0, len(forms)
        while low < high:
            middle = (low + high) // 2
            self._forms[cut.id] = forms[middle]
            tried = self._int8_error(cut, bench)
            if tried <= GOOD_ERROR_RATIO:
                best, found, high = forms[middle], tried, middle
            else:
                low = middle + 1
        self._forms[cut.id] = best
        return found

    def _packed_bytes(self, cut: Cut, form: Coarseness) -> int:
        """Compressed bytes of the first inputs' codes; without a library all forms weigh the same."""
        if not zstd.available():
            return 0
        total = 0
        for tensor in cut.crossing:
            if tensor.datatype == "FP32":
                affine = self._affine(tensor.name, form)
                arrays = [to_array(seen.tensor(tensor.name)) for seen in self.calibration.observed[-WEIGHED_INPUTS:]]
                codes = [to_tensor(tensor.name, quantise(array, affine)) for array in arrays]
                total += sum(len(zstd.compress_tensors(b"", [one])) for one in codes)
        return total

    def _affine(self, name: str, form: Coarseness, learning: bool = False) -> Affine:
        key = (name, form, learning)
        if key not in self._affines:
            self._affines[key] = self.calibration.affine(name, form, learning)
        return self._affines[key]

    def _int8_error(self, cut: Cut, bench: Bench) -> float:
        """Of the ranges as they are shipped; 1 when ranges of half the inputs fail the others, for those are unseen."""
        error_ratio = self._error_ratio(cut, INT8, bench, GOOD_ERROR_RATIO)
        if error_ratio > GOOD_ERROR_RATIO or len(self.calibration.observed) < LEAST_TO_HALVE:
            return error_ratio
        unseen = self._error_ratio(cut, INT8, bench, UNSEEN_ERROR_RATIO, learning=True)
        return error_ratio if unseen <= UNSEEN_ERROR_RATIO else 1.0

    def _error_ratio(
        self, cut: Cut, codec: str, bench: Bench, enough: float = GOOD_ERROR_RATIO, learning: bool = False
    ) -> float:
        """Worst task error over the calibration inputs, or the first over `enough`: what failed last is tried first."""
        tail: TensorModel | None = None
        worst = 0.0
        try:
            parts = self.parts(cut, codec, learning)
            bench.trial.write_bytes(parts.tail)
            tail = bench.runtime.load(bench.trial, bench.threads)
            for place, index in enumerate(self._order):
                seen = self.calibration.observed[index]
                outputs = self.plain(list(tail.run(self.sent(seen, cut, codec, parts, learning))), codec)
                worst = max(worst, self._task.error_ratio(self._task.answer(outputs, seen.case), seen.answer))
                if worst > enough:
                    self._order.insert(0, self._order.pop(place))
                    break
        except MidstreamError:
            return 1.0
        finally:
            if tail is not None:
                tail.close()
            bench.trial.unlink(missing_ok=True)
        return worst

"""Both sides of a cut with the ranges that calibration found, and the task's error of the int8 form."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from engines.arrays import to_array, to_tensor
from engines.port import TensorModel, TensorRuntime
from protocol.tensors import Tensor
from split_models.calibration import Calibration
from split_models.codec import FP16, INT8, Affine, dequantise, halve, quantise
from split_models.cuts import Cut
from split_models.offer import GOOD_ERROR_RATIO
from split_models.partition_onnx import Partitioner, Parts
from split_models.prepare_onnx import Prepared
from split_models.recipes import Recipe

MIN_QUANTISED_ANSWER = 4_096
"""Elements from which a tail's single one-channel FP32 output travels as UINT8 with the int8 codec."""

CLIPS = (0.0, 0.0001, 0.001, 0.01)
"""Shares of values cut off at each end, tried in this order: a rare outlier may cost the others their resolution."""

HOPELESS_ERROR_RATIO = 0.05
"""From here no other range was ever seen to help."""


class Seam:
    """One prepared model's seams."""

    def __init__(self, prepared: Prepared, partitioner: Partitioner, calibration: Calibration) -> None:
        self.calibration = calibration
        self.answer: Affine | None = None
        self._partitioner = partitioner
        self._affines: dict[str, Affine] = {}
        outputs = prepared.graph.outputs
        if len(outputs) == 1 and outputs[0].datatype == "FP32" and outputs[0].elements >= MIN_QUANTISED_ANSWER:
            found = calibration.affine(outputs[0].name)
            self.answer = found if len(found.scales) == 1 else None

    def affine(self, cut: Cut) -> Affine:
        """The ranges in use for a cut: the best that were tried, else the extremes."""
        name = cut.crossing[0].name
        if name not in self._affines:
            self._affines[name] = self.calibration.affine(name)
        return self._affines[name]

    def affines(self, cut: Cut) -> dict[str, Affine]:
        """The same by tensor, as the partitioner takes them."""
        return {cut.crossing[0].name: self.affine(cut)}

    def parts(self, cut: Cut, codec: str) -> Parts:
        """Head and tail files of a cut."""
        if codec != INT8:
            return self._partitioner.split(cut, codec)
        return self._partitioner.split(cut, codec, self.affines(cut), self.answer)

    def sent(self, crossing: Mapping[str, Tensor], cut: Cut, codec: str, parts: Parts) -> list[Tensor]:
        """What a head would send for these activations."""
        tensor = crossing[cut.crossing[0].name]
        if codec == FP16:
            return [to_tensor(parts.crossing[0][0], halve(to_array(tensor)))]
        if codec != INT8:
            return [tensor]
        return [to_tensor(parts.crossing[0][0], quantise(to_array(tensor), self.affine(cut)))]

    def plain(self, outputs: list[Tensor]) -> list[Tensor]:
        """A tail's outputs as the whole model would give them."""
        return [dequantise(tensor, self.answer) if self.answer else tensor for tensor in outputs]

    def best_clip(self, cut: Cut, trial: Path, runtime: TensorRuntime, recipe: Recipe, threads: int) -> float:
        """Try ranges until one keeps every answer; keep the best. `trial` is a scratch file. Returns its error."""
        name = cut.crossing[0].name
        best: tuple[float, Affine] | None = None
        for clip in CLIPS:
            self._affines[name] = self.calibration.affine(name, clip)
            error_ratio = self._error_ratio(cut, trial, runtime, recipe, threads)
            if best is None or error_ratio < best[0]:
                best = (error_ratio, self._affines[name])
            if best[0] <= GOOD_ERROR_RATIO or error_ratio > HOPELESS_ERROR_RATIO:
                break
        assert best is not None
        self._affines[name] = best[1]
        return best[0]

    def _error_ratio(self, cut: Cut, trial: Path, runtime: TensorRuntime, recipe: Recipe, threads: int) -> float:
        """Worst task error over the calibration inputs, or the first that is not good."""
        parts = self.parts(cut, INT8)
        trial.write_bytes(parts.tail)
        tail: TensorModel | None = None
        worst = 0.0
        try:
            tail = runtime.load(trial, threads)
            for seen in self.calibration.observed:
                outputs = list(tail.run(self.sent(seen.crossing, cut, INT8, parts)))
                likeness = recipe.compare(recipe.after(self.plain(outputs), seen.made.context), seen.answer)
                worst = max(worst, likeness.error_ratio)
                if worst > GOOD_ERROR_RATIO:
                    break
        finally:
            if tail is not None:
                tail.close()
            trial.unlink(missing_ok=True)
        return worst

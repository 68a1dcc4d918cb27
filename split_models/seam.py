"""Both sides of a cut with the ranges that calibration found, and the task's error of each form."""

from __future__ import annotations

from pathlib import Path

from engines.arrays import to_array, to_tensor
from engines.port import TensorModel, TensorRuntime
from protocol.errors import MidstreamError
from protocol.tensors import Tensor
from split_models.backend import Partitioner
from split_models.calibration import Calibration, Observed
from split_models.codec import FP16, INT8, RAW, Affine, dequantise, halve, quantise
from split_models.cuts import Cut
from split_models.graph import Graph
from split_models.offer import GOOD_ERROR_RATIO
from split_models.partition_onnx import Parts
from split_models.task import Task

MIN_QUANTISED_ANSWER = 4_096
"""Elements from which a tail's single one-channel FP32 output travels as UINT8 with the int8 codec."""

CLIPS = (0.0, 0.0001, 0.001, 0.01)
"""Shares of values cut off at each end, tried in this order: a rare outlier may cost the others their resolution."""

HOPELESS_ERROR_RATIO = 0.05
"""From here no other range was ever seen to help."""


class Seam:
    """One prepared model's seams."""

    def __init__(self, graph: Graph, partitioner: Partitioner, calibration: Calibration, task: Task) -> None:
        self.calibration = calibration
        self.answer: Affine | None = None
        self._partitioner = partitioner
        self._task = task
        self._clips: dict[str, float] = {}
        self._affines: dict[tuple[str, float], Affine] = {}
        outputs = graph.outputs
        # A range that nobody has seen on real inputs is not put on what leaves the model.
        if task.real and len(outputs) == 1 and outputs[0].datatype == "FP32":
            found = calibration.affine(outputs[0].name) if outputs[0].elements >= MIN_QUANTISED_ANSWER else None
            self.answer = found if found is not None and len(found.scales) == 1 else None

    def affines(self, cut: Cut) -> dict[str, Affine]:
        """The ranges in use by tensor: the best that were tried for this cut, else the extremes."""
        clip = self._clips.get(cut.id, 0.0)
        return {tensor.name: self._affine(tensor.name, clip) for tensor in cut.crossing if tensor.datatype == "FP32"}

    def parts(self, cut: Cut, codec: str) -> Parts:
        """Head and tail files of a cut."""
        if codec != INT8:
            return self._partitioner.split(cut, codec)
        return self._partitioner.split(cut, codec, self.affines(cut), self.answer)

    def sent(self, seen: Observed, cut: Cut, codec: str, parts: Parts) -> list[Tensor]:
        """What a head would send for this input."""
        affines = self.affines(cut) if codec == INT8 else {}
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

    def error_ratio(self, cut: Cut, codec: str, trial: Path, runtime: TensorRuntime, threads: int) -> float:
        """The task's error of a form on the calibration inputs; int8 tries ranges until one keeps every answer.

        `trial` is a scratch file. A form that the runtime cannot load or run counts as wrong.
        """
        if codec == INT8 and self._task.real:
            return self._best_clip(cut, trial, runtime, threads)
        return self._error_ratio(cut, codec, trial, runtime, threads)

    def _best_clip(self, cut: Cut, trial: Path, runtime: TensorRuntime, threads: int) -> float:
        best: tuple[float, float] | None = None
        for clip in CLIPS:
            self._clips[cut.id] = clip
            error_ratio = self._error_ratio(cut, INT8, trial, runtime, threads)
            if best is None or error_ratio < best[0]:
                best = (error_ratio, clip)
            if best[0] <= GOOD_ERROR_RATIO or error_ratio > HOPELESS_ERROR_RATIO:
                break
        assert best is not None
        self._clips[cut.id] = best[1]
        return best[0]

    def _affine(self, name: str, clip: float) -> Affine:
        if (name, clip) not in self._affines:
            self._affines[name, clip] = self.calibration.affine(name, clip)
        return self._affines[name, clip]

    def _error_ratio(self, cut: Cut, codec: str, trial: Path, runtime: TensorRuntime, threads: int) -> float:
        """Worst task error over the calibration inputs, or the first that is not good."""
        tail: TensorModel | None = None
        worst = 0.0
        try:
            parts = self.parts(cut, codec)
            trial.write_bytes(parts.tail)
            tail = runtime.load(trial, threads)
            for seen in self.calibration.observed:
                outputs = self.plain(list(tail.run(self.sent(seen, cut, codec, parts))), codec)
                worst = max(worst, self._task.error_ratio(self._task.answer(outputs, seen.case), seen.answer))
                if worst > GOOD_ERROR_RATIO:
                    break
        except MidstreamError:
            return 1.0
        finally:
            if tail is not None:
                tail.close()
            trial.unlink(missing_ok=True)
        return worst

"""Text direction (PP-OCR classifier): a picture of one text line -> 0 or 180 degrees, with its probability."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil
from typing import TYPE_CHECKING

from engines.arrays import to_array, to_tensor
from protocol.errors import EngineError
from protocol.tensors import Tensor, TensorSpec
from split_models import images
from split_models.recipes import Likeness, Made
from split_models.sanity import all_finite

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

LABELS = (0, 180)
_LINES = ["upright or turned?", "Midstream 2048", "a longer line of words to read"]


class TextDirection:
    """ppocr-cls: outputs `label` INT64 [1] (degrees) and `score` FP32 [1]."""

    name = "ppocr-cls"
    input_shape: tuple[int, ...] = (1, 3, 48, 192)
    answers: Sequence[TensorSpec] = (TensorSpec("label", "INT64", (None,)), TensorSpec("score", "FP32", (None,)))

    def before(self, encoded: bytes | memoryview, input_name: str, shape: tuple[int, ...]) -> Made:
        """Scale to the input's height, keep the aspect as far as the width allows, pad right, -1..1 in BGR order."""
        import numpy as np

        pixels = images.decode(encoded, input_name)
        height, width = shape[2], shape[3]
        inner = min(width, max(1, ceil(height * pixels.shape[1] / pixels.shape[0])))
        canvas = np.zeros((3, height, width), dtype=np.float32)
        small = images.resize(pixels, inner, height).astype(np.float32)
        canvas[:, :, :inner] = (small / 127.5 - 1.0)[:, :, ::-1].transpose(2, 0, 1)
        return Made((to_tensor(input_name, canvas[None]),))

    def after(self, outputs: Sequence[Tensor], context: Mapping[str, float]) -> tuple[Tensor, ...]:
        """The likelier of the two directions."""
        import numpy as np

        tensor = outputs[0]
        if tensor.datatype != "FP32" or len(tensor.shape) != 2 or tensor.shape[1] != len(LABELS):
            raise EngineError(f"the output is {tensor.datatype}{list(tensor.shape)}, expected FP32[n, 2]")
        if not all_finite(tensor):
            raise EngineError("the output holds values that are not finite")
        scores = to_array(tensor)
        best = scores.argmax(axis=1)
        return (
            to_tensor("label", np.array(LABELS, dtype=np.int64)[best]),
            to_tensor("score", scores[np.arange(len(best)), best].astype(np.float32)),
        )

    def compare(self, answer: Sequence[Tensor], reference: Sequence[Tensor]) -> Likeness:
        """Labels equal; there are no boxes, so the score's agreement stands in for the IoU."""
        same = bool((to_array(answer[0]) == to_array(reference[0])).all())
        difference = float(abs(to_array(answer[1]) - to_array(reference[1])).max())
        return Likeness(same=same, least_iou=max(0.0, 1.0 - difference))

    def calibration(self) -> Sequence[bytes]:
        """Lines of text, each upright and turned, dark on light and light on dark."""
        lines: list[NDArray[np.uint8]] = []
        for index, text in enumerate(_LINES):
            line = images.drawn_text([text], 40 + 12 * len(text), 64, 22, dark_on_light=index % 2 == 0)
            lines += [line, line[::-1, ::-1].copy()]
        return [images.encode(line) for line in lines]

"""Text detection (PP-OCR, differentiable binarization): picture -> probability map -> quadrilaterals and scores.

Post-processing after Liao et al., "Real-time Scene Text Detection with Differentiable Binarization" (AAAI 2020),
section 3.5: regions of the thresholded map, shrunk by training, are grown by area * ratio / perimeter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from engines.arrays import to_array, to_tensor
from engines.give_way import give_way
from protocol.errors import EngineError
from protocol.tensors import Tensor, TensorSpec
from split_models import images
from split_models.boxes import clockwise_from_top_left, components, grown, iou, least_rectangle, mean_inside
from split_models.recipes import Likeness, Made
from split_models.sanity import all_finite

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MAP_THRESHOLD = 0.3
BOX_THRESHOLD = 0.45
GROW_RATIO = 1.6
MIN_SIDE_PIXELS = 3.0
MAX_BOXES = 1_000
MAX_ENLARGE = 2.0
"""A thumbnail is enlarged at most so far: beyond, strokes are blur."""

_LINES = [
    "The seam moves where it costs least,",
    "head here and tail there: 0123456789",
    "a link may fall and come back",
]


class TextDetection:
    """ppocr-det: outputs `boxes` FP32 [n, 4, 2] in pixels of the encoded input, and `scores` FP32 [n]."""

    name = "ppocr-det"
    input_shape: tuple[int, ...] = (1, 3, 480, 480)
    answers: Sequence[TensorSpec] = (TensorSpec("boxes", "FP32", (None, 4, 2)), TensorSpec("scores", "FP32", (None,)))

    def before(self, encoded: bytes | memoryview, input_name: str, shape: tuple[int, ...]) -> Made:
        """Scale to fit, pad right and below with the mean, normalise to -1..1 in BGR order."""
        import numpy as np

        pixels = images.decode(encoded, input_name)
        height, width = shape[2], shape[3]
        scale = min(width / pixels.shape[1], height / pixels.shape[0], MAX_ENLARGE)
        inner = (max(1, round(pixels.shape[1] * scale)), max(1, round(pixels.shape[0] * scale)))
        canvas = np.zeros((3, height, width), dtype=np.float32)
        small = images.resize(pixels, *inner).astype(np.float32)
        canvas[:, : inner[1], : inner[0]] = (small / 127.5 - 1.0)[:, :, ::-1].transpose(2, 0, 1)
        context = {
            "width": pixels.shape[1], "height": pixels.shape[0], "inner_width": inner[0], "inner_height": inner[1],
        }  # fmt: skip
        return Made((to_tensor(input_name, canvas[None]),), context)

    def after(self, outputs: Sequence[Tensor], context: Mapping[str, float]) -> tuple[Tensor, ...]:
        """Boxes from the map's part that holds the picture."""
        probability = _map_of(outputs)[: int(context["inner_height"]), : int(context["inner_width"])]
        boxes, scores = find_boxes(probability)
        factor = (context["width"] / context["inner_width"], context["height"] / context["inner_height"])
        limit = (context["width"] - 1, context["height"] - 1)
        return _answer(boxes, scores, factor, limit)

    def compare(self, answer: Sequence[Tensor], reference: Sequence[Tensor]) -> Likeness:
        """Same number of boxes, each matched to its best partner."""
        found, wanted = to_array(answer[0]), to_array(reference[0])
        if len(found) != len(wanted):
            return Likeness(same=False, least_iou=0.0)
        best = [max(iou(box, other) for other in found) for box in wanted]
        return Likeness(same=True, least_iou=min(best, default=1.0))

    def calibration(self) -> Sequence[bytes]:
        """Pages of text, dark on light and light on dark, at three sizes."""
        pages = [(640, 480, 24, True), (480, 360, 16, False), (320, 240, 12, True)]
        return [images.encode(images.drawn_text(_LINES * 2, *page)) for page in pages]


def find_boxes(probability: NDArray[np.float32]) -> tuple[list[NDArray[np.float64]], list[float]]:
    """Quadrilaterals in map pixels with their scores, top to bottom, then left to right."""
    found: list[tuple[NDArray[np.float64], float]] = []
    for points in components(probability, MAP_THRESHOLD, min_pixels=4)[:MAX_BOXES]:
        give_way()
        corners, long_side, short_side = least_rectangle(points)
        if min(long_side, short_side) < MIN_SIDE_PIXELS:
            continue
        score = mean_inside(probability, corners)
        if score < BOX_THRESHOLD:
            continue
        distance = long_side * short_side * GROW_RATIO / (2 * (long_side + short_side))
        found.append((clockwise_from_top_left(grown(corners, distance)), score))
    found.sort(key=lambda item: (round(float(item[0][0, 1])), float(item[0][0, 0])))
    return [box for box, _ in found], [score for _, score in found]


def _map_of(outputs: Sequence[Tensor]) -> NDArray[np.float32]:
    tensor = outputs[0]
    if tensor.datatype != "FP32" or len(tensor.shape) != 4 or tensor.shape[:2] != (1, 1):
        raise EngineError(f"the map is {tensor.datatype}{list(tensor.shape)}, expected FP32[1, 1, h, w]")
    if not all_finite(tensor):
        raise EngineError("the map holds values that are not finite")
    array: NDArray[np.float32] = to_array(tensor)[0, 0]
    return array


def _answer(
    boxes: list[NDArray[np.float64]], scores: list[float], factor: tuple[float, float], limit: tuple[float, float]
) -> tuple[Tensor, ...]:
    import numpy as np

    scaled = np.array(boxes, dtype=np.float64).reshape(-1, 4, 2) * np.array(factor)
    clipped = np.clip(scaled, 0.0, np.array(limit)).astype(np.float32)
    return (to_tensor("boxes", clipped), to_tensor("scores", np.array(scores, dtype=np.float32)))

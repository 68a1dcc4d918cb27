"""Recipes: what stands before and after a model. The same code runs on the device and in the cloud.

A recipe turns an encoded input (JPEG, PNG) into the model's tensors and the model's outputs into an answer. Blocking:
callers run it on an executor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from attrs import field, frozen

from protocol.errors import ConfigError
from protocol.tensors import Tensor, TensorSpec


@frozen
class Made:
    """Model inputs, and what the recipe must remember to answer in the coordinates of the encoded input."""

    inputs: tuple[Tensor, ...]
    context: Mapping[str, float] = field(factory=dict)


@frozen
class Likeness:
    """How alike two answers are: `same` counts and labels; `least_iou` of matched boxes (1.0 where there are none)."""

    same: bool
    least_iou: float

    @property
    def error_ratio(self) -> float:
        return 1.0 - self.least_iou if self.same else 1.0


class Recipe(Protocol):
    """One recipe. `input_shape` is used when the catalogue fixes none."""

    @property
    def name(self) -> str: ...

    @property
    def input_shape(self) -> tuple[int, ...]: ...

    @property
    def answers(self) -> Sequence[TensorSpec]: ...

    def before(self, encoded: bytes | memoryview, input_name: str, shape: tuple[int, ...]) -> Made:
        """Raises BadRequest when the encoded input cannot be used."""
        ...

    def after(self, outputs: Sequence[Tensor], context: Mapping[str, float]) -> tuple[Tensor, ...]:
        """Raises EngineError when the outputs have another shape or hold values that are not finite."""
        ...

    def compare(self, answer: Sequence[Tensor], reference: Sequence[Tensor]) -> Likeness: ...

    def calibration(self) -> Sequence[bytes]:
        """Encoded inputs that need no file, to learn ranges from and to measure with."""
        ...


def recipe(name: str) -> Recipe:
    """The recipe of that name. Raises ConfigError when there is none."""
    if name == "ppocr-det":
        from split_models.recipe_det import TextDetection

        return TextDetection()
    if name == "ppocr-cls":
        from split_models.recipe_cls import TextDirection

        return TextDirection()
    raise ConfigError(f"no recipe {name!r}", next_step="use one of " + ", ".join(RECIPES), field="recipe")


RECIPES = ("ppocr-det", "ppocr-cls")

"""What the arms need to know of one model: names under which its parts answer, shapes, recipe."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen

from protocol.errors import EngineError
from protocol.models import BundleManifest, CutEntry, head_name, tail_name
from protocol.tensors import Tensor, TensorSpec
from split_models.arm_cost import Arm
from split_models.codec import Affine, dequantise
from split_models.recipes import Recipe


@frozen
class ModelPlan:
    """One cut model. With a recipe the prepared whole model answers under `manifest.model` on both sides."""

    manifest: BundleManifest
    recipe: Recipe | None

    @property
    def name(self) -> str:
        return self.manifest.model

    @property
    def whole(self) -> str:
        """Name of the whole model as it was cut, here and there.

        Without a recipe the public name stays with the file as it came, which may take other sizes.
        """
        return self.name if self.recipe is not None else f"{self.name}-{self.manifest.digest[:8]}"

    def fits(self, tensors: Sequence[Tensor]) -> bool:
        """Whether these inputs have the sizes that the model was cut for."""
        return {tensor.name: tensor.shape for tensor in tensors} == dict(self.manifest.input_shapes)

    @property
    def input_name(self) -> str:
        return next(iter(self.manifest.input_shapes))

    @property
    def input_shape(self) -> tuple[int, ...]:
        return self.manifest.input_shapes[self.input_name]

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """What the whole model gives."""
        return tuple(TensorSpec(name, datatype, shape) for name, datatype, shape in self.manifest.outputs)

    def cut(self, arm: Arm) -> CutEntry:
        """The offered cut that an arm means. Raises EngineError when the bundle no longer has it."""
        for entry in self.manifest.cuts:
            if (entry.id, entry.codec) == (arm.cut, arm.form):
                return entry
        raise EngineError(
            f"{self.name} has no cut {arm.cut} with codec {arm.codec}", next_step="fetch the bundle again"
        )

    def head(self, cut: CutEntry) -> str:
        """Local name of the head."""
        return head_name(self.name, self.manifest.digest, cut.id, cut.codec)

    def tail(self, cut: CutEntry) -> str:
        """Wire name of the tail."""
        return tail_name(self.name, self.manifest.digest, cut.id, cut.codec)

    def answers(self, cut: CutEntry) -> tuple[TensorSpec, ...]:
        """What the tail gives."""
        if cut.answer_scale > 0:
            return tuple(TensorSpec(spec.name, "UINT8", spec.shape) for spec in self.outputs)
        return self.outputs

    def plain(self, cut: CutEntry, outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """A tail's outputs as the whole model would give them."""
        if cut.answer_scale <= 0:
            return outputs
        affine = Affine((cut.answer_scale,), (cut.answer_zero,))
        return tuple(dequantise(tensor, affine) for tensor in outputs)

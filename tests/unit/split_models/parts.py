"""Small stand-ins: a bundle by hand, endpoints that answer what a test says, a recipe without pictures."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from engines.port import TensorAnswer
from protocol.clock import FakeClock
from protocol.errors import BadRequest, Loading, MidstreamError, NotFound
from protocol.models import BUNDLE_SCHEMA, BundleManifest, CutEntry, head_name, tail_name
from protocol.tensors import Tensor, TensorSpec
from split_models.recipes import Likeness, Made

T = TypeVar("T")
DIGEST = "d" * 64
INPUT = TensorSpec("x", "FP32", (1, 4))
HEAD = head_name("m", DIGEST, "003", "int8")
TAIL = tail_name("m", DIGEST, "003", "int8")


def floats(name: str, *values: float, shape: tuple[int, ...] | None = None) -> Tensor:
    return Tensor(name, "FP32", shape or (1, len(values)), struct.pack(f"<{len(values)}f", *values))


def cut(
    ident: str = "003", codec: str = "int8", share: float = 0.1, tail_s: float = 0.02, error_ratio: float = 0.0
) -> CutEntry:
    crossing = ((f"t{ident}", "UINT8" if codec == "int8" else "FP32", (1, 8)),)
    return CutEntry(
        id=ident, codec=codec, crossing=crossing, head_file=f"head_{ident}_{codec}.onnx", head_sha256="0" * 64,
        head_size_bytes=10, tail_file=f"tail_{ident}_{codec}.onnx", tail_sha256="1" * 64, tail_size_bytes=10,
        wire_bytes=128, head_flops=share * 1e9, tail_s=tail_s, error_ratio=error_ratio, down_bytes=64,
    )  # fmt: skip


def manifest(*cuts: CutEntry, whole_s: float = 0.1, cloud_s: float = 0.12) -> BundleManifest:
    return BundleManifest(
        schema=BUNDLE_SCHEMA, model="m", digest=DIGEST, source_sha256="e" * 64, recipe=None,
        input_shapes={"x": (1, 4)}, whole_file="whole.onnx", whole_sha256=DIGEST, whole_size_bytes=10,
        whole_s=whole_s, encoded_bytes=3000, down_bytes=12, cuts=cuts, outputs=(("y", "FP32", (1, 2)),),
        cloud_s=cloud_s, flops=1e9, single_cuts=40,
    )  # fmt: skip


class WordRecipe:
    """The encoded input is the word `good`, spaces may follow; the answer is the model's output under another name."""

    name = "word"
    input_shape: tuple[int, ...] = (1, 4)
    answers: Sequence[TensorSpec] = (TensorSpec("answer", "FP32", (1, 2)),)

    def __init__(self) -> None:
        self.decoded = 0

    def before(self, encoded: bytes | memoryview, input_name: str, shape: tuple[int, ...]) -> Made:
        self.decoded += 1
        if bytes(encoded).rstrip() != b"good":
            raise BadRequest("not the word", field=input_name)
        return Made((floats(input_name, 1, 2, 3, 4),))

    def after(self, outputs: Sequence[Tensor], context: Mapping[str, float]) -> tuple[Tensor, ...]:
        return (Tensor("answer", "FP32", outputs[0].shape, outputs[0].data),)

    def compare(self, answer: Sequence[Tensor], reference: Sequence[Tensor]) -> Likeness:
        return Likeness(same=bytes(answer[0].data) == bytes(reference[0].data), least_iou=1.0)

    def calibration(self) -> Sequence[bytes]:
        return [b"good"]


class SlowWordRecipe(WordRecipe):
    """Takes `before_s` and `after_s` seconds of a clock that is moved by hand."""

    def __init__(self, clock: FakeClock, before_s: float, after_s: float) -> None:
        super().__init__()
        self._clock = clock
        self._seconds = (before_s, after_s)

    def before(self, encoded: bytes | memoryview, input_name: str, shape: tuple[int, ...]) -> Made:
        self._clock.advance(self._seconds[0])
        return super().before(encoded, input_name, shape)

    def after(self, outputs: Sequence[Tensor], context: Mapping[str, float]) -> tuple[Tensor, ...]:
        self._clock.advance(self._seconds[1])
        return super().after(outputs, context)


class Inline:
    """Runs pre- and post-processing at once."""

    async def run(self, fn: Callable[..., T], *args: Any) -> T:
        return fn(*args)


Reaction = Tensor | Sequence[Tensor] | MidstreamError | float
"""What an endpoint does: answer these tensors, raise, or hang for seconds."""


class Scripted:
    """A TensorEndpoint that reacts by model name; remembers who was asked and who was given up.

    `digest` names its weights; after_s: how long it takes. stopped_after_s: seconds that a run went on which was
    stopped; None where runs cannot be.
    """

    def __init__(self, reactions: Mapping[str, Reaction], *, digest: str = DIGEST, compute_s: float = 0.01) -> None:
        self.reactions = dict(reactions)
        self.digest = digest
        self.compute_s = compute_s
        self.asked: list[str] = []
        self.received: list[tuple[Tensor, ...]] = []
        self.preloaded: list[str] = []
        self.unloaded: set[str] = set()
        self.waiting_s = 0.0
        self.after_s = 0.0
        self.cancelled: list[str] = []
        self.stopped_after_s: float | None = None

    def stops(self, name: str) -> bool:
        return self.stopped_after_s is not None

    async def infer(
        self,
        model: str,
        inputs: Sequence[Tensor],
        deadline_s: float,
        *,
        load: bool = True,
        left: Callable[[float], None] | None = None,
    ) -> TensorAnswer:
        if not load and model in self.unloaded:
            raise Loading(f"{model} is not in memory", retry_after_s=1.0)
        self.asked.append(model)
        self.received.append(tuple(inputs))
        if self.after_s:
            await asyncio.sleep(self.after_s)
        reaction = self.reactions.get(model)
        if reaction is None:
            raise NotFound(f"no model {model}")
        if isinstance(reaction, MidstreamError):
            raise reaction
        if isinstance(reaction, float):
            try:
                await asyncio.sleep(reaction)
            except asyncio.CancelledError:
                self.cancelled.append(model)
                if left is not None and self.stopped_after_s is not None:
                    left(self.stopped_after_s)
                raise
            return TensorAnswer((), self.digest)
        outputs = (reaction,) if isinstance(reaction, Tensor) else tuple(reaction)
        return TensorAnswer(outputs, self.digest, compute_s=self.compute_s)

    async def describe(self, name: str) -> tuple[Sequence[TensorSpec], Sequence[TensorSpec], str]:
        if name not in self.reactions:
            raise NotFound(f"no model {name}")
        return (INPUT,), (TensorSpec("y", "FP32", (1, 2)),), self.digest

    async def preload(self, name: str, *, keep: bool = False, warm: bool = False) -> float | None:
        if name not in self.reactions:
            raise NotFound(f"no model {name}")
        self.preloaded.append(name)
        return None

    def loaded(self, name: str) -> bool:
        return name not in self.unloaded

    def wait_s(self) -> float:
        return self.waiting_s

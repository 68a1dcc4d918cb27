"""What stands behind the front door: models by name, answered here (any local model) or by a runner (cut models)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol

from attrs import evolve, field, frozen

from engines.arrays import to_array, to_tensor
from engines.port import TensorAnswer
from protocol.clock import Clock
from protocol.errors import BadRequest, Loading, MidstreamError, NotFound
from protocol.events import Emit, TensorDone, ignore
from protocol.oip import InferRequest, ModelMetadata, bytes_elements
from protocol.tensors import Tensor, TensorSpec
from protocol.trace import present
from split_models.arms import IMAGE, Compute, Work, timed
from split_models.recipes import Recipe
from split_models.runner import Runner

PLATFORMS = {"onnx": "onnx_onnxv1", "tflite": "tensorflow_tflite"}


LOADING_RETRY_S = 2.0
"""Models of this way are in memory within a second or two each."""


USERS_PRIORITY = 1


def _none_loading(name: str) -> bool:
    return False


class LocalModels(Protocol):
    """The part of engines.local.LocalEndpoint that is used here."""

    async def infer(self, model: str, inputs: Sequence[Tensor], deadline_s: float) -> TensorAnswer: ...

    async def describe(self, name: str) -> tuple[Sequence[TensorSpec], Sequence[TensorSpec], str]: ...

    async def preload(self, name: str, *, keep: bool = False, warm: bool = False) -> float | None: ...

    def loaded(self, name: str) -> bool: ...

    def wait_s(self) -> float: ...


@frozen
class Served:
    """One answer of the front. `arm` reads device, cut:<id>:<codec>, cloud, or server where nothing was chosen.

    compute_s is all work on the answer; pre_s and post_s are the recipe's part of it.
    """

    outputs: tuple[Tensor, ...]
    digest: str
    arm: str
    wait_s: float = 0.0
    compute_s: float = 0.0
    pre_s: float = 0.0
    post_s: float = 0.0
    reason: str = ""


@frozen
class Shown:
    """A model that the front serves: its platform, and the recipe and input shape for encoded inputs."""

    name: str
    platform: str
    recipe: Recipe | None = None
    input_name: str | None = None
    input_shape: tuple[int, ...] | None = None
    listed: bool = True


@frozen
class Service:
    """All models of one house.

    shown: the models by name, read at each request. runners: those with arms; empty on a server. side: how answers of
    models without arms are called ("device", "server"). loading: whether a model will be shown soon.
    """

    local: LocalModels
    compute: Compute
    clock: Clock
    shown: Callable[[], Mapping[str, Shown]]
    runners: Mapping[str, Runner] = field(factory=dict)
    side: str = "device"
    emit: Emit = ignore
    loading: Callable[[str], bool] = _none_loading

    def names(self) -> Sequence[str]:
        """Models worth listing: tails and heads answer too, and are not listed."""
        return [name for name, shown in self.shown().items() if shown.listed]

    def find(self, name: str) -> Shown:
        """Raises Loading, or NotFound, naming what there is."""
        shown = self.shown().get(name)
        if shown is None and self.loading(name):
            raise Loading(f"model {name[:100]!r} is still loading", retry_after_s=LOADING_RETRY_S)
        if shown is None:
            known = ", ".join(self.names()[:20]) or "none yet"
            raise NotFound(f"there is no model {name[:100]!r} here", next_step=f"models: {known}", field="model")
        return shown

    async def metadata(self, name: str) -> ModelMetadata:
        """Inputs and outputs of a model. Raises NotFound or EngineError."""
        shown = self.find(name)
        inputs, outputs, _ = await self.local.describe(name)
        return ModelMetadata(name=name, inputs=tuple(inputs), outputs=tuple(outputs), platform=shown.platform)

    async def load(self, name: str) -> None:
        """Have a model in memory, warm, before its first request. Raises NotFound, Full or EngineError."""
        await self.local.preload(self.find(name).name, warm=True)

    async def infer(self, request: InferRequest, deadline_s: float) -> Served:
        """Raises NotFound, BadRequest, Full, EngineError or LinkError."""
        shown = self.find(request.model)
        encoded = encoded_input(request, shown)
        runner = self.runners.get(request.model)
        if runner is not None and (runner.plan.recipe is not None or runner.plan.fits(request.inputs)):
            served = await self._by_runner(runner, request, encoded, deadline_s)
        else:
            served = await self._reported(request, self._here(shown, request, encoded, deadline_s))
        outputs = wanted_outputs(served.outputs, request)
        return served if outputs is served.outputs else evolve(served, outputs=outputs)

    async def _here(self, shown: Shown, request: InferRequest, encoded: bytes | None, deadline_s: float) -> Served:
        if encoded is not None:
            return await self._by_recipe(shown, encoded, deadline_s)
        return await self._whole(request, deadline_s)

    async def _reported(self, request: InferRequest, work: Awaitable[Served]) -> Served:
        began_s = self.clock()
        status, served = "cancelled", None
        try:
            served = await work
            status = "ok"
        except MidstreamError as err:
            status = err.code
            raise
        finally:
            now_s = self.clock()
            self.emit(
                TensorDone(
                    at_s=now_s,
                    request_id=request.id,
                    model=request.model,
                    arm=self.side,
                    status=status,
                    total_s=now_s - began_s,
                    queue_s=served.wait_s if served else 0.0,
                    pre_s=served.pre_s if served else 0.0,
                    head_s=served.compute_s - served.pre_s - served.post_s if served else 0.0,
                    post_s=served.post_s if served else 0.0,
                    trace=present(),
                )
            )
        return served

    async def _by_runner(
        self, runner: Runner, request: InferRequest, encoded: bytes | None, deadline_s: float
    ) -> Served:
        tensors = request.inputs if encoded is not None else await self._widened(request)
        work = Work(encoded=encoded, tensors=tensors, can_wait=can_wait(request))
        answer = await runner.infer(work, request.id, deadline_s)
        spent = answer.spent
        return Served(
            answer.outputs,
            answer.digest,
            str(answer.arm),
            wait_s=spent.queue_s + spent.server_queue_s,
            compute_s=spent.work_s,
            pre_s=spent.before_s,
            post_s=spent.after_s,
            reason=answer.reason,
        )

    async def _by_recipe(self, shown: Shown, encoded: bytes, deadline_s: float) -> Served:
        recipe = shown.recipe
        assert recipe is not None
        name, shape = await self._fed(shown, recipe)
        ends_s = self.clock() + deadline_s
        made, first_wait_s, before_s = await timed(self.compute, self.clock, recipe.before, encoded, name, shape)
        answer = await self.local.infer(shown.name, made.inputs, max(0.001, ends_s - self.clock()))
        outputs, last_wait_s, after_s = await timed(
            self.compute, self.clock, recipe.after, answer.outputs, made.context
        )
        wait_s = first_wait_s + answer.wait_s + last_wait_s
        compute_s = before_s + answer.compute_s + after_s
        return Served(outputs, answer.digest, self.side, wait_s, compute_s, before_s, after_s)

    async def _whole(self, request: InferRequest, deadline_s: float) -> Served:
        answer = await self.local.infer(request.model, await self._widened(request), deadline_s)
        return Served(tuple(answer.outputs), answer.digest, self.side, answer.wait_s, answer.compute_s)

    async def _fed(self, shown: Shown, recipe: Recipe) -> tuple[str, tuple[int, ...]]:
        if shown.input_name is not None and shown.input_shape is not None:
            return shown.input_name, shown.input_shape
        inputs, _, _ = await self.local.describe(shown.name)
        return inputs[0].name, recipe.input_shape

    async def _widened(self, request: InferRequest) -> tuple[Tensor, ...]:
        """FP16 for an FP32 input is widened: half the bytes for clients that can."""
        if all(tensor.datatype != "FP16" for tensor in request.inputs):
            return request.inputs
        inputs, _, _ = await self.local.describe(request.model)
        wide = {spec.name for spec in inputs if spec.datatype == "FP32"}
        return tuple(
            _widen(tensor) if tensor.datatype == "FP16" and tensor.name in wide else tensor for tensor in request.inputs
        )


def can_wait(request: InferRequest) -> bool:
    """`priority` of a request: 1 (or 0, or none) for one that a user waits for, more for what may stand behind others.

    The name and the order are Triton's. Raises BadRequest for what is no such number.
    """
    priority = request.parameters.get("priority", 0)
    if isinstance(priority, bool) or not isinstance(priority, int) or priority < 0:
        raise BadRequest(f"{priority!r} is not a priority", next_step="0, 1, or more", field="parameters.priority")
    return priority > USERS_PRIORITY


def encoded_input(request: InferRequest, shown: Shown) -> bytes | None:
    """The encoded picture of a request: one BYTES element for a model with a recipe. None for raw tensors."""
    if len(request.inputs) != 1 or request.inputs[0].datatype != "BYTES":
        return None
    tensor = request.inputs[0]
    if shown.recipe is None:
        raise BadRequest(
            f"{shown.name} takes no encoded input",
            next_step=f"send the tensors that GET /v2/models/{shown.name} names, or `models add --recipe` it",
            field=tensor.name,
        )
    if shown.input_name is not None and tensor.name not in (shown.input_name, IMAGE):
        raise BadRequest(f"the input is called {shown.input_name!r} or {IMAGE!r}", field=tensor.name)
    elements = bytes_elements(tensor)
    if len(elements) != 1:
        raise BadRequest("one picture per request, shape [1]", field=f"{tensor.name}.shape")
    return elements[0]


def wanted_outputs(outputs: tuple[Tensor, ...], request: InferRequest) -> tuple[Tensor, ...]:
    """The outputs that the request names, in its order. Raises BadRequest for a name the model does not give."""
    if request.outputs is None:
        return outputs
    found = {tensor.name: tensor for tensor in outputs}
    missing = [name for name in request.outputs if name not in found]
    if missing:
        raise BadRequest(
            f"there is no output {missing[0][:64]!r}", next_step="outputs: " + ", ".join(found), field="outputs"
        )
    return tuple(found[name] for name in request.outputs)


def _widen(tensor: Tensor) -> Tensor:
    return to_tensor(tensor.name, to_array(tensor).astype("<f4"))

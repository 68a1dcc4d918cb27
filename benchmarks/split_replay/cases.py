"""Models with what each of their arms costs, measured on real engines, for two emulated device speeds.

The server is this machine with one thread. The devices are two shipped classes whose speed ratios to a server are
eight apart: the Jetson class (2.0) and the Raspberry Pi 4 class (16.0). Their seconds are this machine's, times that
ratio; each begins with the strategy of its class. The costs go through the product's own cost table.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from functools import cache
from math import inf
from pathlib import Path

from attrs import evolve, frozen

from engines.catalogue import shipped_catalogue
from engines.onnx import OnnxModel, OnnxRuntime
from engines.stop import Stop, Stopped
from engines.store import default_store
from profiles.classes import shipped_classes
from profiles.strategy import Strategy
from protocol.device import Measured
from protocol.models import BundleManifest
from protocol.policy import SplitPolicy
from protocol.tensors import Tensor
from split_models import images
from split_models.arm_cost import DEVICE_ARM, ArmCost
from split_models.bundle import BundleLimits, build_bundle
from split_models.costs import CostTable
from split_models.measure import Timed, head_probes, measure_file, time_calls, time_model, zeros
from split_models.plan import ModelPlan
from split_models.recipes import Recipe, recipe
from split_models.replay import LINK

DET, CLS, MINILM = "ppocr-v4-det", "ppocr-v2-cls", "minilm-int8"
CLASSES = {"fast": "jetson", "slow": "raspberry-pi-4"}
FRAME_BYTES = 150_000
"""A camera frame as JPEG, as in the computations on which the three arms rest (a smaller one favours the cloud)."""

LEAST_EVERY_S = 0.5
STOPS = 10
BUSY_SHARE = 0.5
"""One request every LEAST_EVERY_S; a device that would be busy for more than this share of it gets them less often."""


@frozen
class Case:
    """One model on one device. strategy: of its class; its bound of hedges is left out, since budgets are compared.

    stop_s: the longest that a device run goes on after it was stopped: measured, and its parts outside the engine.
    """

    model: str
    speed: str
    costs: tuple[ArmCost, ...]
    strategy: Strategy
    device_class: str
    stop_s: float

    @property
    def every_s(self) -> float:
        """Seconds between requests."""
        return max(LEAST_EVERY_S, self.device_s / BUSY_SHARE)

    @property
    def device_s(self) -> float:
        return next(cost.device_s for cost in self.costs if cost.arm == DEVICE_ARM)


@cache
def camera_frame() -> bytes:
    """A frame of 1280 x 720: lines of text and seeded sensor noise, encoded to about FRAME_BYTES."""
    import numpy as np

    lines = ["the seam moves where it costs least", "head here and tail there 0123456789"] * 6
    page = images.drawn_text(lines, 1280, 720, 28, True).astype(np.int16)
    noise = np.random.default_rng(7).normal(0.0, 14.0, page.shape[:2])[:, :, None]
    frame = np.clip(page + noise, 0, 255).astype(np.uint8)
    found = (images.encode(frame, quality=quality) for quality in range(20, 96, 5))
    return min(found, key=lambda data: abs(len(data) - FRAME_BYTES))


def encoded_input(manifest: BundleManifest) -> bytes | None:
    """What a request of this model carries; None where it carries tensors."""
    if manifest.recipe is None:
        return None
    return camera_frame() if manifest.model == DET else recipe(manifest.recipe).calibration()[0]


def bundle_of(name: str, folder: Path, quick: bool) -> BundleManifest:
    """The model's bundle in `folder`, built when it is not there yet."""
    limits = BundleLimits(max_cuts=1, seconds=15.0, threads=1, batches=False) if quick else BundleLimits(threads=1)
    file, measure = default_store().pull(name), _few if quick else time_model
    return build_bundle(file, shipped_catalogue()[name], folder, limits=limits, measure=measure)


def cases(names: Sequence[str], folder: Path, quick: bool, policy: SplitPolicy) -> Sequence[Case]:
    """Every model on both devices; what each part takes is measured here and now."""
    found = []
    for name in names:
        manifest = bundle_of(name, folder, quick)
        figures = _measured(manifest, folder / name, quick)
        tails = _tails(manifest, folder / name, quick)
        there = {"cloud": _cloud_s(manifest, figures), **tails}
        figures = [*figures, *(evolve(figures[0], what=part, median_s=seconds) for part, seconds in tails.items())]
        stop_s = _stop_s(folder / name / manifest.whole_file, figures)
        found += [_case(manifest, figures, there, speed, policy, stop_s) for speed in CLASSES]
    return found


def _measured(manifest: BundleManifest, folder: Path, quick: bool) -> Sequence[Measured]:
    """Whole, heads, and what stands around them, on one thread of this machine."""
    runtime, measure = OnnxRuntime(), _few if quick else time_model
    found = [measure_file(folder / manifest.whole_file, runtime, 1, manifest.digest, "whole", measure)]
    found += [probe.run() for probe in head_probes(manifest, lambda cut: folder / cut.head_file, runtime, 1, measure)]
    encoded = encoded_input(manifest)
    if manifest.recipe is not None and encoded is not None:
        before, after = _around(manifest, recipe(manifest.recipe), encoded, folder)
        found += [evolve(found[0], what="before", median_s=before), evolve(found[0], what="after", median_s=after)]
    return found


def _stop_s(file: Path, figures: Sequence[Measured]) -> float:
    """Seconds after which a run that is stopped is over, the worst of STOPS moments spread over the run; decoding and
    post-processing are not stopped.
    """
    seconds = {figure.what: figure.median_s for figure in figures}
    model = OnnxRuntime().load(file, 1)
    try:
        inputs = [zeros(spec) for spec in model.inputs]
        lags = [_stopped(model, inputs, (0.5 + place) / STOPS * seconds["whole"]) for place in range(STOPS)]
    finally:
        model.close()
    return max(*lags, seconds.get("before", 0.0), seconds.get("after", 0.0))


def _stopped(model: OnnxModel, inputs: Sequence[Tensor], after_s: float) -> float:
    stop, asked_s = Stop(), [inf]

    def ask() -> None:
        asked_s[0] = time.perf_counter()
        stop.ask()

    timer = threading.Timer(after_s, ask)
    timer.start()
    try:
        model.run_until(inputs, stop)
    except Stopped:
        return time.perf_counter() - asked_s[0]
    finally:
        timer.cancel()
        timer.join()
    return 0.0


def _few(model: object, inputs: object) -> Timed:
    return time_calls(lambda: model.run(inputs), runs=3)  # type: ignore[attr-defined]


def _around(manifest: BundleManifest, made_by: Recipe, encoded: bytes, folder: Path) -> tuple[float, float]:
    """Seconds before and after the model for this very input."""
    plan = ModelPlan(manifest, made_by)
    model = OnnxRuntime().load(folder / manifest.whole_file, 1)
    try:
        made = made_by.before(encoded, plan.input_name, plan.input_shape)
        outputs = model.run(made.inputs)
    finally:
        model.close()
    before = time_calls(lambda: made_by.before(encoded, plan.input_name, plan.input_shape))
    after = time_calls(lambda: made_by.after(outputs, made.context))
    return before.median_s, after.median_s


def _cloud_s(manifest: BundleManifest, figures: Sequence[Measured]) -> float:
    seconds = {figure.what: figure.median_s for figure in figures}
    return sum(seconds.get(what, 0.0) for what in ("before", "whole", "after"))


def _tails(manifest: BundleManifest, folder: Path, quick: bool) -> Mapping[str, float]:
    """Seconds of every tail, by part of the cost table; measured in the same minutes as the heads."""
    runtime, measure = OnnxRuntime(), _few if quick else time_model
    return {
        f"tail:{cut.id}:{cut.codec}": measure_file(
            folder / cut.tail_file, runtime, 1, manifest.digest, "tail", measure
        ).median_s
        for cut in manifest.cuts
    }


def _case(
    manifest: BundleManifest,
    figures: Sequence[Measured],
    there: Mapping[str, float],
    speed: str,
    policy: SplitPolicy,
    stop_s: float,
) -> Case:
    of_class = next(one for one in shipped_classes().classes if one.name == CLASSES[speed])
    ratio = of_class.strategy.speed_ratio
    table = CostTable(manifest, speed_ratio=ratio)
    table.learn([evolve(figure, median_s=figure.median_s * ratio) for figure in figures])
    for part, seconds in there.items():
        for _ in range(3):
            table.observe("server", part, seconds)
    encoded = encoded_input(manifest)
    arms = table.arms(
        len(encoded) if encoded is not None else None,
        (LINK,),
        lambda cut, codec: True,
        zstd=lambda link: True,
        ends_here=lambda cut, codec: True,
    )
    offered = _undominated([cost for cost in arms if _offered(cost, policy)])
    strategy = evolve(of_class.strategy, hedge_ratio=1.0)
    return Case(manifest.model, speed, offered, strategy, of_class.title, ratio * stop_s)


def _offered(cost: ArmCost, policy: SplitPolicy) -> bool:
    allowed = cost.arm.kind != "cut" or cost.arm.form in policy.codecs
    return allowed and cost.error_ratio <= policy.max_error_ratio


def _undominated(costs: Sequence[ArmCost]) -> tuple[ArmCost, ...]:
    """Without the arms that another one beats in every respect: no trace makes them the best."""

    def figures(cost: ArmCost) -> tuple[float, float, float, float]:
        return cost.device_s, cost.up_bytes, cost.down_bytes, cost.server_s

    def beaten(cost: ArmCost) -> bool:
        mine = figures(cost)
        return any(
            figures(other) != mine and all(a <= b for a, b in zip(figures(other), mine, strict=True))
            for other in costs
            if other.arm.link is not None
        )

    return tuple(cost for cost in costs if cost.arm.link is None or not beaten(cost))

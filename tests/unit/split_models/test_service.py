"""What the front tells of an answer that a runner gave."""

from __future__ import annotations

import pytest

from protocol.oip import InferRequest, bytes_tensor
from split_models.service import Service, Shown
from tests.unit.split_models.parts import TAIL, Scripted
from tests.unit.split_models.runner_house import ANSWER, PRIVATE, House, Y


@pytest.mark.parametrize("kind", ["cloud", "cut"])
async def test_the_seconds_told_are_of_all_work_on_the_answer(kind: str) -> None:
    house = House(remote=Scripted({"m": ANSWER, TAIL: Y}, compute_s=0.03))
    if kind == "cut":
        house.policy = PRIVATE
    plan = house.runner.plan
    shown = {"m": Shown("m", "onnx", plan.recipe, plan.input_name, plan.input_shape)}
    service = Service(house.local, house.compute, house.clock, lambda: shown, {"m": house.runner})
    for _ in range(12):
        served = await service.infer(InferRequest("m", (bytes_tensor("image", [b"good"]),)), 10.0)
        house.clock.advance(house.policy.period_s)
        if served.arm.startswith(kind):
            break
    assert served.arm.startswith(kind)
    done = house.done()[-1]
    assert done.server_s == pytest.approx(0.03)
    assert served.compute_s == pytest.approx(done.pre_s + done.head_s + done.server_s + done.post_s)
    assert (served.pre_s, served.post_s) == (done.pre_s, done.post_s)

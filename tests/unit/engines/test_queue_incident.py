"""The incident of the benchmark, small and with a fake model: nothing is lost, and the reader works too."""

from __future__ import annotations

import struct

from benchmarks.queue_incident import incident
from engines.fakes_tensor import FakeTensorModel
from protocol.tensors import Tensor

X = Tensor("x", "FP32", (1, 4), struct.pack("<4f", 1, 2, 3, 4))


async def test_the_bound_keeps_the_queue_short_and_loses_nothing() -> None:
    model = FakeTensorModel(delay_s=0.004)
    bounded = await incident(model, X, bounded=True, answers=120, warm_up_s=0.3)
    unbounded = await incident(model, X, bounded=False, answers=120, warm_up_s=0.3)
    assert bounded.lost == unbounded.lost == 0
    assert bounded.ran_by_reader > 0
    assert unbounded.ran_by_reader == 0
    assert bounded.peak_queue < unbounded.peak_queue
    assert unbounded.refused == 0

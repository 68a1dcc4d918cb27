"""Dynamic batches: who waits runs together, who is alone runs at once, and nobody suffers from a neighbour."""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
from attrs import define
from hypothesis import given
from hypothesis import strategies as st

from engines.batching import BatchingEndpoint, BatchSettings, batch_run, joined, parted
from engines.executor import BoundedExecutor
from engines.fakes_tensor import MAGIC, FakeTensorModel, FakeTensorRuntime
from engines.local import LocalEndpoint
from engines.pool import ModelPool
from protocol.errors import EngineError, Full, MidstreamError
from protocol.tensors import Tensor

DELAY_S = 0.25


def row(*values: float) -> Tensor:
    return Tensor("x", "FP32", (len(values) // 4, 4), struct.pack(f"<{len(values)}f", *values))


def numbers(tensor: Tensor) -> tuple[float, ...]:
    return struct.unpack(f"<{tensor.size_bytes // 4}f", bytes(tensor.data))


@define
class House:
    endpoint: BatchingEndpoint
    executor: BoundedExecutor
    settings: list[BatchSettings]
    model: FakeTensorModel


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    executor = BoundedExecutor("batches", 1, 60.0, max_waiting=4)
    pool, runtime = ModelPool(1 << 30), FakeTensorRuntime(delay_s=DELAY_S)
    local = LocalEndpoint(None, pool, executor, {"fake": FakeTensorRuntime(delay_s=DELAY_S), "free": runtime})
    for name, kind in (("one", "fake"), ("one~batch", "free"), ("plain", "fake")):
        file = tmp_path / f"{name}.bin"
        file.write_bytes(MAGIC)
        local.register(name, file, runtime=kind)
    settings = [BatchSettings(max_rows=4)]
    endpoint = BatchingEndpoint(local, lambda: {"one": "one~batch"}, lambda: settings[0], time.monotonic)
    await local.preload("one~batch")
    await endpoint.infer("one", [row(0, 0, 0, 0)], 5.0)  # from here on the executor knows how many may wait
    yield House(endpoint, executor, settings, runtime.loaded[0])
    await local.close()
    executor.close()
    pool.close()


async def ask(house: House, count: int, model: str = "one") -> list[asyncio.Task[object]]:
    """That many at once, the n-th asking for n."""
    return [asyncio.create_task(house.endpoint.infer(model, [row(n, n, n, n)], 5.0), name=str(n)) for n in range(count)]


async def busy(house: House) -> asyncio.Task[object]:
    """A request that runs by itself."""
    task = asyncio.create_task(house.endpoint.infer("one", [row(9, 9, 9, 9)], 5.0))
    while house.executor.running == 0:
        await asyncio.sleep(0.002)
    return task


async def test_a_lone_request_runs_at_once_whatever_may_be_held(house: House) -> None:
    house.settings[0] = BatchSettings(max_rows=4, max_wait_s=30.0)
    began_s = time.monotonic()
    answer = await house.endpoint.infer("one", [row(1, 2, 3, 4)], 5.0)
    assert time.monotonic() - began_s < 3 * DELAY_S
    assert numbers(answer.outputs[0]) == (2, 4, 6, 8)
    assert answer.wait_s < DELAY_S


async def test_those_that_wait_run_together_and_get_their_own_rows(house: House) -> None:
    runs = house.model.runs
    first = await busy(house)
    asked = await ask(house, 4)
    answers = await asyncio.gather(*asked)
    assert [numbers(a.outputs[0]) for a in answers] == [(2.0 * n,) * 4 for n in range(4)]  # type: ignore[attr-defined]
    await first
    assert house.model.runs - runs == 2
    assert house.endpoint.runs[4] == 1
    assert all(a.wait_s > 0 for a in answers)  # type: ignore[attr-defined]


async def test_a_batch_has_its_bound(house: House) -> None:
    await asyncio.gather(*await ask(house, 11))
    assert max(house.endpoint.runs) == 4


async def test_requests_of_several_rows_share_a_batch(house: House) -> None:
    first = await busy(house)
    two = asyncio.create_task(house.endpoint.infer("one", [row(*range(8))], 5.0))
    one = asyncio.create_task(house.endpoint.infer("one", [row(5, 5, 5, 5)], 5.0))
    assert numbers((await two).outputs[0]) == tuple(2.0 * n for n in range(8))
    assert numbers((await one).outputs[0]) == (10, 10, 10, 10)
    assert house.endpoint.runs[2] == 1
    await first


async def test_a_held_batch_leaves_when_the_one_before_ends(house: House) -> None:
    house.settings[0] = BatchSettings(max_rows=4, max_wait_s=30.0)
    began_s = time.monotonic()
    await asyncio.gather(await busy(house), *await ask(house, 2))
    assert time.monotonic() - began_s < 6 * DELAY_S
    assert house.endpoint.runs[2] == 1


async def test_a_held_batch_waits_no_longer_than_it_may(house: House) -> None:
    house.settings[0] = BatchSettings(max_rows=4, max_wait_s=DELAY_S / 4)
    first, asked = await busy(house), await ask(house, 2)
    await asyncio.sleep(DELAY_S / 2)
    assert house.executor.waiting == 1  # posted while the first one still runs
    await asyncio.gather(first, *asked)


async def test_a_cancelled_member_leaves_and_an_empty_batch_never_runs(house: House) -> None:
    runs = house.model.runs
    first, others = await busy(house), await ask(house, 2)
    await asyncio.sleep(DELAY_S / 4)
    assert house.executor.waiting == 1
    others[0].cancel()
    await asyncio.sleep(0.01)
    assert house.executor.waiting == 1
    others[1].cancel()
    await asyncio.gather(first, *others, return_exceptions=True)
    assert house.executor.waiting == 0
    await asyncio.sleep(DELAY_S)
    assert house.model.runs - runs == 1
    assert await house.endpoint.infer("one", [row(1, 1, 1, 1)], 5.0)


async def test_a_newcomer_does_not_join_a_batch_that_everybody_left(house: House) -> None:
    first = await busy(house)
    (leaver,) = await ask(house, 1)
    await asyncio.sleep(DELAY_S / 8)
    leaver.cancel()
    await asyncio.sleep(0)  # the member has left, the batch's task is being cancelled
    answer = await house.endpoint.infer("one", [row(3, 3, 3, 3)], 5.0)
    assert numbers(answer.outputs[0]) == (6, 6, 6, 6)
    await first
    await asyncio.sleep(0.01)
    assert not house.endpoint._in_flight
    assert not house.endpoint._open


async def test_a_batch_that_is_cancelled_before_it_began_leaves_nothing(house: House) -> None:
    (asked,) = await ask(house, 1)
    await asyncio.sleep(0)
    task = house.endpoint._open["one"].task
    assert task is not None
    task.cancel()  # it has not taken its first step
    with pytest.raises(EngineError, match="cut short"):
        await asked
    assert not house.endpoint._in_flight
    assert not house.endpoint._open


async def test_a_deadline_of_one_is_not_that_of_its_neighbours(house: House) -> None:
    first = await busy(house)
    patient = asyncio.create_task(house.endpoint.infer("one", [row(1, 1, 1, 1)], 5.0))
    with pytest.raises((EngineError, Full)):
        await house.endpoint.infer("one", [row(2, 2, 2, 2)], DELAY_S / 4)
    assert numbers((await patient).outputs[0]) == (2, 2, 2, 2)
    await first


async def test_admission_is_that_of_the_executor(house: House) -> None:
    """Batches wait in the executor's queue and are refused with it; four rows take one place."""
    house.settings[0] = BatchSettings(max_rows=2)
    answers = await asyncio.gather(*await ask(house, 40), return_exceptions=True)
    refused = [a for a in answers if isinstance(a, Full)]
    assert refused
    assert len(answers) - len(refused) <= 2 * 6
    assert all(a.retry_after_s >= 0 for a in refused)


async def test_models_without_a_free_first_dimension_run_one_by_one(house: House) -> None:
    before = dict(house.endpoint.runs)
    assert len(await asyncio.gather(*await ask(house, 3, "plain"))) == 3
    assert house.endpoint.runs == before


def test_a_batch_that_fails_runs_one_by_one() -> None:
    class Picky:
        runs = 0

        def run(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
            self.runs += 1
            if 13.0 in numbers(inputs[0]):
                raise EngineError("13 brings bad luck")
            return inputs

    model = Picky()
    good, bad = (row(1, 1, 1, 1),), (row(13, 13, 13, 13),)
    outcomes = batch_run(model.run, [good, bad, good])
    assert [isinstance(outcome, MidstreamError) for outcome in outcomes] == [False, True, False]
    assert model.runs == 4


@given(st.lists(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=3), min_size=1, max_size=6))
def test_joining_and_parting_are_inverse(values: list[list[float]]) -> None:
    tensors = [Tensor("x", "FP32", (len(v), 1), struct.pack(f"<{len(v)}f", *v)) for v in values]
    whole = joined(tensors)
    assert whole.shape == (sum(map(len, values)), 1)
    assert [numbers(t) for t in parted(whole, [len(v) for v in values])] == [tuple(v) for v in values]


def test_outputs_of_another_count_are_an_error() -> None:
    with pytest.raises(EngineError, match="for 3 rows"):
        parted(Tensor("y", "FP32", (2, 1), bytes(8)), [1, 2])

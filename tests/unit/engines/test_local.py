"""The local endpoint: resolving names, loading once, pinning, deadlines, cancelling."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from attrs import frozen

from engines.catalogue import load_catalogue
from engines.executor import BoundedExecutor
from engines.fakes_tensor import MAGIC, FakeTensorRuntime
from engines.local import LocalEndpoint
from engines.onnx import OnnxRuntime
from engines.pool import ModelPool, estimate_bytes
from engines.store import ModelStore
from protocol.errors import BadRequest, EngineError, Full, Loading, NotFound
from protocol.tensors import Tensor

X = Tensor("x", "FP32", (1, 4), struct.pack("<4f", 1, 2, 3, 4))


@frozen
class House:
    endpoint: LocalEndpoint
    runtime: FakeTensorRuntime
    pool: ModelPool
    executor: BoundedExecutor
    folder: Path

    def register(self, name: str) -> Path:
        file = self.folder / f"{name}.fake"
        file.write_bytes(MAGIC + name.encode())
        self.endpoint.register(name, file)
        return file


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    executor = BoundedExecutor("local", 1, 0.05, max_waiting=2)
    runtime = FakeTensorRuntime(delay_s=0.05, load_delay_s=0.05)
    size_bytes = estimate_bytes(Path(__file__))
    pool = ModelPool(2 * size_bytes)
    endpoint = LocalEndpoint(None, pool, executor, {"fake": runtime})
    yield House(endpoint, runtime, pool, executor, tmp_path)
    await endpoint.close()
    executor.close()
    pool.close()


async def test_many_first_requests_load_once(house: House) -> None:
    house.register("m")
    answers = await asyncio.gather(*(house.endpoint.infer("m", [X], 5.0) for _ in range(2)))
    assert len(house.runtime.loaded) == 1
    assert all(a.compute_s >= 0.05 for a in answers)
    # Loading and the queue are the wait.
    assert max(a.wait_s for a in answers) > 0.05
    assert (await house.endpoint.infer("m", [X], 5.0)).wait_s < 0.05


async def test_models_make_room_for_each_other_and_pinned_ones_stay(house: House) -> None:
    for name in ("a", "b", "c"):
        house.register(name)
    await house.endpoint.preload("a", keep=True)
    await house.endpoint.preload("b")
    await house.endpoint.preload("c")
    assert [house.endpoint.loaded(n) for n in "abc"] == [True, False, True]
    assert house.runtime.loaded[1].closed
    house.endpoint.unregister("a")
    assert house.runtime.loaded[0].closed
    with pytest.raises(NotFound):
        await house.endpoint.infer("a", [X], 1.0)


async def test_first_requests_for_many_models_wait_for_their_loads(tmp_path: Path) -> None:
    """Before any load was measured there is room for one load per model, not for one."""
    executor = BoundedExecutor("local", 1, 60.0, max_waiting=10)
    runtime, pool = FakeTensorRuntime(load_delay_s=0.03), ModelPool(1 << 30)
    endpoint = LocalEndpoint(None, pool, executor, {"fake": runtime})
    found = House(endpoint, runtime, pool, executor, tmp_path)
    try:
        names = [f"m{number}" for number in range(5)]
        for name in names:
            found.register(name)
        answers = await asyncio.gather(*(endpoint.infer(name, [X], 60.0) for name in (*names, *names)))
        assert len(answers) == 10
        assert len(runtime.loaded) == 5
    finally:
        await endpoint.close()
        executor.close()
        pool.close()


async def test_a_replaced_file_answers_with_its_own_digest(house: House) -> None:
    file = house.register("m")
    before = (await house.endpoint.infer("m", [X], 5.0)).digest
    file.write_bytes(MAGIC + b"other weights")
    house.endpoint.register("m", file)
    after = (await house.endpoint.infer("m", [X], 5.0)).digest
    assert before != after
    assert house.runtime.loaded[0].closed


async def test_a_file_replaced_while_it_loads_is_forgotten(house: House) -> None:
    house.register("m")
    waiting = asyncio.create_task(house.endpoint.infer("m", [X], 5.0))
    await asyncio.sleep(0.02)
    other = house.folder / "other.fake"
    other.write_bytes(MAGIC + b"other")
    house.endpoint.register("m", other, "the other digest")
    assert (await waiting).digest == "the other digest"
    assert [model.closed for model in house.runtime.loaded] == [True, False]


async def test_a_name_forgotten_while_it_loads_is_not_kept(house: House) -> None:
    house.register("m")
    keeping = asyncio.create_task(house.endpoint.preload("m", keep=True))
    await asyncio.sleep(0.02)
    house.endpoint.unregister("m")
    with pytest.raises(NotFound):
        await keeping
    assert [model.closed for model in house.runtime.loaded] == [True]
    assert house.pool.used_bytes == 0


async def test_a_queue_longer_than_the_deadline_is_refused_at_once(house: House) -> None:
    house.register("m")
    await house.endpoint.infer("m", [X], 5.0)
    running = [asyncio.create_task(house.endpoint.infer("m", [X], 5.0)) for _ in range(2)]
    await asyncio.sleep(0.01)
    with pytest.raises(Full):
        await house.endpoint.infer("m", [X], 0.01)
    await asyncio.gather(*running)


async def test_the_deadline_covers_loading(house: House) -> None:
    house.register("m")
    with pytest.raises(EngineError, match="did not answer within"):
        await house.endpoint.infer("m", [X], 0.02)
    await asyncio.sleep(0.1)
    assert house.endpoint.loaded("m")
    assert await house.endpoint.infer("m", [X], 5.0)


async def test_a_departed_clients_request_never_runs_and_frees_its_model(house: House) -> None:
    house.register("m")
    await house.endpoint.preload("m")
    first = asyncio.create_task(house.endpoint.infer("m", [X], 5.0))
    second = asyncio.create_task(house.endpoint.infer("m", [X], 5.0))
    await asyncio.sleep(0.02)
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    await first
    await asyncio.sleep(0.02)
    assert house.runtime.loaded[0].runs == 1
    assert [r.leases for r in house.pool.residents()] == [0]


async def test_cancelling_a_run_under_way_keeps_the_model_until_it_ends(house: House) -> None:
    house.register("m")
    await house.endpoint.preload("m")
    task = asyncio.create_task(house.endpoint.infer("m", [X], 5.0))
    await asyncio.sleep(0.02)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert [r.leases for r in house.pool.residents()] == [1]
    await asyncio.sleep(0.1)
    assert [r.leases for r in house.pool.residents()] == [0]


async def test_a_run_whose_caller_leaves_is_stopped_and_tells_how_long_it_went_on(tmp_path: Path) -> None:
    executor, pool = BoundedExecutor("local", 1, 1.0), ModelPool(1 << 30)
    endpoint = LocalEndpoint(None, pool, executor, {"fake": FakeTensorRuntime(delay_s=20.0, stoppable=True)})
    (tmp_path / "m.fake").write_bytes(MAGIC)
    endpoint.register("m", tmp_path / "m.fake")
    await endpoint.preload("m")
    assert endpoint.stops("m") and not endpoint.stops("nobody")
    over: asyncio.Queue[float] = asyncio.Queue()
    runs = [asyncio.create_task(endpoint.infer("m", [X], 60.0, left=over.put_nowait)) for _ in range(2)]
    while executor.running == 0:
        await asyncio.sleep(0.005)
    for task in reversed(runs):
        task.cancel()
    await asyncio.gather(*runs, return_exceptions=True)
    assert await asyncio.wait_for(over.get(), 5.0) == 0.0, "the one that waited never ran"
    assert 0.0 < await asyncio.wait_for(over.get(), 5.0) < 10.0
    while executor.running:
        await asyncio.sleep(0.005)
    assert executor.service_s is None, "a part of a run is no measure of one"
    assert [r.leases for r in pool.residents()] == [0]
    await endpoint.close()
    executor.close()
    pool.close()


async def test_a_run_that_is_out_of_time_is_stopped(tmp_path: Path) -> None:
    executor, pool = BoundedExecutor("local", 1, 1.0), ModelPool(1 << 30)
    endpoint = LocalEndpoint(None, pool, executor, {"fake": FakeTensorRuntime(delay_s=20.0, stoppable=True)})
    (tmp_path / "m.fake").write_bytes(MAGIC)
    endpoint.register("m", tmp_path / "m.fake")
    await endpoint.preload("m")
    with pytest.raises(EngineError, match="did not answer"):
        await endpoint.infer("m", [X], 0.05)
    while executor.running:
        await asyncio.sleep(0.005)
    await endpoint.close()
    executor.close()
    pool.close()


async def test_whoever_may_not_wait_for_a_load_is_refused_at_once(house: House) -> None:
    house.register("m")
    with pytest.raises(Loading):
        await house.endpoint.infer("m", [X], 5.0, load=False)
    assert not house.runtime.loaded
    await house.endpoint.preload("m")
    assert await house.endpoint.infer("m", [X], 5.0, load=False)


async def test_a_model_that_is_warmed_counts_as_loaded_after_its_warm_run(tmp_path: Path) -> None:
    executor, pool = BoundedExecutor("local", 1, 1.0), ModelPool(1 << 30)
    runtime = FakeTensorRuntime(delay_s=0.15, rows=1)
    endpoint = LocalEndpoint(None, pool, executor, {"fake": runtime})
    file = tmp_path / "m.fake"
    file.write_bytes(MAGIC)
    endpoint.register("m", file)
    warming = asyncio.create_task(endpoint.preload("m", warm=True))
    while not runtime.loaded or not runtime.loaded[0].runs:
        await asyncio.sleep(0.005)
    assert not endpoint.loaded("m"), "a request could have met the first, slow run"
    seconds = await warming
    assert seconds is not None
    assert seconds >= 0.15
    assert runtime.loaded[0].runs == 2, "of a slow model two runs are enough: the first is cold"
    assert (executor.metrics().service_s, endpoint.loaded("m")) == (None, True)
    await endpoint.close()
    executor.close()
    pool.close()


@pytest.mark.parametrize("failure", [EngineError("broken"), MemoryError()])
async def test_a_model_that_cannot_run_is_not_kept_in_memory(tmp_path: Path, failure: Exception) -> None:
    executor, pool = BoundedExecutor("local", 1, 1.0), ModelPool(1 << 30)
    runtime = FakeTensorRuntime(failures=[failure], rows=1)
    endpoint = LocalEndpoint(None, pool, executor, {"fake": runtime})
    file = tmp_path / "m.fake"
    file.write_bytes(MAGIC)
    endpoint.register("m", file)
    with pytest.raises(EngineError):
        await endpoint.preload("m", warm=True)
    assert (pool.used_bytes, runtime.loaded[0].closed) == (0, True)
    with pytest.raises(EngineError):
        await endpoint.infer("m", [X], 5.0)
    await endpoint.close()
    executor.close()
    pool.close()


async def test_a_file_that_is_not_a_model_fails_each_request_and_nothing_else(house: House) -> None:
    house.register("good")
    bad = house.folder / "bad.fake"
    bad.write_bytes(b"nonsense")
    house.endpoint.register("bad", bad)
    for _ in range(2):
        with pytest.raises(EngineError, match="not a fake model"):
            await house.endpoint.infer("bad", [X], 5.0)
    assert await house.endpoint.infer("good", [X], 5.0)
    assert house.pool.used_bytes == house.pool.residents()[0].size_bytes


async def test_a_model_without_an_engine_names_what_to_install(house: House) -> None:
    file = house.folder / "m.tflite"
    file.write_bytes(MAGIC)
    house.endpoint.register("m", file)
    with pytest.raises(EngineError, match=r"\[tflite\]"):
        await house.endpoint.infer("m", [X], 5.0)
    with pytest.raises(EngineError, match="not there"):
        house.endpoint.register("absent", house.folder / "absent.fake")


async def test_catalogue_models_answer_through_the_store(model_file: Callable[[str], Path]) -> None:
    file = model_file("ppocr-v2-cls")
    store = ModelStore(file.parent.parent, load_catalogue())
    executor, pool = BoundedExecutor("real", 1, 0.1), ModelPool(1 << 30)
    endpoint = LocalEndpoint(store, pool, executor, {"onnx": OnnxRuntime()})
    try:
        inputs, outputs, digest = await endpoint.describe("ppocr-v2-cls")
        assert (inputs[0].name, inputs[0].shape) == ("x", (None, 3, None, None))
        x = Tensor("x", "FP32", (1, 3, 48, 192), bytes(4 * 3 * 48 * 192))
        answer = await endpoint.infer("ppocr-v2-cls", [x], 10.0)
        assert answer.digest == digest == store.entry("ppocr-v2-cls").sha256
        assert [t.name for t in answer.outputs] == [s.name for s in outputs]
        with pytest.raises(BadRequest, match="gguf"):
            await endpoint.infer("smollm2-135m", [x], 1.0)
        with pytest.raises(NotFound):
            await endpoint.infer("../../etc/passwd", [x], 1.0)
    finally:
        await endpoint.close()
        executor.close()
        pool.close()

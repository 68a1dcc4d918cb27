"""Residency: budget, order of eviction, leases, and one load for many."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.pool import MEMORY_FLOOR_BYTES, ModelPool, estimate_bytes
from protocol.errors import EngineError, Full


class Thing:
    def __init__(self, name: str = "") -> None:
        self.name = name
        self.closed = 0

    def close(self) -> None:
        self.closed += 1


def test_the_least_recently_used_goes_first() -> None:
    pool = ModelPool(30)
    things = {name: Thing(name) for name in "abcd"}
    for name in "abc":
        pool.acquire(name, 10, lambda n=name: things[n]).release()  # type: ignore[misc]
    pool.acquire("a", 10, Thing).release()
    pool.acquire("d", 15, lambda: things["d"]).release()
    assert [things[n].closed for n in "abcd"] == [0, 1, 1, 0]
    assert [r.key for r in pool.residents()] == ["a", "d"]
    assert pool.used_bytes == 25
    pool.close()
    assert [things[n].closed for n in "abcd"] == [1, 1, 1, 1]


def test_leased_models_are_never_evicted() -> None:
    pool = ModelPool(20)
    kept = Thing()
    lease = pool.acquire("kept", 15, lambda: kept)
    with pytest.raises(Full, match="models in use"):
        pool.acquire("other", 10, Thing)
    assert kept.closed == 0
    assert pool.loaded("kept")
    lease.release()
    lease.release()
    pool.acquire("other", 10, Thing).release()
    assert kept.closed == 1
    assert not pool.loaded("kept")


def test_a_model_over_the_budget_says_so() -> None:
    with pytest.raises(EngineError, match="budget"):
        ModelPool(10).acquire("big", 11, Thing)


def test_many_threads_load_once_and_a_failed_load_is_everybodys() -> None:
    pool = ModelPool(100)
    loads: list[int] = []
    outcomes: list[object] = []

    def load() -> Thing:
        loads.append(1)
        time.sleep(0.05)
        if len(loads) == 1:
            raise EngineError("bad file")
        return Thing()

    def ask() -> None:
        try:
            outcomes.append(pool.acquire("m", 10, load).value)
        except EngineError as err:
            outcomes.append(err)

    for _ in range(2):
        threads = [threading.Thread(target=ask) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
    assert len(loads) == 2
    assert sum(isinstance(o, EngineError) for o in outcomes) == 6
    assert len({id(o) for o in outcomes if isinstance(o, Thing)}) == 1
    assert pool.used_bytes == 10


def test_a_dropped_model_closes_when_its_last_lease_ends_and_loads_anew() -> None:
    pool = ModelPool(100)
    old, new = Thing(), Thing()
    first, second = pool.acquire("m", 10, lambda: old), pool.acquire("m", 10, lambda: old)
    pool.drop("m")
    assert not pool.loaded("m")
    with pool.acquire("m", 10, lambda: new) as value:
        assert value is new
    first.release()
    assert old.closed == 0
    second.release()
    assert old.closed == 1


def test_a_model_dropped_while_it_loads_serves_its_loader_only() -> None:
    pool = ModelPool(100)
    old, new = Thing(), Thing()
    begun, go = threading.Event(), threading.Event()
    seen: list[Thing] = []

    def load() -> Thing:
        begun.set()
        assert go.wait(5)
        return old

    def ask() -> None:
        with pool.acquire("m", 10, load) as value:
            seen.append(value)

    def ask_later() -> None:
        with pool.acquire("m", 10, lambda: new) as value:
            seen.append(value)

    first, second = threading.Thread(target=ask), threading.Thread(target=ask_later)
    first.start()
    assert begun.wait(5)
    second.start()
    pool.drop("m")
    go.set()
    first.join(5)
    second.join(5)
    assert set(map(id, seen)) == {id(old), id(new)}
    assert (old.closed, new.closed) == (1, 0)
    assert pool.used_bytes == 10
    pool.close()
    assert new.closed == 1


def test_a_pool_that_is_closed_while_a_model_loads_keeps_nothing() -> None:
    pool, thing = ModelPool(100), Thing()

    def load() -> Thing:
        pool.close()
        return thing

    pool.acquire("m", 10, load).release()
    assert thing.closed == 1
    assert pool.used_bytes == 0


@settings(max_examples=60)
@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(1, 60), st.booleans()), max_size=40))
def test_the_budget_holds_and_leased_models_stay_open(steps: list[tuple[str, int, bool]]) -> None:
    pool = ModelPool(100)
    held = []
    for key, size_bytes, keep in steps:
        try:
            lease = pool.acquire(key, size_bytes, Thing)
        except Full:
            continue
        if keep:
            held.append(lease)
        else:
            lease.release()
        assert pool.used_bytes <= 100
        assert all(one.value.closed == 0 for one in held)
        if len(held) > 2:
            held.pop(0).release()
    for lease in held:
        lease.release()


@pytest.mark.parametrize(("suffix", "ratio"), [(".onnx", 6), (".tflite", 6), (".gguf", 1.2)])
def test_the_estimate_grows_with_the_file(tmp_path: Path, suffix: str, ratio: float) -> None:
    file = tmp_path / f"m{suffix}"
    file.write_bytes(bytes(1 << 20))
    assert estimate_bytes(file) == int(ratio * (1 << 20)) + MEMORY_FLOOR_BYTES


def test_a_spare_takes_free_room_only() -> None:
    things = [Thing() for _ in range(3)]
    pool = ModelPool(20)
    pool.acquire("a", 12, lambda: things[0]).release()
    with pytest.raises(Full, match="other models"):
        pool.acquire("spare", 12, lambda: things[1], spare=True)
    assert pool.loaded("a")
    pool.acquire("spare", 8, lambda: things[1], spare=True).release()
    pool.acquire("a", 12, Thing).release()
    pool.acquire("b", 8, lambda: things[2]).release()
    assert (pool.loaded("a"), pool.loaded("b"), pool.loaded("spare")) == (True, True, False)
    pool.close()

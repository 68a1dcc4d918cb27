"""The benchmark's schedule: bounded, resumable, redone only where something changed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from attrs import evolve, frozen
from hypothesis import given
from hypothesis import strategies as st

from profiles.benchmark import (
    Basis,
    BenchmarkDocument,
    Progress,
    best_threads,
    decode_benchmark,
    encode_benchmark,
    fastest_engine,
    run_benchmark,
)
from profiles.timing import MemoryProbe, memory_probe, summary
from protocol.clock import FakeClock
from protocol.device import Measured
from protocol.errors import EngineError, MidstreamError

BASIS = Basis(frozenset({"d1", "d2"}), {"onnx": "1.0", "llama": "2.0"}, "cpu-a")


class Bench(FakeClock):
    """A clock that also keeps which probes ran."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: list[str] = []

    def take(self) -> list[str]:
        """The probes that ran since the last call."""
        found, self.ran = self.ran, []
        return found


@frozen
class FakeProbe:
    """Takes `takes_s` on the fake clock."""

    clock: Bench
    name: str
    digest: str = "d1"
    engine: str = "onnx"
    expected_s: float = 1.0
    takes_s: float = 1.0
    error: MidstreamError | None = None

    @property
    def run(self) -> Callable[[], Measured]:
        def measure() -> Measured:
            self.clock.advance(self.takes_s)
            self.clock.ran.append(self.name)
            if self.error is not None:
                raise self.error
            return Measured(self.digest, self.engine, 2, "whole", self.takes_s, 0.0)

        return measure


@pytest.fixture
def clock() -> Bench:
    return Bench()


def test_all_probes_run_once_and_progress_is_shown(clock: Bench) -> None:
    steps: list[Progress] = []
    probes = [FakeProbe(clock, "b"), FakeProbe(clock, "a", digest="d2", engine="llama")]
    document = run_benchmark(probes, None, BASIS, 60, clock, progress=steps.append)
    assert clock.take() == ["b", "a"]
    assert [(s.done, s.total, s.name, s.spent_s) for s in steps] == [(0, 2, "b", 0), (1, 2, "a", 1), (2, 2, "", 2)]
    assert document.complete
    assert document.key == BASIS.key
    assert [r.name for r in document.results] == ["a", "b"]


def test_a_second_run_measures_nothing(clock: Bench) -> None:
    probes = [FakeProbe(clock, "a"), FakeProbe(clock, "b")]
    first = run_benchmark(probes, None, BASIS, 60, clock)
    clock.take()
    assert run_benchmark(probes, first, BASIS, 60, clock) == first
    assert clock.take() == []


@pytest.mark.parametrize(
    ("basis", "again"),
    [
        (evolve(BASIS, engines={"onnx": "1.1", "llama": "2.0"}), ["onnx-d1", "onnx-d2"]),
        (evolve(BASIS, engines={"onnx": "1.0", "llama": "2.1"}), ["llama-d1"]),
        (evolve(BASIS, digests=frozenset({"d1", "d2", "d3"})), []),
        (evolve(BASIS, digests=frozenset({"d1"})), ["onnx-d2"]),
        (evolve(BASIS, cpu="cpu-b"), ["onnx-d1", "onnx-d2", "llama-d1"]),
    ],
)
def test_only_what_changed_is_measured_again(clock: Bench, basis: Basis, again: list[str]) -> None:
    probes = [
        FakeProbe(clock, "onnx-d1"),
        FakeProbe(clock, "onnx-d2", digest="d2"),
        FakeProbe(clock, "llama-d1", engine="llama"),
    ]
    first = run_benchmark(probes, None, BASIS, 60, clock)
    clock.take()
    second = run_benchmark(probes, first, basis, 60, clock)
    assert clock.take() == again
    assert second.key == basis.key
    assert second.key != first.key


def test_the_budget_bounds_the_run_and_the_rest_follows_next_time(clock: Bench) -> None:
    probes = [FakeProbe(clock, str(n), expected_s=4, takes_s=4) for n in range(5)] + [FakeProbe(clock, "short")]
    first = run_benchmark(probes, None, BASIS, 9, clock)
    assert clock.take() == ["0", "1", "short"]
    assert clock() <= 9
    assert first.skipped == ("2", "3", "4")
    assert not first.complete
    second = run_benchmark(probes, first, BASIS, 60, clock)
    assert clock.take() == ["2", "3", "4"]
    assert second.complete


def test_a_probe_that_overruns_ends_the_schedule(clock: Bench) -> None:
    probes = [FakeProbe(clock, "slow", takes_s=100), FakeProbe(clock, "next")]
    document = run_benchmark(probes, None, BASIS, 10, clock)
    assert clock.take() == ["slow"]
    assert document.skipped == ("next",)


def test_a_failing_probe_is_named_and_the_others_run(clock: Bench) -> None:
    probes = [FakeProbe(clock, "bad", error=EngineError("not a model")), FakeProbe(clock, "good")]
    document = run_benchmark(probes, None, BASIS, 60, clock)
    assert document.failed == {"bad": "not a model"}
    assert [r.name for r in document.results] == ["good"]


def test_a_bug_in_a_probe_is_not_hidden(clock: Bench) -> None:
    class Broken:
        name = "broken"
        expected_s = 0.0

        def run(self) -> Measured:
            raise RuntimeError("bug")

    with pytest.raises(RuntimeError):
        run_benchmark([Broken()], None, BASIS, 60, clock)


def test_cancelling_keeps_what_is_measured(clock: Bench) -> None:
    probes = [FakeProbe(clock, str(n)) for n in range(4)]
    document = run_benchmark(probes, None, BASIS, 60, clock, cancelled=lambda: clock() >= 2)
    assert clock.take() == ["0", "1"]
    assert document.skipped == ("2", "3")


def test_the_document_comes_back(clock: Bench) -> None:
    document = run_benchmark([FakeProbe(clock, "a")], None, BASIS, 60, clock)
    assert decode_benchmark(encode_benchmark(document)) == document


@pytest.mark.parametrize("data", [b"", b"{}", b'{"schema":"midstream.benchmark/2.0","key":"","cpu":""}', b'{"key":1}'])
def test_a_torn_or_foreign_document_is_refused(data: bytes) -> None:
    with pytest.raises(MidstreamError):
        decode_benchmark(data)


def test_the_key_depends_on_all_three_parts() -> None:
    keys = {
        BASIS.key,
        evolve(BASIS, cpu="x").key,
        evolve(BASIS, digests=frozenset()).key,
        evolve(BASIS, engines={}).key,
        evolve(BASIS, digests=frozenset({"d1"}), engines={"d2": ""}).key,
    }
    assert len(keys) == 5
    assert Basis(frozenset({"d2", "d1"}), {"llama": "2.0", "onnx": "1.0"}, "cpu-a").key == BASIS.key


def sweep(*seconds: float) -> list[Measured]:
    return [Measured("d", "llama", n, "decode", 10 * s, 0.0, s) for n, s in enumerate(seconds, start=1)]


@pytest.mark.parametrize(
    ("seconds", "want"),
    [((0.4, 0.2, 0.13, 0.5), 3), ((0.4, 0.2, 0.195, 0.18), 4), ((0.4, 0.2, 0.195, 0.192), 2), ((0.1,), 1)],
)
def test_the_fewest_threads_that_are_nearly_the_fastest(seconds: tuple[float, ...], want: int) -> None:
    assert best_threads(sweep(*seconds), "d", "llama", "decode") == want


def test_unmeasured_threads_are_unknown() -> None:
    assert best_threads(sweep(0.1), "d", "llama", "prefill") is None


def test_the_fastest_engine_counts_at_its_best_threads() -> None:
    rows = [
        Measured("d", engine, threads, what, 1.0, 0.0, seconds)
        for engine, threads, what, seconds in (
            ("a", 1, "decode", 0.2), ("a", 4, "decode", 0.9), ("b", 1, "decode", 0.3), ("b", 4, "decode", 0.1),
            ("b", 4, "prefill", 9.0), ("c", 4, "decode", 0.01),
        )
    ]  # fmt: skip
    assert fastest_engine(rows, "d", ("a", "b"), "decode") == "b"
    assert fastest_engine(rows, "d", ("a",), "decode") == "a"
    assert fastest_engine(rows, "other", ("a", "b"), "decode") is None


@given(st.lists(st.floats(0.001, 1000), min_size=1, max_size=20))
def test_the_median_lies_inside_and_the_spread_is_not_negative(seconds: list[float]) -> None:
    middle, spread = summary(seconds)
    assert min(seconds) <= middle <= max(seconds)
    assert spread >= 0


def test_memory_is_really_copied_and_scaled_to_one_gib() -> None:
    clock = FakeClock()

    def ticking() -> float:
        clock.advance(0.5)
        return clock()

    probe = MemoryProbe(copy_bytes=1 << 20, copies=3, clock=ticking)
    measured = probe.run()
    assert (measured.what, measured.digest) == ("memory_bandwidth", "")
    assert measured.median_s == 0.5 * 512  # 2 MiB moved in half a second
    real = MemoryProbe(copy_bytes=1 << 20, copies=3).run()
    assert real.median_s > 0
    assert isinstance(run_benchmark([memory_probe()], None, BASIS, 0.0, FakeClock()), BenchmarkDocument)

"""The agent's benchmark document: what it holds for."""

from __future__ import annotations

from pathlib import Path

from attrs import frozen

from agent.benchmark import Benchmark
from agent.health import Health
from profiles.facts import Facts, collect
from protocol.clock import FakeClock
from protocol.device import Measured


@frozen
class CountingProbe:
    """A probe that says how often it ran."""

    runs: list[str]
    name: str = "whole"
    expected_s: float = 0.1

    def run(self) -> Measured:
        self.runs.append(self.name)
        return Measured("digest", "", 1, "whole", 0.01, 0.001, None)


def benchmark(folder: Path, runs: list[str], slowdown: float) -> Benchmark:
    return Benchmark(
        folder / "benchmark.json",
        lambda: [CountingProbe(runs)],
        lambda: frozenset({"digest"}),
        FakeClock(),
        Health(FakeClock()),
        slowdown=slowdown,
    )


async def test_measurements_hold_for_one_declared_slowdown_only(tmp_path: Path) -> None:
    runs: list[str] = []
    facts: Facts = collect(tmp_path)
    await benchmark(tmp_path, runs, 6.0).run(facts)
    assert benchmark(tmp_path, runs, 6.0).kept(facts) is not None
    assert benchmark(tmp_path, runs, 1.0).kept(facts) is None
    await benchmark(tmp_path, runs, 1.0).run(facts)
    assert len(runs) == 2

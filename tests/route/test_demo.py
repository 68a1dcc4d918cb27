"""The demo as a whole: what it shows can be rebuilt from the requests' own records and from the metrics."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.demo.records import counts, lines, metric_growth, played, read

METRICS = {
    "switch": "midstream_arm_switches_total",
    "handoff": "midstream_handovers_total",
    "cloud_lost": "midstream_source_lost_total",
}
SHOWN = ("switch: ", "handoff: ", "cloud lost at token ")


def play(out: Path, *arguments: str) -> list[str]:
    """Run the demo; returns the lines it showed, without the reasons behind them."""
    command = [sys.executable, "-m", "benchmarks.demo", "--out", str(out), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=dict(os.environ))
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return [line.split("    (")[0] for line in done.stdout.splitlines() if line.startswith(SHOWN)]


@pytest.fixture(autouse=True)
def models(model_file: Callable[[str], Path]) -> None:
    """What the demo needs; skips without."""
    for name in ("ppocr-v4-det", "smollm2-135m", "sample-page", "sample-text"):
        model_file(name)


@pytest.mark.slow
@pytest.mark.alone
def test_the_demo_shows_what_the_records_and_the_metrics_say(tmp_path: Path) -> None:
    shown = play(tmp_path / "demo.jsonl")
    records = read(tmp_path / "demo.jsonl")
    assert shown == list(lines(played(records)))
    found, grown = counts(played(records)), metric_growth(records, list(METRICS.values()))
    assert {kind: grown[metric] for kind, metric in METRICS.items()} == {kind: found[kind] for kind in METRICS}
    assert found["switch"] >= 2
    assert any(line.startswith("handoff: device -> cloud at token ") for line in shown)
    assert any(line.startswith("cloud lost at token ") and line.endswith("device continued") for line in shown)
    arms = {str(r["arm"]).partition(":")[0] for r in played(records) if r.get("event") == "tensor_done"}
    assert arms == {"device", "cut", "cloud"}


@pytest.mark.slow
@pytest.mark.alone
def test_a_constant_link_switches_nothing(tmp_path: Path) -> None:
    assert play(tmp_path / "demo.jsonl", "--constant") == []
    records = read(tmp_path / "demo.jsonl")
    assert counts(played(records)) == {}
    assert sum(metric_growth(records, list(METRICS.values())).values()) == 0
    assert sum(r.get("event") == "tensor_done" for r in played(records)) > 20

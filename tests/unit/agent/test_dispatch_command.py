"""`midstream dispatch replay`: files in, tables, plots and JSON out; bad input is named."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from agent.cli.main import main


@pytest.fixture
def traces(tmp_path: Path) -> tuple[Path, Path]:
    """Requests and TTFTs of a made-up evening."""
    draw = random.Random(5)
    rows = [f"{n * 40},{round(draw.lognormvariate(4, 1)) + 1},60" for n in range(300)]
    requests, ttfts = tmp_path / "requests.csv", tmp_path / "ttfts.csv"
    requests.write_text("arrival_s,prompt_tokens,answer_tokens\n" + "\n".join(rows) + "\n")
    waits = ["", *(f"{draw.lognormvariate(0, 1):.3f}" for _ in range(80))]
    ttfts.write_text("model,ttft_s\n" + "\n".join(f"a/large,{wait}" for wait in waits) + "\nb/other,9\n")
    return requests, ttfts


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["dispatch", "replay", *arguments])
    out = capsys.readouterr()
    return code, out.out, out.err


def test_a_replay_beats_random_routing_and_stays_behind_the_oracle(
    traces: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    requests, ttfts = map(str, traces)
    code, out, _ = run(
        capsys, "--requests", requests, "--ttfts", ttfts, "--service", "a/large", "--json", "--budgets", "0.2,0.6"
    )
    assert code == 0
    found = json.loads(out)
    assert found["requests"] == 300
    assert [one["name"] for one in found["fixed"]] == ["device only", "server only"]
    for regime, rows in found["runs"].items():
        spent = "device_ratio" if regime == "device_constrained" else "server_ratio"
        for ours, other, oracle in zip(rows[::3], rows[1::3], rows[2::3], strict=True):
            assert (ours["name"], other["name"], oracle["name"]) == ("midstream", "random", "oracle")
            assert oracle["mean_s"] - 1e-9 <= ours["mean_s"] < other["mean_s"]
            assert ours[spent] <= ours["budget"] + 0.06


def test_tables_and_a_plot_for_the_terminal(traces: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    requests, ttfts = map(str, traces)
    code, out, _ = run(capsys, "--requests", requests, "--ttfts", ttfts, "--regime", "server", "--budgets", "0.5")
    assert code == 0
    assert "server-constrained" in out
    assert "device-constrained" not in out
    assert "mean TTFT against budget" in out
    assert "  o midstream" in out


def test_a_picture(traces: tuple[Path, Path], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    requests, ttfts = map(str, traces)
    image = tmp_path / "replay.png"
    code, out, _ = run(capsys, "--requests", requests, "--ttfts", ttfts, "--budgets", "0.2,0.5", "--png", str(image))
    assert code == 0
    assert image.read_bytes().startswith(b"\x89PNG")
    assert str(image) in out


def test_the_agents_own_events_are_a_recording(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    def done(at_s: float, side: str, ttft_s: float | None) -> str:
        return json.dumps(
            {"event": "text_done", "at_s": at_s, "total_s": 5.0, "prompt_tokens": 40, "completion_tokens": 30,
             "ttft_s": ttft_s, "sides": [[side, 30]]}
        )  # fmt: skip

    file = tmp_path / "events.jsonl"
    lines = [done(60.0 * n, "cloud" if n % 2 else "device", 0.5) for n in range(20)]
    file.write_text("\n".join([*lines, json.dumps({"event": "switch"}), done(2000.0, "device", None)]) + "\n")
    code, out, _ = run(capsys, "--events", str(file), "--json")
    assert code == 0
    assert json.loads(out)["requests"] == 21


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--budgets", "0.2,x"), "--budgets"),
        (("--budgets", "1.0"), "below 1"),
        (("--prefill", "0"), "above 0"),
        (("--service", "nobody"), "no TTFT of nobody"),
        (("--requests", "missing.csv"), "cannot read missing.csv"),
    ],
)
def test_wrong_use_is_named(
    traces: tuple[Path, Path], capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], told: str
) -> None:
    requests, ttfts = map(str, traces)
    code, _, err = run(capsys, "--requests", requests, "--ttfts", ttfts, *arguments)
    assert code == 2
    assert told in err


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a,b\n1,2\n", "no column arrival_s"),
        ("arrival_s,prompt_tokens,answer_tokens\n1,x,3\n", "line 2: 'x' is no number"),
        ("arrival_s,prompt_tokens,answer_tokens\n1,nan,3\n", "must be 0 or more"),
        ("arrival_s,prompt_tokens,answer_tokens\nnoon,2,3\n", "neither seconds nor a time"),
        ("arrival_s,prompt_tokens,answer_tokens\n1,2,3\n", "two or more"),
    ],
)
def test_a_broken_file_is_named(
    traces: tuple[Path, Path], capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, told: str
) -> None:
    file = tmp_path / "broken.csv"
    file.write_text(text)
    code, _, err = run(capsys, "--requests", str(file), "--ttfts", str(traces[1]))
    assert code == 2
    assert told in err


def test_something_must_be_recorded(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys)
    assert code == 2
    assert "needs requests and TTFTs" in err

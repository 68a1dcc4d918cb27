"""`midstream route calibrate`: labelled answers in, curves in the state folder out."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from agent.cli.calibrate import curves_for, route, rows_of
from engines.catalogue import shipped_catalogue
from gateway.calibration import Calibration, Scope, best_for, weights_of
from gateway.calibrations import MAX_POINTS, keep_calibrations, read_calibrations
from protocol.errors import BadRequest, ConfigError


def rows(count: int, seed: int = 1) -> list[dict[str, object]]:
    """Answers whose mean logprob tells right from wrong, but only just."""
    draw = random.Random(seed)
    made = []
    for _ in range(count):
        mean = -draw.random() * 0.4
        right = draw.random() < 1 + 2 * mean
        intent = draw.choice(["math", "chat"])
        made.append({"logprobs": [mean + draw.gauss(0, 0.01) for _ in range(12)], "right": right, "intent": intent})
    return made


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MIDSTREAM_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("MIDSTREAM_MODELS", str(tmp_path / "models"))
    return tmp_path / "state"


def test_curves_are_kept_for_this_models_weights(
    state: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "answers.jsonl"
    file.write_text("\n".join(map(json.dumps, rows(900))) + "\n")
    assert route(["calibrate", str(file), "--model", "smollm2-135m", "--json"]) == 0
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["intent"] for one in told] == ["all", "chat", "math"]
    assert all(one["auroc"] > 0.65 and one["ece"] < 0.12 for one in told)
    weights = weights_of(shipped_catalogue()["smollm2-135m"])
    kept = read_calibrations(state)
    assert best_for(kept, "smollm2-135m", weights, "math").scope.intent == "math"  # type: ignore[union-attr]
    assert best_for(kept, "smollm2-135m", weights, "other").scope.intent == ""  # type: ignore[union-attr]
    assert best_for(kept, "smollm2-135m", "else", "math") is None


def test_too_few_answers_say_how_many_are_needed(state: Path, tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="at least 200"):
        curves_for("m", "w", [])


@pytest.mark.parametrize("line", ["[]", "{", '{"logprobs": [1]}', '{"prompt": "x"}'])
def test_a_bad_line_is_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "answers.jsonl"
    file.write_text('{"logprobs": [-1], "right": false}\n\n' + line + "\n")
    with pytest.raises(ConfigError, match=r"answers\.jsonl:3"):
        list(rows_of(file))


def test_a_fresh_curve_replaces_its_scope_and_long_ones_become_coarser(tmp_path: Path) -> None:
    points = tuple(n / 10_000 for n in range(10_000))
    old = Calibration(Scope("m", "w"), "mean", (0.1,), (0.2,), 0.7, 0.1, 0.2, 300)
    new = Calibration(Scope("m", "w"), "tenth", points, points, 0.8, 0.1, 0.2, 10_000)
    keep_calibrations(tmp_path, [old, Calibration(Scope("n", "w"), "mean", (0.1,), (0.2,), 0.7, 0.1, 0.2, 300)])
    kept = keep_calibrations(tmp_path, [new])
    assert [(curve.scope.model, curve.feature) for curve in kept] == [("n", "mean"), ("m", "tenth")]
    assert len(kept[1].scores) <= MAX_POINTS + 1
    assert kept[1].probability(0.5) == pytest.approx(0.5, abs=1e-3)
    assert read_calibrations(tmp_path) == kept


def test_a_damaged_file_is_as_if_there_were_none(tmp_path: Path) -> None:
    (tmp_path / "calibrations.json").write_text("{")
    assert read_calibrations(tmp_path) == ()

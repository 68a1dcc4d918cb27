"""What the doctor says of models when the configuration names none."""

from __future__ import annotations

from pathlib import Path

from agent.config import load
from agent.doctor import check_models, check_webrtc


def test_without_named_models_the_pulled_ones_count(tmp_path: Path) -> None:
    config = load(
        {"models_dir": str(tmp_path / "m"), "state_dir": str(tmp_path / "s")}, environ={"HOME": str(tmp_path)}
    )
    (finding,) = check_models(config)
    assert finding.level == "warning" and "pull" in finding.next_step
    (tmp_path / "m" / "det").mkdir(parents=True)
    (tmp_path / "m" / "det" / "entry.json").write_bytes(b"{}")
    (tmp_path / "m" / "det.bundle").mkdir()
    (finding,) = check_models(config)
    assert (finding.level, finding.next_step) == ("ok", "")
    assert finding.text == "pulled: det"


def test_a_pulled_text_model_that_nothing_names_is_a_warning_with_the_setting(tmp_path: Path) -> None:
    for name in ("a-base-model", "smollm2-135m"):
        folder = tmp_path / "m" / name
        folder.mkdir(parents=True)
        (folder / "entry.json").write_bytes(b"{}")
        (folder / "words.gguf").write_bytes(b"GGUF")
    flags = {"models_dir": str(tmp_path / "m"), "state_dir": str(tmp_path / "s")}
    *_, finding = check_models(load(flags, environ={"HOME": str(tmp_path)}))
    assert finding.level == "warning" and "not served" in finding.text
    assert 'text_model = "smollm2-135m" in agent.toml' in finding.next_step
    assert "--text-model smollm2-135m" in finding.next_step
    named = load(flags | {"text_model": "smollm2-135m"}, environ={"HOME": str(tmp_path)})
    assert [finding.level for finding in check_models(named)] == ["ok"]


def test_webrtc_that_is_asked_for_needs_its_extra() -> None:
    (finding,) = check_webrtc("always", False, False)
    assert (finding.level, "midstream[webrtc]" in finding.next_step) == ("warning", True)
    assert len(list(check_webrtc("auto", True, False))) == 1
    silent = [("auto", False, False), ("off", True, False), ("always", True, True)]
    assert [list(check_webrtc(*case)) for case in silent] == [[], [], []]

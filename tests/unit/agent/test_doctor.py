"""What the doctor says of models when the configuration names none."""

from __future__ import annotations

from pathlib import Path

from agent.config import load
from agent.doctor import check_models


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
    assert finding.text.startswith("pulled: det;")

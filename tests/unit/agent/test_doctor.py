"""What the doctor says of models when the configuration names none."""

from __future__ import annotations

import socket
from pathlib import Path

from agent.config import load
from agent.doctor import check_models, check_port, check_webrtc
from agent.settings_table import BY_NAME
from protocol.errors import LinkError


def _absent() -> dict[str, object]:
    raise LinkError("no agent answers", next_step="start one")


def test_without_named_models_the_pulled_ones_count(tmp_path: Path) -> None:
    config = load(
        {"models_dir": str(tmp_path / "m"), "state_dir": str(tmp_path / "s")}, environ={"HOME": str(tmp_path)}
    )
    (finding,) = check_models(config, _absent)
    assert finding.level == "warning" and "pull" in finding.next_step
    (tmp_path / "m" / "det").mkdir(parents=True)
    (tmp_path / "m" / "det" / "entry.json").write_bytes(b"{}")
    (tmp_path / "m" / "det.bundle").mkdir()
    (finding,) = check_models(config, _absent)
    assert (finding.level, finding.next_step) == ("ok", "")
    assert finding.text == "pulled: det"


def test_a_pulled_text_model_that_nothing_names_is_a_warning_with_the_setting(tmp_path: Path) -> None:
    for name in ("a-base-model", "smollm2-135m"):
        folder = tmp_path / "m" / name
        folder.mkdir(parents=True)
        (folder / "entry.json").write_bytes(b"{}")
        (folder / "words.gguf").write_bytes(b"GGUF")
    flags = {"models_dir": str(tmp_path / "m"), "state_dir": str(tmp_path / "s")}
    *_, finding = check_models(load(flags, environ={"HOME": str(tmp_path)}), _absent)
    assert finding.level == "warning" and "not served" in finding.text
    assert 'text_model = "smollm2-135m" in agent.toml' in finding.next_step
    assert "--text-model smollm2-135m" in finding.next_step
    named = load(flags | {"text_model": "smollm2-135m"}, environ={"HOME": str(tmp_path)})
    assert [finding.level for finding in check_models(named, _absent)] == ["ok"]


def test_a_text_model_that_a_flag_of_the_running_agent_names_is_served(tmp_path: Path) -> None:
    folder = tmp_path / "m" / "smollm2-135m"
    folder.mkdir(parents=True)
    (folder / "entry.json").write_bytes(b"{}")
    (folder / "words.gguf").write_bytes(b"GGUF")
    config = load({"models_dir": str(tmp_path / "m"), "state_dir": str(tmp_path / "s")}, environ={"HOME": "/"})
    here: dict[str, object] = {"text_model": "smollm2-135m", "text_place": "device"}
    assert [finding.level for finding in check_models(config, lambda: here)] == ["ok"]
    away = here | {"text_place": "cloud"}
    assert [finding.level for finding in check_models(config, lambda: away)] == ["ok", "warning"]


def test_the_port_is_the_agents_a_strangers_or_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        (ours,) = check_port("127.0.0.1", port, dict)
        (strange,) = check_port("127.0.0.1", port, _absent)
    (free,) = check_port("127.0.0.1", port, _absent)
    assert (ours.level, strange.level, free.level) == ("ok", "warning", "ok")
    assert "the agent listens" in ours.text and "port" in strange.next_step and "free" in free.text


def test_the_list_of_flags_says_what_each_value_looks_like() -> None:
    forms = {name: BY_NAME[name].form for name in ("cache", "mdns", "broker", "tensor_models", "port", "text_model")}
    assert forms == {
        "cache": "off|exact|semantic", "mdns": "true|false", "broker": "HOST:PORT", "tensor_models": "A,B",
        "port": "NUMBER", "text_model": "TEXT",
    }  # fmt: skip


def test_a_store_that_is_no_folder_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "models"
    file.touch()
    (finding,) = check_models(load({"models_dir": str(file)}, environ={}), _absent)
    assert (finding.level, "models_dir" in finding.next_step) == ("error", True)


def test_webrtc_that_is_asked_for_needs_its_extra() -> None:
    (finding,) = check_webrtc("always", False, False)
    assert (finding.level, "[webrtc]" in finding.next_step) == ("warning", True)
    assert len(list(check_webrtc("auto", True, False))) == 1
    silent = [("auto", False, False), ("off", True, False), ("always", True, True)]
    assert [list(check_webrtc(*case)) for case in silent] == [[], [], []]

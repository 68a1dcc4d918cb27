"""A configuration that is read anew: what changes at once, what waits, and what a broken file does."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from agent.config import PolicyBounds, load
from agent.health import Health
from agent.reload import BOUND_NAMES, Changes, compare
from agent.service import Service
from protocol.clock import FakeClock
from protocol.errors import ConfigError
from tests.unit.agent.houses import RunningHouse, config_for


def test_every_bound_is_a_setting_of_its_own() -> None:
    assert set(BOUND_NAMES) >= {"allow_raw_input", "allow_cloud_text", "log_level", "wait_target_s"}
    assert PolicyBounds().log_level is None


def test_equal_configurations_change_nothing(tmp_path: Path) -> None:
    assert compare(config_for(tmp_path), config_for(tmp_path)) == Changes()
    assert Changes().text == "nothing changed that can change now"


def test_what_cannot_change_now_is_named(tmp_path: Path) -> None:
    changes = compare(config_for(tmp_path), config_for(tmp_path, port=8080, allow_cloud_text=False, text_model="x"))
    assert changes.applied == ("allow_cloud_text",)
    assert set(changes.next_start) == {"port", "text_model"}
    assert changes.text == "in force now: allow_cloud_text; at the next start: port, text_model"


async def test_bounds_and_log_level_are_in_force_at_once(tmp_path: Path) -> None:
    async with RunningHouse(config_for(tmp_path)) as agent:
        house = agent.house
        assert not house.holder.current().privacy.local_only
        found = config_for(tmp_path, allow_cloud_text=False, log_level="debug", wait_target_s=0.02, tensor_threads=1)
        changes = house.reconfigure(found)
        assert set(changes.applied) == {"allow_cloud_text", "log_level", "wait_target_s"}
        assert changes.next_start == ("tensor_threads",)
        assert house.holder.current().privacy.local_only
        assert house.holder.current().engines.wait_target_s == 0.02
        assert logging.getLogger("midstream").level == logging.DEBUG
        assert house.reconfigure(found).next_start == ("tensor_threads",), "still waiting"
        assert house.reconfigure(config_for(tmp_path)).applied, "and back"
        assert not house.holder.current().privacy.local_only


async def test_labels_are_registered_anew_and_the_fleet_stays(tmp_path: Path) -> None:
    async with RunningHouse(config_for(tmp_path)) as agent:
        house = agent.house
        house.control.labels["fleet"] = "f"
        (tmp_path / "agent.toml").write_text('[labels]\nroom = "kitchen"\n')
        flags = {"state_dir": str(tmp_path / "agent"), "port": 0, "mdns": False, "benchmark": False, "device_id": "pi"}
        found = load(flags, environ={"HOME": str(tmp_path)}, file=tmp_path / "agent.toml")
        assert house.reconfigure(found) == Changes(("labels",), ())
        assert dict(house.profiler.current().labels) == {"room": "kitchen", "fleet": "f"}


def test_a_file_that_cannot_be_used_changes_nothing_and_is_a_warning() -> None:
    health, service = Health(FakeClock()), Service(None, None)

    def broken() -> Changes:
        raise ConfigError("agent.toml is not valid TOML", next_step="correct it")

    service.reload(broken, health)
    (warning,) = health.warnings
    assert (warning.name, warning.next_step) == ("config", "correct it")
    service.reload(lambda: Changes((), ("port",)), health)
    (warning,) = health.warnings
    assert warning.name == "restart" and "port" in warning.text and "restart" in warning.next_step
    service.reload(Changes, health)
    assert health.warnings == ()


def test_credentials_of_the_service_manager_are_settings(tmp_path: Path) -> None:
    (tmp_path / "agent.toml").write_text('text_key = "from-the-file"\n')
    folder = tmp_path / "credentials"
    folder.mkdir()
    (folder / "text_key").write_text("from-the-credential\n")
    (folder / "port").write_text("1")
    environ = {"HOME": str(tmp_path), "CREDENTIALS_DIRECTORY": str(folder)}
    found = load(environ=environ, file=tmp_path / "agent.toml")
    assert (found.text_key, found.port) == ("from-the-credential", 8790), "only secrets are handed over so"
    assert load(environ=environ | {"MIDSTREAM_TEXT_KEY": "mine"}).text_key == "mine"
    (folder / "text_key").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="credential text_key"):
        load(environ=environ)

"""Configuration: three sources, one meaning; mistakes name the setting, its source and the next step."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent.cli.run import FLAGS
from agent.config import load
from protocol.errors import ConfigError


def test_flags_win_over_environment_over_file(tmp_path: Path) -> None:
    file = tmp_path / "agent.toml"
    file.write_text('port = 1000\nlog_level = "debug"\ncontext_tokens = 512\n[labels]\nroom = "kitchen"\n')
    config = load({"port": "3000"}, environ={"MIDSTREAM_PORT": "2000", "MIDSTREAM_CONTEXT_TOKENS": "1024"}, file=file)
    assert (config.port, config.context_tokens, config.bounds.log_level) == (3000, 1024, "debug")
    assert config.labels == {"room": "kitchen"}


def test_folders_follow_systemd_then_xdg() -> None:
    unit = load(environ={"STATE_DIRECTORY": "/var/lib/midstream", "CACHE_DIRECTORY": "/var/cache/midstream"})
    assert (unit.state_dir, unit.models_dir) == (Path("/var/lib/midstream"), Path("/var/cache/midstream/models"))
    user = load(environ={"HOME": "/home/u"})
    assert user.state_dir == Path("/home/u/.local/state/midstream")
    assert load(environ={"MIDSTREAM_MODELS": "/m"}).models_dir == Path("/m")


def test_only_loopback_is_served_unless_asked_for() -> None:
    with pytest.raises(ConfigError, match="reachable from other machines") as caught:
        load({"host": "0.0.0.0"}, environ={})
    assert "expose" in caught.value.next_step
    assert load({"host": "0.0.0.0", "expose": "true"}, environ={}).host == "0.0.0.0"
    assert load({"host": "::1"}, environ={}).host == "::1"


def test_a_misspelt_variable_is_not_ignored() -> None:
    for variable, meant in (("MIDSTREAM_PROT", "MIDSTREAM_PORT"), ("MIDSTREAM_STATEDIR", "MIDSTREAM_STATE_DIR")):
        with pytest.raises(ConfigError, match=f"{variable} names no setting") as caught:
            load(environ={variable: "1"})
        assert meant in caught.value.next_step


def test_variables_of_others_are_left_alone() -> None:
    others = {
        "MIDSTREAM_URL": "http://x", "MIDSTREAM_HUB_URL": "http://y", "MIDSTREAM_COORDINATOR_PORT": "1",
        "MIDSTREAM_MODEL": "m", "MIDSTREAM_PROT": "",
    }  # fmt: skip
    assert load(environ=others).port == load(environ={}).port


def test_a_file_that_the_environment_names_must_be_there(tmp_path: Path) -> None:
    file = tmp_path / "own.toml"
    with pytest.raises(ConfigError, match=r"no configuration file at .*own\.toml") as caught:
        load(environ={"MIDSTREAM_CONFIG": str(file)})
    assert "MIDSTREAM_CONFIG" in caught.value.next_step
    file.write_text("port = 4321\n")
    assert load(environ={"MIDSTREAM_CONFIG": str(file)}).port == 4321


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("port", "65536"), ("port", "http"), ("slowdown", "0.5"), ("coordinator", "host"), ("coordinator", "h:0"),
        ("mdns", "maybe"), ("text_engine", "vllm"), ("wait_target_s", "nan"), ("log_level", "loud"),
    ],
)  # fmt: skip
def test_a_wrong_value_names_setting_and_source(name: str, value: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load({name: value}, environ={})
    assert caught.value.field == name
    assert "flag --" in caught.value.message
    assert caught.value.next_step


def test_a_misspelt_setting_is_not_ignored(tmp_path: Path) -> None:
    file = tmp_path / "agent.toml"
    for text, meant in (("prot = 1\n", "port"), ('[lables]\nroom = "a"\n', "labels"), ("[[provder]]\n", "provider")):
        file.write_text(text)
        with pytest.raises(ConfigError, match=f"did you mean {meant}"):
            load(environ={}, file=file)


def test_a_value_is_shown_as_the_file_has_it(tmp_path: Path) -> None:
    file = tmp_path / "agent.toml"
    file.write_text("port = true\n")
    with pytest.raises(ConfigError, match="is true") as caught:
        load(environ={}, file=file)
    assert "whole number" in caught.value.next_step


@pytest.mark.parametrize("text", ["port = ", "\xff\xfe", "labels = 3", "port = true", "port = 8790.5"])
def test_a_broken_file_is_a_config_error(tmp_path: Path, text: str) -> None:
    file = tmp_path / "agent.toml"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError):
        load(environ={}, file=file)


def test_the_token_never_shows_in_a_repr() -> None:
    config = load(environ={"MIDSTREAM_JOIN_TOKEN": "mj1.secret"})
    assert config.join_token == "mj1.secret"
    assert "secret" not in repr(config)


def test_the_key_of_a_text_server_is_no_flag_and_shows_nowhere(tmp_path: Path) -> None:
    config = load(environ={"MIDSTREAM_TEXT_KEY": "sk-hidden"})
    assert config.text_key == "sk-hidden"
    assert "hidden" not in repr(config)
    assert not {"text_key", "join_token"} & {setting.name for setting in FLAGS}
    file = tmp_path / "agent.toml"
    file.write_text('text_key = "sk hidden"')
    with pytest.raises(ConfigError, match="not valid") as refused:
        load(environ={}, file=file)
    assert "hidden" not in f"{refused.value} {refused.value.next_step}"


def test_the_turn_credential_is_no_flag_and_in_no_text(tmp_path: Path) -> None:
    file = tmp_path / "agent.toml"
    file.write_text(
        'webrtc = "always"\nwebrtc_servers = ["turn:t.example:3478?transport=tcp"]\nwebrtc_username = "u"\n'
        'webrtc_credential = "s3cret"\nwebrtc_addresses = ["192.0.2.7"]\n'
    )
    config = load(environ={}, file=file)
    settings = config.webrtc_settings
    assert (settings.username, settings.credential, settings.addresses) == ("u", "s3cret", ("192.0.2.7",))
    assert "s3cret" not in repr(config)
    assert "webrtc_credential" not in {setting.name for setting in FLAGS}
    with pytest.raises(ConfigError) as wrong:
        load({"webrtc_servers": "stun:a,stun:b"}, environ={}, file=file)
    assert wrong.value.field == "webrtc_servers"

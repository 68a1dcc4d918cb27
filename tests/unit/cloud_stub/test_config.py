"""The coordinator's configuration: order of sources, and errors that name the field."""

from __future__ import annotations

from argparse import ArgumentParser
from pathlib import Path

import pytest

from cloud_stub.cli import coordinator
from cloud_stub.config import BrokerUrl, add_flags, load_config, parse_broker
from protocol.errors import ConfigError


def test_defaults_need_nothing(tmp_path: Path) -> None:
    config = load_config({}, {"HOME": str(tmp_path)})
    assert config.state_dir == tmp_path / ".local/state/midstream/coordinator"
    assert config.models_dir == tmp_path / ".cache/midstream/models"
    assert config.port == 8791
    assert config.broker_url is None


def test_flags_beat_environment_beats_file(tmp_path: Path) -> None:
    folder = tmp_path / ".config" / "midstream"
    folder.mkdir(parents=True)
    (folder / "coordinator.toml").write_text(
        'port = 1001\nbroker_port = 1002\nfleet = "lab"\naddresses = ["10.0.0.7"]\n'
    )
    environ = {"HOME": str(tmp_path), "MIDSTREAM_COORDINATOR_BROKER_PORT": "2002", "MIDSTREAM_COORDINATOR_MDNS": "off"}
    config = load_config({"fleet": "home", "port": None}, environ)
    assert (config.port, config.broker_port, config.fleet) == (1001, 2002, "home")
    assert config.addresses == ("10.0.0.7",)
    assert config.mdns is False
    assert config.source.endswith("coordinator.toml")


@pytest.mark.parametrize(
    ("flags", "environ", "field"),
    [
        ({"port": 70_000}, {}, "port"),
        ({"fleet": "Not OK"}, {}, "fleet"),
        ({"interfaces": ["eth0"]}, {}, "interfaces"),
        ({"addresses": ["-bad-"]}, {}, "addresses"),
        ({"host": "a b"}, {}, "host"),
        ({"broker": "http://x"}, {}, "broker"),
        ({"broker": "mqtts://user:pw@x"}, {}, "broker"),
        ({"broker": "mqtts://x", "broker_ca": Path("/nowhere")}, {}, "broker_ca"),
        ({"text_engine": "magic"}, {}, "text_engine"),
        ({"join_ttl_s": 1.0}, {}, "join_ttl_s"),
        ({}, {"MIDSTREAM_COORDINATOR_PORT": "many"}, "port"),
        ({}, {"MIDSTREAM_COORDINATOR_COLOUR": "red"}, "colour"),
        ({"config": "/nowhere/c.toml"}, {}, "config"),
    ],
)
def test_mistakes_name_the_field(flags: dict[str, object], environ: dict[str, str], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(flags, environ)
    assert caught.value.field == field
    assert caught.value.next_step


def test_unknown_field_and_broken_file_are_told(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("prot = 1\n")
    with pytest.raises(ConfigError, match=r"'prot'.*did you mean port"):
        load_config({"config": file}, {})
    file.write_text("port = \n")
    with pytest.raises(ConfigError, match="not TOML"):
        load_config({"config": file}, {})
    file.write_bytes(b"# " + b"x" * (65 << 10))
    with pytest.raises(ConfigError, match="at most"):
        load_config({"config": file}, {})


@pytest.mark.parametrize(
    ("name", "text", "wanted"),
    [("PORT", "22x", "a whole number"), ("JOIN_TTL_S", "a day", "a number"), ("MDNS", "maybe", "true or false"),
     ("PROT", "1", "did you mean port")],
)  # fmt: skip
def test_a_text_of_another_kind_says_which_kind_is_wanted(name: str, text: str, wanted: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config({}, {f"MIDSTREAM_COORDINATOR_{name}": text})
    assert wanted in caught.value.next_step


@pytest.mark.parametrize("names", ["", " , ", "a b", "broker.lan,bad/name"])
def test_a_broker_certificate_for_no_host_name_is_refused_and_nothing_written(names: str, tmp_path: Path) -> None:
    out, state = tmp_path / "out", tmp_path / "state"
    with pytest.raises(ConfigError, match="--names"):
        coordinator(["mosquitto-conf", "--out", str(out), "--names", names, "--state-dir", str(state)])
    assert not out.exists()
    assert not state.exists()


def test_broker_urls() -> None:
    assert parse_broker("mqtts://broker.lan") == BrokerUrl("broker.lan", 8883, True)
    assert parse_broker("mqtt://[::1]:1884") == BrokerUrl("::1", 1884, False)
    with pytest.raises(ConfigError):
        parse_broker("mqtts://h:99999999")


def test_the_turn_credential_comes_from_the_environment_and_is_in_no_text(tmp_path: Path) -> None:
    environ = {
        "HOME": str(tmp_path),
        "MIDSTREAM_COORDINATOR_WEBRTC_SERVERS": "stun:s.example:3478,turn:t.example?transport=udp",
        "MIDSTREAM_COORDINATOR_WEBRTC_USERNAME": "u",
        "MIDSTREAM_COORDINATOR_WEBRTC_CREDENTIAL": "s3cret",
    }
    config = load_config({}, environ)
    assert (config.webrtc_settings.credential, len(config.webrtc_settings.servers)) == ("s3cret", 2)
    assert "s3cret" not in repr(config)
    del environ["MIDSTREAM_COORDINATOR_WEBRTC_CREDENTIAL"]
    with pytest.raises(ConfigError) as missing:
        load_config({}, environ)
    assert missing.value.field == "webrtc_credential"
    parser = ArgumentParser()
    add_flags(parser)
    with pytest.raises(SystemExit):
        parser.parse_args(["--webrtc-credential", "s3cret"])

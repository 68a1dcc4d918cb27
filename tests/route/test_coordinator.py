"""A whole coordinator: joining, mutual TLS, who may call what, restarts, faults, the command."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from cloud_stub import cli
from cloud_stub.admin_client import AdminClient
from cloud_stub.authority import read_admin_key
from cloud_stub.compose import CoordinatorHouse
from links.tls import fetch_peer_certificate
from protocol import handoff
from protocol.decode import decode
from protocol.documents import CoordinatorInfo, JoinAnswer
from protocol.errors import BadRequest, ConfigError, LinkError, NotFound
from protocol.handoff_headers import HandoffReader, HandoffWriter
from protocol.text import TextRequest
from protocol.trust import decode_join
from tests.conftest import ROOT
from tests.route.coordinator_house import JSON, running, settings
from tests.unit.cloud_stub.device_side import new_device


async def test_joining_as_the_join_string_says(tmp_path: Path) -> None:
    async with running(tmp_path) as coordinator:
        token = decode_join(coordinator.house.join_string())
        ca_pem = await fetch_peer_certificate(token.host, token.port, token.ca_fingerprint)
        assert ca_pem.strip() == coordinator.house.authority.ca_pem.strip()
        with pytest.raises(LinkError, match="does not show the CA"):
            await fetch_peer_certificate(token.host, token.port, "0" * 64)
        device = new_device()
        answer = decode(JoinAnswer, (await coordinator.join(device, token.secret)).body, what="answer")
        assert token.policy_key in answer.policy_keys.values()
        assert answer.broker_port == coordinator.house.broker_port
        assert (answer.broker_tls, answer.broker_version, coordinator.house.state().broker_version) == (True, 4, 4)
        files = device.write(tmp_path, answer.cert_pem)
        assert (await coordinator.get("/midstream/v1/status", files=files)).status == 200
        told = decode(CoordinatorInfo, (await coordinator.get("/midstream/v1/info", files=files)).body, what="info")
        assert (told.broker_host, told.broker_port, told.broker_version) == (None, answer.broker_port, 4)
        assert (await coordinator.join(device, token.secret)).status == 200, "the same device may ask again"
        second = await coordinator.join(new_device("pi-2"), token.secret)
        assert second.status == 403
        assert b"already used" in second.body


async def test_who_may_call_what(tmp_path: Path) -> None:
    async with running(tmp_path) as coordinator:
        key = coordinator.house.authority.new_client_key
        files = await coordinator.member()
        boss = read_admin_key(coordinator.house.config.state_dir)
        house = ("/metrics", "/midstream/v1/status", "/midstream/v1/info")
        ways = ("/midstream/v1/bundles", "/v1/models", "/v2/health/ready")
        for path in (*house, *ways):
            stranger = await coordinator.get(path)
            assert stranger.status == 401, path
            assert stranger.headers["www-authenticate"] == "Bearer"
            assert (await coordinator.get(path, key="msk-wrong")).status == 401
            assert (await coordinator.get(path, key=key)).status == (403 if path in house else 200), path
            assert (await coordinator.get(path, key=boss)).status == (200 if path in house else 403), path
            assert (await coordinator.get(path, files=files)).status == 200, path
        assert (await coordinator.get("/healthz")).status == 200
        for who, status in (({}, 401), ({"key": key}, 403), ({"files": files}, 401), ({"key": boss}, 200)):
            assert (await coordinator.get("/midstream/v1/admin/devices", **who)).status == status
        with pytest.raises(LinkError):
            stream = await coordinator.link().open("/midstream/v1/handoff")
            await stream.send(b"x")
            assert await stream.receive() is None
            raise LinkError("closed before anything was heard")


async def test_a_certificate_of_another_fleet_and_a_revoked_one(tmp_path: Path) -> None:
    async with running(tmp_path / "a") as ours, running(tmp_path / "b") as theirs:
        foreign = await theirs.member("spy")
        with pytest.raises(LinkError):
            await ours.get("/metrics", files=foreign)
        files = await ours.member()
        assert (await ours.get("/metrics", files=files)).status == 200
        client = AdminClient(ours.house.config.state_dir)
        await client.ask("POST", "/devices/pi-1/revoke")
        assert (await ours.get("/metrics", files=files)).status == 401
        await client.ask("DELETE", "/devices/pi-1")
        again = await ours.get("/midstream/v1/status", files=files)
        assert again.status == 401, "forgetting gives no certificate back"
        with pytest.raises(NotFound):
            await client.ask("POST", "/devices/pi-7/revoke")


@pytest.mark.parametrize(("method", "path"), [("POST", "/devices/pi-1/revoke"), ("DELETE", "/devices/pi-1")])
async def test_a_handoff_stream_ends_with_its_devices_membership(tmp_path: Path, method: str, path: str) -> None:
    async with running(tmp_path) as coordinator:
        mine, other = await coordinator.member("pi-1"), await coordinator.member("pi-2")
        ended, kept = [await coordinator.link(files).open("/midstream/v1/handoff") for files in (mine, other)]
        prepare = handoff.Prepare(TextRequest("tiny", "hello"))
        for stream in (ended, kept):  # it is open and read
            await stream.send(HandoffWriter().encode(b"s" * 16, 1, prepare))
            answer = HandoffReader().decode(await stream.receive() or b"").frame
            assert isinstance(answer, handoff.Refuse) and answer.code == "model_not_found"
        await AdminClient(coordinator.house.config.state_dir).ask(method, path)
        async with asyncio.timeout(5):
            with contextlib.suppress(LinkError):
                assert await ended.receive() is None
        await kept.send(HandoffWriter().encode(b"t" * 16, 1, prepare))
        assert await kept.receive() is not None
        for stream in (ended, kept):
            await stream.close()


@pytest.mark.parametrize(
    ("body", "status", "field"),
    [
        (b"", 400, None), (b"{", 400, None), (b"[]", 400, None), (b'{"secret":"x"}', 400, "device_id"),
        (b'{"secret":1,"device_id":"a","csr_pem":"x"}', 400, "secret"),
        (b'{"secret":"x","device_id":"../etc","csr_pem":"x"}', 400, "device_id"),
        (b'{"secret":"x","device_id":"a","csr_pem":"x"}', 403, "secret"), (b"x" * 20_000, 413, None),
    ],
)  # fmt: skip
async def test_garbage_on_the_join_endpoint(tmp_path: Path, body: bytes, status: int, field: str | None) -> None:
    async with running(tmp_path) as coordinator:
        reply = await coordinator.link().exchange("/midstream/v1/join", JSON, body, 5)
        assert reply.status == status, reply.body
        error = json.loads(reply.body)["error"]
        assert error["message"]
        assert error["param"] == field


async def test_guessing_secrets_ends_in_a_wait(tmp_path: Path) -> None:
    async with running(tmp_path) as coordinator:
        device = new_device()
        statuses = [(await coordinator.join(device, f"guess-{n}")).status for n in range(12)]
        assert statuses[:10] == [403] * 10
        assert statuses[10:] == [503] * 2
        assert (await coordinator.join(device)).status == 200


async def test_a_disk_that_takes_nothing_refuses_the_join_and_keeps_the_secret(tmp_path: Path) -> None:
    async with running(tmp_path) as coordinator:
        secret = decode_join(coordinator.house.join_string()).secret
        blocked = tmp_path / "coordinator" / "join.json.tmp"
        blocked.mkdir()  # the temporary file of a durable write cannot be made
        device = new_device()
        reply = await coordinator.join(device, secret)
        assert reply.status == 500
        assert b"cannot use" in reply.body or b"not allowed" in reply.body
        assert (await coordinator.get("/healthz")).status == 200
        blocked.rmdir()
        assert (await coordinator.join(device, secret)).status == 200


async def test_raw_garbage_on_the_tls_port(tmp_path: Path) -> None:
    async with running(tmp_path) as coordinator:
        for data in (b"\x16\x03\x01" + b"\xff" * 50, b"GET / HTTP/1.0\r\n\r\n", b"\x00" * 100):
            reader, writer = await asyncio.open_connection("127.0.0.1", coordinator.house.port)
            writer.write(data)
            with contextlib.suppress(ConnectionError):
                await asyncio.wait_for(reader.read(), 5)
            writer.transport.abort()
        assert (await coordinator.get("/healthz")).status == 200
        assert (await coordinator.get("/midstream/v1/bundles/..%2f..%2fca.pem/manifest.json", key="x")).status == 401
        key = coordinator.house.authority.new_client_key
        for path in ("..%2f..%2fca.pem/manifest.json", "nope/manifest.json", "nope/files/x"):
            assert (await coordinator.get(f"/midstream/v1/bundles/{path}", key=key)).status in (400, 404)


async def test_policy_verbs_name_what_is_wrong(tmp_path: Path) -> None:
    async with running(tmp_path) as coordinator:
        client = AdminClient(coordinator.house.config.state_dir)
        with pytest.raises(BadRequest) as caught:
            await client.ask("POST", "/policy", b"[split]\nratoi = 1\n", {"form": "toml"})
        assert caught.value.field == "split.ratoi"
        with pytest.raises(BadRequest):
            await client.ask("POST", "/policy", b"", {"form": "xml"})
        with pytest.raises(NotFound):
            await client.ask("GET", "/policy/3")
        with pytest.raises(BadRequest):
            await client.ask("POST", "/policy/three/rollback")
        with pytest.raises(BadRequest):
            await client.ask("POST", "/token", query={"life_s": "nan"})
        assert (await client.ask("GET", "/policy"))["policies"] == []


async def test_a_start_that_fails_keeps_no_secret_from_its_operator(
    tmp_path: Path, free_port: Callable[[], int]
) -> None:
    taken = free_port()
    with socket.create_server(("127.0.0.1", taken)), pytest.raises(ConfigError, match="already in use"):
        async with running(tmp_path, port=taken):
            pass
    async with running(tmp_path) as second:
        shown = "\n".join(cli.welcome(second.house))
        key = second.house.authority.new_client_key
        assert key is not None and key in shown and "midstream join mj1." in shown
        assert (await second.get("/v1/models", key=key)).status == 200


async def test_later_starts_show_no_secret(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Not even one after `mosquitto-conf`, which makes the fleet and shows nothing."""
    state = tmp_path / "coordinator"
    cli.coordinator(["mosquitto-conf", "--out", str(tmp_path / "m"), "--state-dir", str(state)])
    async with running(tmp_path) as first:
        ready = cli._ready(first.house)
        assert ready["client_key"] == first.house.authority.new_client_key
        assert decode_join(ready["join"]).port == first.house.port
        secrets = (state / "join.json").read_bytes()
    async with running(tmp_path) as second:
        ready, shown = cli._ready(second.house), "\n".join(cli.welcome(second.house))
        assert not {"join", "client_key"} & ready.keys()
        assert "mj1." not in shown and "msk-" not in shown and "midstream coordinator token" in shown
        assert (state / "join.json").read_bytes() == secrets, "and makes none"


async def test_restarts_keep_trust_and_history(tmp_path: Path) -> None:
    async with running(tmp_path) as first:
        files = await first.member()
        key = first.house.authority.new_client_key
        secret = decode_join(first.house.join_string()).secret
        version = (await AdminClient(first.house.config.state_dir).ask("POST", "/policy", b""))["version"]
    assert not (tmp_path / "coordinator" / "run.json").exists()
    async with running(tmp_path) as second:
        assert second.house.authority.new_client_key is None
        assert (await second.get("/metrics", files=files)).status == 200
        assert (await second.get("/v1/models", key=key)).status == 200
        assert (await second.join(new_device("pi-2"), secret)).status == 200
        found = await AdminClient(second.house.config.state_dir).ask("GET", "/policy")
        assert [p["version"] for p in found["policies"]] == [version]
        assert second.house.authority.record.run == 2


async def test_a_damaged_registry_starts_anew_with_a_greater_epoch(tmp_path: Path) -> None:
    async with running(tmp_path) as first:
        files = await first.member()
        epoch = (await AdminClient(first.house.config.state_dir).ask("POST", "/policy", b""))["epoch"]
    (tmp_path / "coordinator" / "registry.sqlite").write_bytes(b"\xff" * 5000)
    async with running(tmp_path) as second:
        assert any("moved to" in note for note in second.house.notes)
        assert (await second.get("/metrics", files=files)).status == 200, "certificates outlive the registry"
        assert (await AdminClient(second.house.config.state_dir).ask("POST", "/policy", b""))["epoch"] > epoch


async def test_ports_in_use_are_told_and_nothing_stays(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for changes, name in (({"port": port}, "port"), ({"broker_port": port}, "broker_port")):
            house = CoordinatorHouse(settings(tmp_path, **changes))
            with pytest.raises(ConfigError, match="already in use") as caught:
                await house.start()
            assert caught.value.field == name
            assert caught.value.next_step


async def test_without_a_coordinator_the_verbs_say_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no coordinator") as caught:
        await AdminClient(tmp_path).ask("GET", "/devices")
    assert "midstream coordinator" in caught.value.next_step
    async with running(tmp_path) as coordinator:
        state_dir = coordinator.house.config.state_dir
        run = (state_dir / "run.json").read_bytes()
    (state_dir / "run.json").write_bytes(run)
    with pytest.raises(ConfigError, match="no coordinator runs"):
        await AdminClient(state_dir).ask("GET", "/devices")


def test_the_command_as_a_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = [sys.executable, "-m", "agent.cli.main", "coordinator", "--json", "--state-dir", str(tmp_path / "s")]
    command += ["--host", "127.0.0.1", "--port", "0", "--broker-port", "0", "--no-mdns", "--text-engine", "none"]
    environ = {**os.environ, "MIDSTREAM_MODELS": str(tmp_path / "models")}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=ROOT, env=environ) as process:
        assert process.stdout is not None
        ready = json.loads(process.stdout.readline())
        assert ready["event"] == "ready"
        assert decode_join(ready["join"]).port == ready["port"]
        assert ready["client_key"].startswith("msk-")
        policy = tmp_path / "p.toml"
        policy.write_text("[split]\nperiods = 5\n")
        state = ["--state-dir", str(tmp_path / "s")]
        assert cli.policy(["publish", str(policy), "--note", "calmer", *state]) == 0
        assert cli.policy(["history", *state]) == 0
        assert cli.policy(["show", *state]) == 0
        assert cli.policy(["rollback", "1", "--json", *state]) == 0
        assert cli.fleet(["list", *state]) == 0
        assert cli.coordinator(["token", "--life-s", "600", *state]) == 0
        printed = capsys.readouterr().out
        assert "version 1 sent to 0 devices: none is registered yet" in printed and "calmer" in printed
        assert decode_join(printed.strip().splitlines()[-1]).host == "127.0.0.1"
        began_s = time.monotonic()
        process.send_signal(signal.SIGTERM)
        rest = [json.loads(line) for line in process.stdout.read().splitlines()]
        assert process.wait(10) == 0
        assert rest[-1] == {"event": "stopped"}
        assert time.monotonic() - began_s < 10


def test_written_mosquitto_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "mosquitto-conf",
        "--out",
        str(tmp_path / "m"),
        "--names",
        "broker.lan",
        "--state-dir",
        str(tmp_path / "s"),
    ]
    assert cli.coordinator(arguments) == 0
    assert "mqtts://broker.lan:8883" in capsys.readouterr().out
    conf = (tmp_path / "m" / "mosquitto.conf").read_text()
    assert "use_identity_as_username true" in conf and "allow_anonymous false" in conf

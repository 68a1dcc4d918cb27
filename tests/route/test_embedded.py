"""The agent as a guest of a program that has no signals, no child processes and none of the native libraries."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from attrs import define

from cloud_stub.admin_client import AdminClient
from engines.digest import file_sha256
from engines.fakes_tensor import MAGIC
from protocol.decode import encode
from protocol.models import CatalogueEntry, Source
from tests.conftest import ROOT
from tests.route.coordinator_house import running

TEXT_MODEL = "smollm2-135m"
GUEST = Path(__file__).with_name("guest_program.py")
LINE_S = 60.0


@define
class Guest:
    """The child process; each `at` reads the next thing that it says, `go` lets it go on."""

    process: asyncio.subprocess.Process

    async def at(self, name: str) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = await asyncio.wait_for(self.process.stdout.readline(), LINE_S)
        assert line, "the guest died; see the captured stderr"
        found: dict[str, Any] = json.loads(line)
        assert found["at"] == name
        return found

    def go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(b"go\n")


@asynccontextmanager
async def guest(settings: dict[str, Any]) -> AsyncIterator[Guest]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(GUEST), json.dumps(settings), cwd=ROOT, env={"PYTHONPATH": str(ROOT)},
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=1 << 20,
    )  # fmt: skip
    try:
        yield Guest(process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


def models_of_the_host(models: Path) -> None:
    """A store with files that only the host's runtime can load; one of them would need numpy for its pictures."""
    for name, recipe in (("double", None), ("pictures", "ppocr-cls")):
        file = models / name / f"{name}.tflite"
        file.parent.mkdir(parents=True)
        file.write_bytes(MAGIC)
        entry = CatalogueEntry(
            name=name, format="tflite", filename=file.name, sha256=file_sha256(file), size_bytes=len(MAGIC),
            source=Source("file", file=str(file)), licence="", description="", recipe=recipe,
        )  # fmt: skip
        (file.parent / "entry.json").write_bytes(encode(entry))


@define
class Seen:
    """What the coordinator knows of its one device."""

    admin: AdminClient

    async def state(self, wanted: str, seconds: float = 15.0) -> dict[str, Any]:
        """The device, once its presence is `wanted`."""
        device: dict[str, Any] = {}
        try:
            async with asyncio.timeout(seconds):
                while device.get("state") != wanted:
                    devices = (await self.admin.ask("GET", "/devices"))["devices"]
                    device = devices[0] if devices else {}
                    await asyncio.sleep(0.05)
        except TimeoutError:
            pytest.fail(f"the coordinator sees {device.get('state')!r}, not {wanted!r}")
        return device


@pytest.mark.timeout(180)
async def test_a_guest_lives_twice_without_signals_children_or_native_libraries(
    tmp_path: Path, model_file: Callable[[str], Path]
) -> None:
    models = model_file(TEXT_MODEL).parent.parent
    models_of_the_host(tmp_path / "device-models")
    async with running(tmp_path, models_dir=models, models=(TEXT_MODEL,), text_engine="llama_server") as coordinator:
        seen = Seen(AdminClient(coordinator.house.config.state_dir))
        published = await seen.admin.ask("POST", "/policy", b"[engines]\nwait_target_s = 0.75\n", {"form": "toml"})
        settings = {
            "policy_version": published["version"],
            "text_model": TEXT_MODEL,
            "agent": {
                "state_dir": str(tmp_path / "agent"), "models_dir": str(tmp_path / "device-models"), "port": 0,
                "join_token": coordinator.house.join_string(), "device_id": "phone",
            },
        }  # fmt: skip
        async with guest(settings) as program:
            for number in (1, 2):
                await one_life(program, seen, number)
            over = await program.at("over")
            program.go()
            assert await asyncio.wait_for(program.process.wait(), 10) == 0
        assert (over["broken_rules"], over["loaded"]) == ([], [])
        assert over["secrets"] == ["midstream.device.key"]
        assert not (tmp_path / "agent" / "identity" / "device.key").exists(), "the key is the host's to keep"


async def one_life(program: Guest, seen: Seen, number: int) -> None:
    connected = await program.at("connected")
    assert (connected["life"], connected["device_id"]) == (number, "phone")
    await seen.state("online")
    program.go()
    answered = await program.at("answered")
    status, body = answered["tensor"]
    assert (status, body["outputs"][0]["data"]) == (200, [2.0, 4.0, 6.0, -9.0])
    status, body = answered["text"]
    assert status == 200 and body["choices"][0]["message"]["content"].strip()
    assert answered["status"]["text_place"] == "cloud"
    assert answered["status"]["host"]["battery_ratio"] == 0.5
    warnings = {w["name"]: w["text"] for w in answered["status"]["warnings"]}
    assert "numpy" in warnings.pop("tensor_model:pictures")
    assert warnings == {}
    program.go()
    paused = await program.at("paused")
    assert (paused["state"], paused["tensor"][0], paused["awake"]) == ("paused", 503, 0)
    await seen.state("sleeping")
    program.go()
    resumed = await program.at("resumed")
    assert (resumed["state"], resumed["tensor"][0], resumed["text"][0]) == ("ready", 200, 200)
    await seen.state("online")
    program.go()
    idle = await program.at("idle")
    assert (idle["state"], idle["tensor"][0]) == ("ready", 200), "a system that naps still answers its own program"
    await seen.state("sleeping")
    program.go()
    stopped = await program.at("stopped")
    assert (stopped["state"], stopped["watchers"]) == ("stopped", 0)
    assert sorted(stopped["threads"]) == ["MainThread", "worker of the host"]
    await seen.state("offline")
    program.go()

"""The stage: coordinator and agent as processes of their own, and a shaped path between them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

from attrs import define, field

from benchmarks.demo.screen import Screen
from links.shaped import ShaperProxy
from protocol.errors import EngineError

LOOPBACK = "127.0.0.1"
START_S = 90.0
STOP_S = 10.0
VISION_MODEL = "ppocr-v4-det"
TEXT_MODEL = "smollm2-135m"


@define
class Child:
    """One `midstream` process that tells its state as JSON lines on standard output."""

    name: str
    process: asyncio.subprocess.Process
    log: Path
    seen: list[dict[str, Any]] = field(factory=list)
    news: asyncio.Event = field(factory=asyncio.Event)
    reader: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, name: str, arguments: list[str], log: Path, env: Mapping[str, str]) -> Child:
        """Run `midstream <arguments>` in a process group of its own, so that Ctrl-C reaches us first."""
        command = [sys.executable, "-P", "-m", "agent.cli.main", *arguments]
        with log.open("wb") as err:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=err,
                env={**os.environ, **env},
                start_new_session=True,
            )
        child = cls(name, process, log)
        child.reader = asyncio.create_task(child._read())
        return child

    async def _read(self) -> None:
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            with contextlib.suppress(ValueError):
                self.seen.append(json.loads(line))
            self.news.set()
        self.news.set()

    async def wait_for(self, event: str, seconds: float = START_S) -> dict[str, Any]:
        """The first record of this kind; EngineError with the end of the log when it does not come."""
        end = time.monotonic() + seconds
        while True:
            for record in self.seen:
                if record.get("event") == event:
                    return record
            if self.process.returncode is not None or time.monotonic() > end:
                tail = self.log.read_text(errors="replace")[-1500:]
                raise EngineError(f"the {self.name} did not say `{event}`:\n{tail}")
            self.news.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.news.wait(), 0.2)

    def kill(self) -> None:
        """End the whole process group at once, without a goodbye."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    async def stop(self) -> None:
        """Ask it to drain; kill what is left after STOP_S seconds."""
        with contextlib.suppress(ProcessLookupError):
            self.process.terminate()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.process.wait(), STOP_S)
        self.kill()
        await self.process.wait()
        if self.reader is not None:
            await self.reader


@define
class Stage:
    """Both processes and the shaped path of the data plane."""

    folder: Path
    coordinator: Child
    agent: Child
    shaper: ShaperProxy
    agent_port: int

    @property
    def url(self) -> str:
        """Base URL of the agent's local API."""
        return f"http://{LOOPBACK}:{self.agent_port}"

    async def publish_policy(self, toml: str) -> None:
        """What an operator does: `midstream policy publish FILE`."""
        file = self.folder / "policy.toml"
        file.write_text(toml)
        command = [sys.executable, "-P", "-m", "agent.cli.main", "policy", "publish", str(file)]
        command += ["--state-dir", str(self.folder / "coordinator")]
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=asyncio.subprocess.STDOUT)
        said, _ = await process.communicate()
        if process.returncode != 0:
            raise EngineError(f"the policy was not published: {said.decode(errors='replace')}")


@contextlib.asynccontextmanager
async def open_stage(folder: Path, records: Path, slowdown: float, screen: Screen) -> AsyncIterator[Stage]:
    """Start coordinator, shaper and agent; stop them in reverse order whatever happens."""
    async with contextlib.AsyncExitStack() as stack:
        with screen.step("coordinator: fleet CA, policy key, models, cuts"):
            coordinator = await _start_coordinator(folder)
            stack.push_async_callback(coordinator.stop)
            ready = await coordinator.wait_for("ready")
        shaper = ShaperProxy(LOOPBACK, int(ready["port"]))
        await shaper.start()
        stack.push_async_callback(shaper.close)
        with screen.step("agent: join, find the coordinator by mDNS, load models, measure this device"):
            agent = await _start_agent(folder, records, slowdown, str(ready["join"]), shaper.port)
            stack.push_async_callback(agent.stop)
            port = int((await agent.wait_for("ready"))["port"])
            connected = await agent.wait_for("connected")
            screen.say(f"agent found the coordinator by {connected.get('via', '?')} at {connected.get('address', '?')}")
            await agent.wait_for("profiled")
        with screen.step(f"coordinator: cuts of {VISION_MODEL}, made once and kept beside the model"):
            await coordinator.wait_for("bundle")
        yield Stage(folder, coordinator, agent, shaper, port)


async def _start_coordinator(folder: Path) -> Child:
    arguments = ["coordinator", "--json", "--state-dir", str(folder / "coordinator"), "--host", LOOPBACK, "--port", "0"]
    arguments += ["--broker-port", "0", "--addresses", LOOPBACK, "--interfaces", LOOPBACK]
    arguments += ["--models", f"{VISION_MODEL},{TEXT_MODEL}", "--bundles", VISION_MODEL, "--text-threads", "1"]
    return await Child.start("coordinator", arguments, folder / "coordinator.log", {})


async def _start_agent(folder: Path, records: Path, slowdown: float, join: str, data_port: int) -> Child:
    arguments = ["agent", "--json", "--state-dir", str(folder / "agent"), "--port", "0", "--events", str(records)]
    arguments += ["--mdns-interfaces", LOOPBACK, "--data-proxy", f"{LOOPBACK}:{data_port}"]
    # The network that falls is the direct way's; a second one beside it would tell another story.
    arguments += ["--webrtc", "off"]
    arguments += ["--tensor-models", VISION_MODEL, "--tensor-threads", "1"]
    arguments += ["--text-model", TEXT_MODEL, "--text-threads", "1", "--slowdown", str(slowdown)]
    return await Child.start("agent", arguments, folder / "agent.log", {"MIDSTREAM_JOIN_TOKEN": join})

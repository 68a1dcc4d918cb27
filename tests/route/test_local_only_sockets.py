"""Local-only as the sockets see it: an agent that would rather use the cloud sends it not one byte.

Every Python process of the agent, its engine's worker too, writes each socket event into one file (audit hooks,
PEP 578); and whatever reaches the coordinator goes through a recorder. Dispatch is told to start in the cloud, every
token is a reason to move there, and the device's engine is killed in mid-answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from attrs import define, field

from cloud_stub.text import TextHouse
from engines.fakes_text import FakeTextEngine
from links.http_server import serve
from protocol.events import ignore
from tests.conftest import ROOT
from tests.raw_peer import raw_server

MODEL = "smollm2-135m"
SECRET = "Marianne Quellwasser"
COUNT = 40
WATCH = """
import os, sys
_out = os.open(os.environ["SOCKET_LOG"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
def _hook(event, args):
    if event in ("socket.connect", "socket.sendto", "socket.sendmsg", "socket.getaddrinfo"):
        os.write(_out, f"{event} {args[1:]!r}\\n".encode())
sys.addaudithook(_hook)
"""


@define
class Recorder:
    """A TCP relay in front of the coordinator that keeps what clients send."""

    target: int
    port: int = 0
    received: bytearray = field(factory=bytearray)

    async def relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, both directions."""
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.target)
        try:
            await asyncio.gather(self._pump(reader, far_writer, keep=True), self._pump(far_reader, writer, keep=False))
        except OSError:
            return
        finally:
            far_writer.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, keep: bool) -> None:
        while data := await reader.read(65536):
            if keep:
                self.received += data
            writer.write(data)
            await writer.drain()
        writer.write_eof()


@asynccontextmanager
async def coordinator() -> AsyncIterator[Recorder]:
    """A coordinator's text house with a fast model of that name, behind a recorder."""
    house = TextHouse({MODEL: FakeTextEngine(name="cloud")})
    front = house.front(ignore)
    server = await serve(front.routes, [house.handoff(lambda request: "client")], host="127.0.0.1", port=0)
    recorder = Recorder(server.port)
    try:
        async with raw_server(recorder.relay) as recorder.port:
            yield recorder
    finally:
        await front.stop()
        await house.close()
        await server.close()


@define
class Agent:
    """The agent's process, where its API listens, and its socket events."""

    process: asyncio.subprocess.Process
    port: int
    log: Path

    def events(self) -> list[str]:
        """Socket events so far, those of Unix sockets left out (an address is then a path, not a tuple)."""
        return [line for line in self.log.read_text().splitlines() if "('" in line.replace("('/", "")]

    def worker(self) -> int:
        """The process of the device's engine."""
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                parent = f"PPid:\t{self.process.pid}\n" in (folder / "status").read_text()
                if parent and b"engines.worker" in (folder / "cmdline").read_bytes():
                    return int(folder.name)
        raise AssertionError("the device's engine has no process")

    async def ended(self) -> list[list[Any]]:
        """Let it end; its own account of the answers."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        told: list[list[Any]] = json.loads(await self.process.stdout.readline())
        assert await self.process.wait() == 0
        return told


@asynccontextmanager
async def watched_agent(path: Path, folder: Path, port: int, mode: str) -> AsyncIterator[Agent]:
    (folder / "watch").mkdir()
    (folder / "watch" / "sitecustomize.py").write_text(WATCH)
    log = folder / "sockets.log"
    search = os.pathsep.join((str(folder / "watch"), str(ROOT)))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.route.watched_agent", f"http://127.0.0.1:{port}"),
        *(str(path.parent.parent), str(folder), mode),
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": search, "SOCKET_LOG": str(log)},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(60):
            ready = json.loads(await process.stdout.readline())
        assert ready["targets"] == ["device", "cloud"], "there is nothing to be tempted by"
        yield Agent(process, ready["port"], log)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        process._transport.close()  # type: ignore[attr-defined]


async def chats(agent: Agent, kill: bool) -> None:
    """A whole chat and a streamed one; with `kill` the device's engine dies within the second."""
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": f"Write a long letter to {SECRET} about the sea."}],
        "max_tokens": COUNT,
        "temperature": 0,
    }
    async with openai.DefaultAsyncHttpxClient(base_url=f"http://127.0.0.1:{agent.port}", timeout=60.0) as client:
        whole = await client.post("/v1/chat/completions", json=body)
        assert whole.status_code == 200, whole.text
        lines = []
        async with client.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as reply:
            async for line in reply.aiter_lines():
                lines += [line] if line else []
                if kill and line and len(lines) == 6:
                    os.kill(agent.worker(), signal.SIGKILL)
        assert lines[-1] == "data: [DONE]"


@pytest.mark.parametrize("mode", ["policy", pytest.param("request", marks=pytest.mark.slow)])
async def test_not_one_byte_leaves_when_requests_are_local_only(
    model_file: Callable[[str], Path], tmp_path: Path, mode: str
) -> None:
    path = model_file(MODEL)
    async with (
        coordinator() as recorder,
        watched_agent(path, tmp_path, recorder.port, mode) as agent,
    ):
        # So far it asked which models there are, and that was seen.
        assert b"/v1/models" in recorder.received
        assert any(str(recorder.port) in event for event in agent.events())
        before, events = len(recorder.received), len(agent.events())
        await chats(agent, kill=True)
        told = await agent.ended()
        assert agent.events()[events:] == []
        assert len(recorder.received) == before
        sides = [{side for side, _ in found} for name, found in told if name == "TextDone"]
        assert sides == [{"device"}, {"device"}]
        assert "SourceLost" in [name for name, _ in told], "the device's engine was not lost"


@pytest.mark.slow
async def test_without_it_the_same_watch_sees_the_request_leave(
    model_file: Callable[[str], Path], tmp_path: Path
) -> None:
    """What the test above looks at can be seen: the cloud answers, and the words cross."""
    path = model_file(MODEL)
    async with (
        coordinator() as recorder,
        watched_agent(path, tmp_path, recorder.port, "open") as agent,
    ):
        before = len(recorder.received)
        await chats(agent, kill=False)
        told = await agent.ended()
        assert len(recorder.received) > before + len(SECRET)
        assert all("cloud" in dict(found) for name, found in told if name == "TextDone")

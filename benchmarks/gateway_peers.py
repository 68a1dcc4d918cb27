"""The gateways that are measured side by side: how each is installed, started, asked and ended.

LiteLLM's proxy gets a virtual environment of its own, Portkey's gateway a folder of node modules, both under `build/`;
neither is a dependency of ours. Each runs one worker on one core.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from attrs import define, field, frozen

from protocol.errors import ConfigError

START_S = 90.0
INSTALL_S = 900
LITELLM, PORTKEY = "litellm", "portkey"
PORTKEY_PACKAGES = {
    "private": True,
    "dependencies": {"@portkey-ai/gateway": "1.15.2", "@hono/node-server": "1.14.1"},
    "overrides": {"@hono/node-server": "1.14.1"},
}
"""That gateway's own range takes a later server library, with which its streams fail ("immutable")."""

LITELLM_KEY = "sk-bench-0123456789"


@frozen
class Ask:
    """How a gateway is asked: port, and headers beside the content type."""

    port: int
    headers: Sequence[tuple[str, str]] = ()


@define
class Running:
    """A gateway's process. Times are CPU seconds of it and its children."""

    name: str
    process: asyncio.subprocess.Process
    ask: Ask
    _log: int = field(default=-1)

    def cpu_s(self) -> float:
        """CPU seconds used so far."""
        tick = os.sysconf("SC_CLK_TCK")
        total = 0.0
        for pid in family(self.process.pid):
            try:
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            total += (int(fields[11]) + int(fields[12])) / tick
        return total

    def rss_mb(self) -> float:
        """Resident memory now."""
        pages = 0
        for pid in family(self.process.pid):
            try:
                pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
            except OSError:
                continue
        return pages * os.sysconf("SC_PAGE_SIZE") / 1e6

    async def stop(self) -> None:
        """End it, its children too."""
        for pid in reversed(family(self.process.pid)):
            try:
                os.kill(pid, signal.SIGTERM)
            except ProcessLookupError:
                continue
        try:
            await asyncio.wait_for(self.process.wait(), 10.0)
        except TimeoutError:
            self.process.kill()
            await self.process.wait()


def family(pid: int) -> list[int]:
    """The process and its children, as far as /proc tells."""
    found = [pid]
    for one in found:
        try:
            found += [int(child) for child in Path(f"/proc/{one}/task/{one}/children").read_text().split()]
        except OSError:
            continue
    return found


def best_loop() -> str:
    """The event loop that ours runs on: uvloop where the extra `fast` is installed."""
    return "uvloop" if importlib.util.find_spec("uvloop") is not None else "asyncio"


async def start_ours(upstream: int, folder: Path, core: int) -> Running:
    """The gateway of this tree."""
    command = [sys.executable, "-m", "benchmarks.gateway_server", "--upstream", str(upstream)]
    command += ["--state-dir", str(folder), "--event-loop", best_loop()]
    process = await _spawn(command, core, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    line = (await asyncio.wait_for(process.stdout.readline(), START_S)).decode().split()
    if len(line) != 3:
        raise ConfigError("the gateway did not start", next_step="run python -m benchmarks.gateway_server by hand")
    return Running("ours", process, Ask(int(line[1]), (("authorization", f"Bearer {line[2]}"),)))


async def start_litellm(upstream: int, folder: Path, core: int, installed: Path) -> Running:
    """LiteLLM's proxy with a master key and one model; no database."""
    config = folder / "litellm.yaml"
    config.write_text(
        "model_list:\n  - model_name: fake\n    litellm_params:\n      model: openai/fake-there\n"
        f"      api_base: http://127.0.0.1:{upstream}/v1\n      api_key: sk-upstream\n"
    )
    port = free_port()
    program = installed / "bin" / "litellm"
    command = [str(program), "--config", str(config), "--host", "127.0.0.1", "--port", str(port), "--num_workers", "1"]
    process = await _spawn(command, core, environment={"LITELLM_MASTER_KEY": LITELLM_KEY, "LITELLM_LOG": "ERROR"})
    await _listening(process, port)
    return Running(LITELLM, process, Ask(port, (("authorization", f"Bearer {LITELLM_KEY}"),)))


async def start_portkey(upstream: int, folder: Path, core: int, installed: Path) -> Running:
    """Portkey's gateway; the target is named by headers."""
    port = free_port()
    program = installed / "node_modules" / "@portkey-ai" / "gateway" / "build" / "start-server.js"
    process = await _spawn(["node", str(program), f"--port={port}", "--headless"], core)
    await _listening(process, port)
    headers = (
        ("authorization", "Bearer sk-upstream"),
        ("x-portkey-provider", "openai"),
        ("x-portkey-custom-host", f"http://127.0.0.1:{upstream}/v1"),
    )
    return Running(PORTKEY, process, Ask(port, headers))


def installed_peers(folder: Path, *, install: bool) -> tuple[Mapping[str, Path], list[str]]:
    """Where the peers are, and why some are not. install: fetch those that are missing; else they are left out."""
    found: dict[str, Path] = {}
    notes: list[str] = []
    for name, there, make in (
        (LITELLM, folder / LITELLM / "bin" / "litellm", _install_litellm),
        (PORTKEY, folder / PORTKEY / "node_modules" / "@portkey-ai" / "gateway", _install_portkey),
    ):
        if not there.exists() and install:
            try:
                make(folder / name)
            except (OSError, subprocess.SubprocessError) as err:
                notes.append(f"{name} could not be installed: {str(err)[:200]}")
        if there.exists():
            found[name] = folder / name
        elif not any(note.startswith(name) for note in notes):
            notes.append(f"{name} is not in {folder}; a run without --quick installs it")
    return found, notes


def _install_litellm(folder: Path) -> None:
    python = shutil.which("python3", path="/usr/local/bin:/usr/bin:/bin") or sys.executable
    base = getattr(sys, "_base_executable", python) or python
    _run([base, "-m", "venv", str(folder)])
    _run([str(folder / "bin" / "pip"), "install", "-q", "litellm[proxy]"])


def _install_portkey(folder: Path) -> None:
    npm = shutil.which("npm")
    if npm is None:
        raise OSError("npm is not on this machine")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "package.json").write_text(json.dumps(PORTKEY_PACKAGES))
    _run([npm, "install", "--no-audit", "--no-fund"], folder)


def _run(command: list[str], folder: Path | None = None) -> None:
    subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=INSTALL_S)


async def _spawn(
    command: list[str],
    core: int,
    *,
    stdout: int = asyncio.subprocess.DEVNULL,
    environment: Mapping[str, str] | None = None,
) -> asyncio.subprocess.Process:
    """Start it on one core. Its output is dropped: a full pipe would stop it."""

    def pin() -> None:
        os.sched_setaffinity(0, {core})

    return await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=stdout,
        stderr=asyncio.subprocess.DEVNULL,
        env={**os.environ, **(environment or {})},
        preexec_fn=pin,
    )


async def _listening(process: asyncio.subprocess.Process, port: int) -> None:
    """Return when it answers on its port."""
    end_s = time.monotonic() + START_S
    while time.monotonic() < end_s and process.returncode is None:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            await asyncio.sleep(0.2)
            continue
        writer.close()
        return
    raise ConfigError(
        f"nothing listens on {port} after {START_S:g} s", next_step="start that gateway by hand to see why"
    )


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])

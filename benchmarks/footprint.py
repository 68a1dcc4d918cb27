"""What an idle agent costs: memory, start-up, CPU and disk writes, registered over a real mosquitto with mDNS on.

The coordinator, mosquitto and the agent are processes of their own. The agent has joined before, so what is measured is
a start as after a reboot. Memory is PSS: shared pages count by their share. A warm-up is left out.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from attrs import frozen

from benchmarks.report import arguments, publish, spread
from links.http import HttpLink
from protocol.errors import ConfigError, EngineError, LinkError

LOOPBACK = "127.0.0.1"
START_S = 60.0
STOP_S = 10.0
SAMPLE_S = 5.0
ROOT = Path(__file__).resolve().parent.parent


@frozen
class Lengths:
    """Seconds of warm-up and of measuring, and how many starts are timed."""

    warm_up_s: float
    measured_s: float
    starts: int


FULL = Lengths(60.0, 600.0, starts=5)
QUICK = Lengths(5.0, 15.0, starts=3)


@frozen
class Usage:
    """Counters of a process so far; cpu_s is user and system time."""

    at_s: float
    pss_mb: float
    cpu_s: float
    written_bytes: int


def usage(pid: int) -> Usage:
    """Read /proc of one process."""
    folder = Path("/proc") / str(pid)
    rollup = (folder / "smaps_rollup").read_text()
    pss_kb = next(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:"))
    fields = (folder / "stat").read_text().rsplit(")", 1)[1].split()
    ticks = int(fields[11]) + int(fields[12])
    io = dict(line.split(": ") for line in (folder / "io").read_text().splitlines())
    return Usage(time.monotonic(), pss_kb / 1024, ticks / os.sysconf("SC_CLK_TCK"), int(io["write_bytes"]))


def environment(folder: Path) -> dict[str, str]:
    """Ours, with compiled modules kept as in an installation: a fresh checkout would compile itself at each start."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**kept, "PYTHONPYCACHEPREFIX": str(folder / "compiled")}


@contextmanager
def running(name: str, command: list[str], folder: Path) -> Iterator[Any]:
    """A child in a process group of its own, ended in order and then by force."""
    with (folder / f"{name}.out").open("wb") as out, (folder / f"{name}.log").open("wb") as err:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=out, stderr=err, env=environment(folder), start_new_session=True
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def midstream(*arguments_: str) -> list[str]:
    """The command line of one verb."""
    return [sys.executable, "-m", "agent.cli.main", *arguments_]


def said(folder: Path, name: str, event: str, seconds: float = START_S) -> dict[str, Any]:
    """Wait for a JSON line of a child. Raises EngineError with the end of its log when it does not come."""
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        for line in (folder / f"{name}.out").read_text().splitlines():
            found = json.loads(line) if line.startswith("{") else {}
            if found.get("event") == event:
                return dict(found)
        time.sleep(0.05)
    tail = (folder / f"{name}.log").read_text(errors="replace")[-1500:]
    raise EngineError(f"the {name} did not say {event!r}:\n{tail}")


def free_port() -> int:
    """A port of loopback that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def mosquitto_command(folder: Path) -> list[str]:
    """The broker of the system, or the one that set-up unpacked."""
    unpacked = ROOT / ".setup" / "bin" / "mosquitto"
    found = shutil.which("mosquitto", path=os.environ.get("PATH", "") + ":/usr/sbin:/usr/local/sbin")
    if found is None and not unpacked.exists():
        raise ConfigError("mosquitto is not installed", next_step="run `make setup`")
    return [found or str(unpacked), "-c", str(folder / "mosquitto.conf")]


def start_fleet(stack: ExitStack, folder: Path) -> str:
    """mosquitto and a coordinator that uses it; returns the join string."""
    state, broker, port = folder / "coordinator", folder / "mosquitto", free_port()
    conf = ["mosquitto-conf", "--state-dir", str(state), "--out", str(broker), "--names", LOOPBACK]
    made = midstream("coordinator", *conf, "--listen", LOOPBACK, "--listen-port", str(port))
    subprocess.run(made, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    if os.getuid() == 0:  # mosquitto would give up root and then not see our folder
        with (broker / "mosquitto.conf").open("a") as file:
            file.write("user root\n")
    stack.enter_context(running("mosquitto", mosquitto_command(broker), folder))
    options = ["--json", "--state-dir", str(state), "--host", LOOPBACK, "--port", "0", "--addresses", LOOPBACK]
    options += ["--interfaces", LOOPBACK, "--broker", f"mqtts://{LOOPBACK}:{port}", "--no-cut", "--text-engine", "none"]
    stack.enter_context(running("coordinator", midstream("coordinator", *options), folder))
    said(folder, "coordinator", "announced")
    token = midstream("coordinator", "token", "--json", "--state-dir", str(state))
    made_token = subprocess.run(token, cwd=ROOT, check=True, stdout=subprocess.PIPE)
    return str(json.loads(made_token.stdout)["join"])


def agent_command(folder: Path, port: int) -> list[str]:
    """An agent without models."""
    options = ["--json", "--state-dir", str(folder / "agent"), "--models-dir", str(folder / "models")]
    return midstream("agent", *options, "--port", str(port), "--mdns-interfaces", LOOPBACK)


async def answered(port: int, started_s: float) -> float:
    """Seconds from `started_s` until the local API answers that it is healthy."""
    link = HttpLink("agent", f"http://{LOOPBACK}:{port}", connect_s=1.0)
    try:
        while time.monotonic() - started_s < START_S:
            try:
                reply = await link.exchange("/healthz", {}, b"", 1.0, method="GET")
                if reply.status == 200:
                    return time.monotonic() - started_s
            except LinkError:
                await asyncio.sleep(0.01)
    finally:
        await link.close()
    raise EngineError(f"the agent's API did not answer within {START_S:g} s")


def start_seconds(folder: Path, starts: int) -> list[float]:
    """Several starts, each until the API answers."""
    found = []
    for _ in range(starts):
        port = free_port()
        started_s = time.monotonic()
        with running("agent", agent_command(folder, port), folder):
            found.append(asyncio.run(answered(port, started_s)))
    return found


def observe(pid: int, lengths: Lengths) -> list[Usage]:
    """Samples after the warm-up."""
    print(f"warm-up {lengths.warm_up_s:g} s, then measuring {lengths.measured_s:g} s", flush=True)
    time.sleep(lengths.warm_up_s)
    samples = [usage(pid)]
    while samples[-1].at_s - samples[0].at_s < lengths.measured_s:
        time.sleep(min(SAMPLE_S, lengths.measured_s))
        samples.append(usage(pid))
    return samples


def measure(lengths: Lengths) -> tuple[dict[str, object], list[str]]:
    """The keys and notes of one run."""
    with tempfile.TemporaryDirectory(prefix="midstream-footprint-") as name, ExitStack() as stack:
        folder = Path(name)
        join = start_fleet(stack, folder)
        subprocess.run(
            midstream("join", join, "--state-dir", str(folder / "agent")),
            cwd=ROOT, check=True, stdout=subprocess.DEVNULL, env=environment(folder),
        )  # fmt: skip
        start_seconds(folder, 1)  # compiles what only the agent imports
        starts = start_seconds(folder, lengths.starts)
        port = free_port()
        agent = stack.enter_context(running("agent", agent_command(folder, port), folder))
        connected = said(folder, "agent", "connected")
        samples = observe(agent.pid, lengths)
        if agent.poll() is not None:
            raise EngineError("the agent ended during the measurement")
    first, last = samples[0], samples[-1]
    seconds = last.at_s - first.at_s
    pss = [s.pss_mb for s in samples]
    keys: dict[str, object] = {
        "pss_mb": max(pss),
        "ready_s": statistics.median(starts),
        "cpu_ratio": (last.cpu_s - first.cpu_s) / seconds,
        "written_bytes_per_h": (last.written_bytes - first.written_bytes) * 3600 / seconds,
        "ready_worst_s": max(starts),
        "measured_s": seconds,
    }
    return keys, [
        f"ready_s over {lengths.starts} starts: {spread(starts)}",
        f"connected by {connected['via']}",
        f"PSS {spread(pss)}",
    ]


def main() -> None:
    """Command line."""
    options = arguments("What an idle, registered agent costs.").parse_args()
    keys, notes = measure(QUICK if options.quick else FULL)
    few = f"a sample: {QUICK.measured_s:g} s, in which few timers are due; the figures are those of the full run"
    publish("footprint", keys, options.json, [few, *notes] if options.quick else notes)


if __name__ == "__main__":
    main()

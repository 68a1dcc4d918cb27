"""Fixtures for every lane: real models, a real broker, free ports, and a check that nothing is left running."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import inspect
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
from attrs import frozen
from hypothesis import settings

# How long an example takes says how busy the machine is; a test that hangs is ended by its time limit.
settings.register_profile("midstream", deadline=None)
settings.load_profile("midstream")

ROOT = Path(__file__).resolve().parent.parent
GRACE_S = 3.0
SLOW_TEST_S = 900.0
# Threads that libraries keep for the life of the process, by the beginning of their name.
LASTING_THREADS = ("pytest_timeout", "pytest-timeout", "MainThread", "asyncio_", "ThreadPoolExecutor", "execnet")


def _models_root() -> Path:
    return Path(os.environ.get("MIDSTREAM_MODELS") or Path.home() / ".cache" / "midstream" / "models")


@pytest.fixture(scope="session")
def model_file() -> Callable[[str], Path]:
    """A function from a catalogue name to the file of the real model; skips (fails in CI) when it was not pulled."""

    def find(name: str) -> Path:
        folder = _models_root() / name
        files = [f for f in folder.glob("*") if f.is_file() and f.name != "entry.json" and not f.name.startswith(".")]
        if not files:
            message = f"model {name} is not in {_models_root()}; run `make setup`"
            if os.environ.get("CI"):
                pytest.fail(message)
            pytest.skip(message)
        return max(files, key=lambda f: f.stat().st_size)

    return find


@pytest.fixture(scope="session")
def free_port() -> Callable[[], int]:
    """A function that names a TCP port of 127.0.0.1 that was free a moment ago."""

    def find() -> int:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            return int(s.getsockname()[1])

    return find


@frozen
class Broker:
    """A running mosquitto without TLS; `process` may be killed by a test, `restart()` starts it on the same port."""

    host: str
    port: int
    process: list[subprocess.Popen[bytes]]
    command: list[str]

    def kill(self) -> None:
        """End it without a goodbye."""
        self.process[-1].kill()
        self.process[-1].wait()

    def restart(self) -> None:
        """Start it again on the same port, with an empty store."""
        self.process.append(subprocess.Popen(self.command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
        wait_for_port(self.port)


def wait_for_port(port: int, seconds: float = 10.0) -> None:
    """Return when something listens on 127.0.0.1:port; fail the test after `seconds`."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.02)
    pytest.fail(f"nothing listens on port {port} after {seconds} s")


def make_environment(folder: Path) -> None:
    """A virtual environment of this Python with pip, also where the distribution has no ensurepip."""
    command = [str(ROOT / ".ci" / "setup.sh"), "venv", str(folder)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=240, env=os.environ | {"PYTHON": sys.executable}
    )
    assert done.returncode == 0, done.stdout + done.stderr


def mosquitto_binary() -> str:
    """The broker of the system or the one that `make setup` unpacked; skips (fails in CI) without one."""
    return _server_binary("mosquitto")


def _server_binary(name: str) -> str:
    unpacked = ROOT / ".setup" / "bin" / name
    found = shutil.which(name) or shutil.which(name, path="/usr/sbin:/usr/local/sbin")
    if found is None and unpacked.exists():
        found = str(unpacked)
    if found is None:
        message = f"{name} is not installed; run `make setup`"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)
    return found


@frozen
class RedisServer:
    """A running redis-server on a free port of 127.0.0.1 that keeps nothing on disk."""

    url: str
    process: subprocess.Popen[bytes]

    def kill(self) -> None:
        """End it without a goodbye."""
        self.process.kill()
        self.process.wait()


@pytest.fixture
def redis_server(tmp_path: Path, free_port: Callable[[], int]) -> Iterator[RedisServer]:
    """A real Redis for one test."""
    port = free_port()
    command = [
        _server_binary("redis-server"), "--port", str(port), "--bind", "127.0.0.1", "--save", "",
        "--dir", str(tmp_path),
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    server = RedisServer(f"redis://127.0.0.1:{port}/0", process)
    try:
        wait_for_port(port)
        yield server
    finally:
        server.kill()


@frozen
class PostgresServer:
    """A running PostgreSQL on a free port of 127.0.0.1, without fsync; its user is a superuser without a password."""

    port: int
    folder: Path
    command: list[str]
    user: str | None
    process: list[subprocess.Popen[bytes]]

    def url(self, database: str = "postgres") -> str:
        """Of a database; that one is always there."""
        return f"postgresql://midstream@127.0.0.1:{self.port}/{database}"

    def restart(self) -> None:
        """Start it (again) with the same data."""
        self.process.append(
            subprocess.Popen(
                self.command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, user=self.user, cwd="/"
            )
        )
        self._wait(20.0)

    def _wait(self, seconds: float) -> None:
        """It listens before it takes anybody in; its own file says when it does."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            with contextlib.suppress(OSError, IndexError):
                words = (self.folder / "postmaster.pid").read_text(encoding="ascii").split()
                if (words[0], words[-1]) == (str(self.process[-1].pid), "ready"):
                    return
            time.sleep(0.02)
        pytest.fail(f"PostgreSQL is not ready after {seconds} s")

    def kill(self) -> None:
        """End it at once; connections break."""
        self.process[-1].send_signal(signal.SIGQUIT)
        self.process[-1].wait(20)


@pytest.fixture(scope="session")
def postgres(free_port: Callable[[], int]) -> Iterator[PostgresServer]:
    """A real PostgreSQL for all tests; skips (fails in CI) without one. It refuses to run as root: `nobody` runs it."""
    with running_postgres(free_port()) as server:
        yield server


@contextlib.contextmanager
def running_postgres(port: int) -> Iterator[PostgresServer]:
    """One with data of its own. Skips as the fixture does."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda folder: int(folder.parent.name))
    folder = found[-1] if found else Path(_server_binary("initdb")).parent
    user = "nobody" if os.geteuid() == 0 else None
    place = Path(tempfile.mkdtemp(prefix="midstream-postgres-"))
    data = str(place / "data")
    command = [
        str(folder / "postgres"), "-D", data, "-p", str(port), "-c", "listen_addresses=127.0.0.1",
        "-c", "unix_socket_directories=", "-c", "fsync=off",
    ]  # fmt: skip
    server = PostgresServer(port, Path(data), command, user, [])
    try:
        if user is not None:
            shutil.chown(place, user)
        _init_postgres(str(folder / "initdb"), data, user)
        server.restart()
        yield server
    finally:
        for process in server.process:
            process.kill()
            process.wait()
        shutil.rmtree(place, ignore_errors=True)


def _init_postgres(initdb: str, data: str, user: str | None) -> None:
    command = [initdb, "-D", data, "-U", "midstream", "-A", "trust", "-E", "UTF8", "--locale=C", "-N"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, user=user, cwd="/")
    except PermissionError:
        pytest.skip(f"the user {user!r} cannot run {initdb}, and PostgreSQL refuses to run as root")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def mosquitto(tmp_path: Path, free_port: Callable[[], int]) -> Iterator[Broker]:
    """A real mosquitto on a free port of 127.0.0.1, anonymous, without persistence."""
    port = free_port()
    config = tmp_path / "mosquitto.conf"
    config.write_text(f"listener {port} 127.0.0.1\nallow_anonymous true\npersistence false\n")
    command = [mosquitto_binary(), "-c", str(config)]
    broker = Broker("127.0.0.1", port, [], command)
    broker.restart()
    yield broker
    for process in broker.process:
        process.kill()
        process.wait()


def _sockets() -> set[str]:
    found = set()
    for fd in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            target = str(fd.readlink())
            if target.startswith("socket:"):
                found.add(target)
    return found


def _describe(link: str) -> str:
    """The kernel's line about a socket, from its inode."""
    inode = link.removeprefix("socket:[").removesuffix("]")
    for table in ("tcp", "tcp6", "udp", "udp6", "unix"):
        for row in Path("/proc/net", table).read_text().splitlines():
            if inode in row.split():
                return f"{table} {' '.join(row.split()[:4])}"
    return f"inode {inode}, closed meanwhile or of another kind"


def _threads() -> set[threading.Thread]:
    return {t for t in threading.enumerate() if not t.name.startswith(LASTING_THREADS)}


@pytest.fixture(autouse=True)
def nothing_lingers() -> Iterator[None]:
    """Fail the test that leaves a thread or a socket behind."""
    threads, sockets = _threads(), _sockets()
    yield
    end = time.monotonic() + GRACE_S
    while time.monotonic() < end and (_threads() - threads or _sockets() - sockets):
        time.sleep(0.02)
    left_threads = {t.name for t in _threads() - threads}
    left_sockets = _sockets() - sockets
    assert not left_threads, f"the test left threads running: {sorted(left_threads)}"
    assert not left_sockets, f"the test left sockets open: {[_describe(one) for one in left_sockets]}"


@pytest.fixture
async def no_lingering_tasks() -> AsyncIterator[None]:
    """Fail the test that leaves an asyncio task running."""
    before = asyncio.all_tasks()
    yield
    end = time.monotonic() + GRACE_S
    while time.monotonic() < end and _left(before):
        await asyncio.sleep(0.01)
    left = [t.get_name() + " " + repr(t.get_coro()) for t in _left(before)]
    assert not left, f"the test left tasks running: {left}"


def _left(before: set[asyncio.Task[object]]) -> set[asyncio.Task[object]]:
    return {t for t in asyncio.all_tasks() - before if not t.done() and t is not asyncio.current_task()}


NEEDS_LLAMA_CPP = pytest.mark.skip(
    reason="llama-cpp-python is not installed (built from source by its own lane of .ci/run, or "
    "`pip install -r requirements/llama-native.lock`)"
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give every asynchronous test the task check, before its other fixtures so that it is torn down last.

    Skip what needs llama-cpp-python where it is not installed: tests marked `llama_native` and the variants named
    after it. A slow test gets a timeout that only catches what hangs.
    """
    without_llama_cpp = importlib.util.find_spec("llama_cpp") is None
    for item in items:
        named = "llama-cpp" in item.nodeid or item.get_closest_marker("llama_native") is not None
        if named and without_llama_cpp:
            item.add_marker(NEEDS_LLAMA_CPP)
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.timeout(SLOW_TEST_S), append=False)
        if isinstance(item, pytest.Function) and inspect.iscoroutinefunction(item.obj):
            item.fixturenames.insert(0, "no_lingering_tasks")

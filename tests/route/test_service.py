"""The agent as its service manager sees it: a real process under a fake NOTIFY_SOCKET."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.unit.agent.managers import FakeManager

ROOT = Path(__file__).resolve().parents[2]


class Supervised:
    """`midstream agent` with a manager; the state folder and the configuration are the test's own."""

    def __init__(self, folder: Path, address: str, config: str, *, period_us: int = 2_000_000, **env: str) -> None:
        self.manager = FakeManager(address)
        self.file = folder / "agent.toml"
        self.file.write_text(config)
        clean = {k: v for k, v in os.environ.items() if not k.startswith("MIDSTREAM_")}
        clean |= {"HOME": str(folder), "NOTIFY_SOCKET": address, "WATCHDOG_USEC": str(period_us), **env}
        command = [sys.executable, "-m", "agent.cli.main", "agent", "--config", str(self.file), "--port", "0"]
        command += ["--state-dir", str(folder / "state"), "--mdns", "no", "--benchmark", "no"]
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=clean, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.communicate()
        self.manager.close()


Start = Callable[..., Supervised]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    running: list[Supervised] = []

    def begin(config: str = "", address: str | None = None, **more: str) -> Supervised:
        running.append(Supervised(tmp_path, address or str(tmp_path / "notify"), config, **more))
        return running[-1]

    yield begin
    for agent in running:
        agent.end()


def test_ready_before_models_then_status_watchdog_and_stopping(
    start: Start, model_file: Callable[[str], Path], tmp_path: Path
) -> None:
    models = model_file("ppocr-v2-cls").parent.parent
    agent = start(f'models_dir = "{models}"\ntensor_models = ["ppocr-v2-cls"]\n')
    ready = agent.manager.until(lambda m: "READY" in m, 30)
    assert "loading tensor models" in ready["STATUS"], ready
    assert {"EXTEND_TIMEOUT_USEC"} <= {key for message in agent.manager.seen for key in message}
    served = agent.manager.until_status("models: ppocr-v2-cls", 30)
    assert "loading" not in served["STATUS"]
    assert "this device has not joined a fleet" in served["STATUS"]
    for _ in range(3):
        agent.manager.until_fed()
    agent.signal(signal.SIGTERM)
    agent.manager.until(lambda m: "STOPPING" in m, 20)
    assert agent.process.wait(20) == 0


def test_an_abstract_socket_is_told_too(start: Start) -> None:
    agent = start(address=f"@midstream-test-{secrets.token_hex(8)}")
    agent.manager.until(lambda m: "READY" in m, 30)
    agent.manager.until_fed()


def test_reload_takes_what_it_can_and_says_the_rest(start: Start) -> None:
    agent = start('log_level = "info"\n')
    agent.manager.until(lambda m: "READY" in m, 30)
    agent.file.write_text('log_level = "debug"\ntensor_threads = 1\n')
    agent.signal(signal.SIGHUP)
    assert int(agent.manager.until(lambda m: "RELOADING" in m)["MONOTONIC_USEC"]) > 0
    ready = agent.manager.until(lambda m: "READY" in m)
    assert "in force now: log_level; at the next start: tensor_threads" in ready["STATUS"]
    agent.file.write_text("log_level = [\n")
    agent.signal(signal.SIGHUP)
    ready = agent.manager.until(lambda m: "READY" in m)
    assert "the old configuration stays" in ready["STATUS"]
    agent.manager.until_status("the configuration was not taken", 30)
    agent.manager.until_fed()
    assert agent.process.poll() is None


def test_neither_network_nor_broker_nor_coordinator_ends_it(start: Start) -> None:
    """Addresses where nobody listens: it serves, says so and is fed."""
    agent = start('coordinator = "127.0.0.1:1"\nbroker = "127.0.0.1:1"\n', MIDSTREAM_JOIN_TOKEN="not-a-token")
    assert agent.process.poll() is None
    agent.manager.until(lambda m: "READY" in m, 30)
    for _ in range(4):
        agent.manager.until_fed()
    assert agent.process.poll() is None


def test_a_configuration_that_cannot_be_used_ends_with_2_and_no_ready(start: Start) -> None:
    agent = start("no_such_setting = 1\n")
    assert agent.process.wait(30) == 2
    while agent.manager.read(0.2) is not None:
        pass
    assert not [message for message in agent.manager.seen if "READY" in message]

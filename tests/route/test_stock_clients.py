"""Unmodified clients of other makers at both front doors, with a real GGUF model behind each; every client in an
environment of its own, so that none of them is a dependency of ours."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
from attrs import frozen

from cloud_stub.compose import CoordinatorHouse
from tests.conftest import ROOT, make_environment
from tests.route.coordinator_house import settings
from tests.unit.agent.houses import RunningHouse, config_for

TEXT = "smollm2-135m"
HERE = Path(__file__).parent
PACKAGES = (
    "anthropic>=2.14,<3", "ollama>=0.6,<0.7", "langchain-openai>=1.7,<2", "llama-index-llms-openai-like>=0.8,<0.9",
    "llama-index-embeddings-openai-like>=0.4,<0.5",
)  # fmt: skip
NODE_PACKAGE = "openai@^6.49"
PLACE = ROOT / ".setup" / "clients"
T = TypeVar("T")

pytestmark = pytest.mark.slow  # the first run installs the clients


@frozen
class Doors:
    """The agent on loopback, and the coordinator behind its guard. `arguments`: URL and key of each."""

    agent_url: str
    coordinator_url: str
    key: str
    ca_file: Path

    @property
    def arguments(self) -> list[str]:
        return [self.agent_url, "loopback-asks-for-none", self.coordinator_url, self.key]


def _installed(what: str, install: Callable[[], None]) -> None:
    """`install` once, kept beside the tests' other tools."""
    done = PLACE / ".installed"
    before = done.read_text().splitlines() if done.is_file() else []
    if what not in before:
        install()
        done.write_text("\n".join([*before, what]))


def clients_python() -> Path:
    """The Python of an environment with all clients."""

    def install() -> None:
        shutil.rmtree(PLACE, ignore_errors=True)
        make_environment(PLACE)
        subprocess.run([PLACE / "bin" / "python", "-m", "pip", "install", "-q", *PACKAGES], check=True, timeout=540)

    _installed(" ".join(PACKAGES), install)
    return PLACE / "bin" / "python"


def node_folder() -> Path:
    """A folder with the package for Node; skips where there is no Node."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("node and npm are not installed")
    clients_python()

    def install() -> None:
        command = ["npm", "install", "--prefix", str(PLACE / "node"), "--no-audit", "--no-fund", NODE_PACKAGE]
        subprocess.run(command, check=True, timeout=300, stdout=subprocess.DEVNULL)

    _installed(NODE_PACKAGE, install)
    return PLACE / "node"


@pytest.fixture(scope="module")
def doors(model_file: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Doors]:
    """Both houses on a loop of their own thread; they do not know each other."""
    folder, models_dir = tmp_path_factory.mktemp("doors"), model_file(TEXT).parent.parent
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="houses under test")
    thread.start()

    def on(work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, loop).result(120)

    async def start() -> tuple[RunningHouse, CoordinatorHouse]:
        agent = RunningHouse(
            config_for(folder, models_dir=str(models_dir), text_model=TEXT, text_threads=1, context_tokens=1024)
        )
        await agent.__aenter__()
        await agent.until(lambda: agent.house.texts.settled.is_set(), 60)
        coordinator = CoordinatorHouse(
            settings(
                folder,
                models_dir=models_dir,
                models=(TEXT,),
                cut=False,
                text_engine="llama_server",
                text_threads=1,
                text_context_tokens=1024,
            ),
            lambda record: None,
        )
        await coordinator.start()
        await coordinator.text.engine_for(TEXT).capabilities()
        return agent, coordinator

    async def stop(agent: RunningHouse, coordinator: CoordinatorHouse) -> None:
        await agent.__aexit__()
        await coordinator.stop()
        await loop.shutdown_default_executor()

    agent, coordinator = on(start())
    try:
        key = coordinator.authority.new_client_key
        assert key is not None
        ca_file = folder / "ca.pem"
        ca_file.write_text(coordinator.authority.ca_pem)
        yield Doors(agent.house.url, f"https://127.0.0.1:{coordinator.port}", key, ca_file)
    finally:
        on(stop(agent, coordinator))
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def run(command: list[str | Path], home: Path, **environment: str) -> str:
    path = "/usr/local/bin:/usr/bin:/bin"
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=300, cwd=home,
        env={"PATH": path, "HOME": str(home), **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    return done.stdout


@pytest.mark.parametrize("client", ["anthropic", "ollama", "langchain", "llama_index"])
def test_python_clients(client: str, doors: Doors, tmp_path: Path) -> None:
    """A conversation, a stream, tools and embeddings at both front doors."""
    command = [clients_python(), HERE / "stock_clients.py", client, TEXT, *doors.arguments]
    told = run(command, tmp_path, SSL_CERT_FILE=str(doors.ca_file)).splitlines()
    assert [json.loads(line)["url"] for line in told] == [doors.agent_url, doors.coordinator_url]


def test_node_client(doors: Doors, tmp_path: Path) -> None:
    """The openai package for Node: the same at both front doors."""
    script = node_folder() / "stock_client.mjs"
    shutil.copy(HERE / script.name, script)
    for url, key in ((doors.agent_url, "none"), (doors.coordinator_url, doors.key)):
        told = run(["node", script, TEXT, url, key], tmp_path, NODE_EXTRA_CA_CERTS=str(doors.ca_file))
        assert json.loads(told) == {"client": "openai-node"}

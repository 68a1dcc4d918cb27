"""Start, stop and everything that can go wrong with them, seen by the program that the agent is in."""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from agent.embed import EmbeddedAgent
from agent.fakes_host import FakeHost, MemorySecrets
from engines.fakes_text import FakeTextEngine
from engines.registry import ImportGuard, Unguarded, import_native, use_guard
from protocol.errors import ConfigError, EngineError
from tests.unit.agent.houses import config_for


@pytest.fixture(autouse=True)
def guarded_again() -> Any:
    """A guest turns off the trial imports of its process; other tests of this one want them."""
    yield
    use_guard(ImportGuard())


def test_commands_to_an_agent_that_does_not_run_say_so(tmp_path: Path) -> None:
    agent = EmbeddedAgent(config_for(tmp_path))
    for command in (agent.wait_ready, agent.pause, agent.resume, agent.status):
        with pytest.raises(EngineError, match="does not run"):
            command()
    agent.stop()
    assert agent.state == "stopped"


def test_what_prevents_a_start_is_raised_to_the_caller_and_the_next_start_works(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        agent = EmbeddedAgent(config_for(tmp_path, port=taken.getsockname()[1]))
        agent.start()
        with pytest.raises(ConfigError, match="in use"):
            agent.wait_ready()
        with pytest.raises(ConfigError, match="in use"):
            agent.pause()
        assert agent.state == "failed"
    agent.start()
    assert agent.wait_ready().startswith("http://127.0.0.1:")
    assert agent.state == "ready"
    agent.stop()
    with pytest.raises(EngineError, match="does not run"):
        agent.wait_ready()


def test_a_state_folder_has_one_agent(tmp_path: Path) -> None:
    with EmbeddedAgent(config_for(tmp_path)):
        other = EmbeddedAgent(config_for(tmp_path))
        other.start()
        with pytest.raises(ConfigError, match="another agent"):
            other.wait_ready()
        other.stop()


def test_a_stop_right_after_the_start_ends_it_in_order(tmp_path: Path) -> None:
    agent = EmbeddedAgent(config_for(tmp_path))
    for _ in range(3):
        agent.start()
        agent.stop()
    assert agent.state == "stopped"


def test_many_threads_may_start_and_stop_it(tmp_path: Path) -> None:
    agent = EmbeddedAgent(config_for(tmp_path))
    seen: list[BaseException] = []

    def use() -> None:
        try:
            for _ in range(3):
                agent.start()
                agent.stop()
        except BaseException as err:  # noqa: BLE001 - shown by the test
            seen.append(err)

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    agent.stop()
    assert (seen, agent.state) == ([], "stopped")


class SlowToLeave(FakeHost):
    """A host that takes its time when the agent stops following it."""

    def __init__(self) -> None:
        super().__init__()
        self.leaves = threading.Event()

    def watch(self, on_change: Callable[[], None]) -> Callable[[], None]:
        stop = super().watch(on_change)

        def slowly() -> None:
            self.leaves.set()
            time.sleep(0.5)
            stop()

        return slowly


def test_a_start_during_a_stop_is_not_lost(tmp_path: Path) -> None:
    host = SlowToLeave()
    agent = EmbeddedAgent(config_for(tmp_path), host)
    agent.start()
    agent.wait_ready()
    _until(lambda: host.watchers == 1)
    stopping = threading.Thread(target=agent.stop)
    stopping.start()
    assert host.leaves.wait(10)
    agent.start()
    stopping.join()
    assert agent.wait_ready().startswith("http://127.0.0.1:")
    assert agent.state == "ready"
    agent.stop()


def test_its_own_thread_may_not_wait_for_it_and_a_listener_with_a_bug_harms_nobody(tmp_path: Path) -> None:
    said: list[str] = []
    errors: list[BaseException] = []

    def say(name: str, text: str, facts: Mapping[str, Any]) -> None:
        said.append(name)
        try:
            agent.stop()
        except RuntimeError as err:
            errors.append(err)
            raise

    agent = EmbeddedAgent(config_for(tmp_path), say=say)
    with agent:
        assert agent.status()["life"]["serving"] == "ready"
    assert said == ["ready"]
    assert "wait for itself" in str(errors[0])


def test_a_paused_agent_is_idempotent_and_stops(tmp_path: Path) -> None:
    host = FakeHost(secrets=MemorySecrets())
    agent = EmbeddedAgent(config_for(tmp_path), host)
    with agent:
        agent.resume()
        for _ in range(2):
            agent.pause()
        assert agent.state == "paused"
        assert agent.status()["life"]["serving"] == "paused"
        host.change(idle=True)
        _until(lambda: agent.status()["paused"] == ["host", "idle"])
        agent.resume()
        assert (agent.state, agent.status()["paused"]) == ("ready", ["idle"])
        host.change(idle=False)
        _until(lambda: agent.status()["paused"] == [])
        agent.pause(drain=False)
        assert agent.state == "ready"
        agent.pause()
    assert agent.state == "stopped"
    assert sum(1 if on else -1 for name, on in host.calls if name == "hold_awake") == 0


def test_an_engine_that_needs_a_child_process_is_refused_with_another_way(tmp_path: Path) -> None:
    models = str(tmp_path / "models")
    config = config_for(tmp_path, models_dir=models, text_model="smollm2-135m", text_engine="llama_server")
    with EmbeddedAgent(config) as agent:
        _until(lambda: any(w["name"] == "text_model" for w in agent.status()["warnings"]))
        (warning,) = [w for w in agent.status()["warnings"] if w["name"] == "text_model"]
        assert "child process" in warning["text"]
        assert "openai_compat" in warning["next_step"]


def test_the_text_engine_of_the_host_answers(tmp_path: Path) -> None:
    host = FakeHost(engines={"words": FakeTextEngine()})
    with EmbeddedAgent(config_for(tmp_path, text_model="words"), host) as agent:
        url = agent.wait_ready()
        _until(lambda: agent.status()["text_model"] == "words")
        body = {"model": "words", "prompt": "river", "max_tokens": 5}
        request = urllib.request.Request(
            f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=10) as reply:
            found = json.loads(reply.read())
    assert found["usage"]["completion_tokens"] == 5
    assert found["choices"][0]["text"]


def test_a_host_that_fails_everywhere_still_has_a_serving_agent(tmp_path: Path) -> None:
    calls = {"state", "watch", "hold_awake", "hold_multicast", "browse", "runtimes", "text_engine"}
    with EmbeddedAgent(config_for(tmp_path, text_model="words"), FakeHost(failing=frozenset(calls))) as agent:
        assert agent.status()["life"]["serving"] == "ready"
        agent.pause()
        agent.resume()
        assert agent.state == "ready"


def test_a_guest_imports_libraries_without_a_trial_in_a_child_process() -> None:
    use_guard(Unguarded())
    assert import_native("colorsys", extra="nothing") is sys.modules["colorsys"]
    with pytest.raises(EngineError, match="cannot be imported"):
        import_native("no_such_library_here", extra="it")


def _until(condition: Any, seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.02)

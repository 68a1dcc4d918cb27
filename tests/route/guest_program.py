"""A program with an agent inside, in a world like Android's: run as a process of its own by test_embedded.

Nothing here may be imported by a test. Signals, child processes and the libraries that Android has no wheels of are
taken away before the first import of ours. It prints one JSON object per line and waits for a line after each.
"""

from __future__ import annotations

import importlib.abc
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from typing import Any

ABSENT = frozenset(
    {
        "zeroconf",
        "numpy",
        "psutil",
        "cryptography",
        "onnxruntime",
        "xllamacpp",
        "llama_cpp",
        "pydantic",
        "pydantic_core",
    }
    | {"msgpack", "orjson", "multiprocessing", "ai_edge_litert", "tflite_runtime", "PIL", "aiortc", "uvloop"}
)
SPAWNING = frozenset(
    {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.exec", "os.spawn", "os.system", "pty.spawn"}
)
asked_for: set[str] = set()
broken_rules: list[str] = []


class Without(importlib.abc.MetaPathFinder):
    """A finder that does not find what is not installed."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> Any:
        if name.split(".")[0] in ABSENT:
            asked_for.add(name)
            return None
        return self._inner.find_spec(name, path, target)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def forbidden(name: str) -> Callable[..., Any]:
    def refuse(*args: Any, **options: Any) -> Any:
        broken_rules.append(name)
        raise RuntimeError(f"{name} is not allowed in this program")

    return refuse


def watch(event: str, args: tuple[Any, ...]) -> None:
    if event in SPAWNING:
        forbidden(event)()


def take_away() -> None:
    """Before the first import of ours."""
    sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
    for name in ("signal", "set_wakeup_fd", "siginterrupt", "setitimer", "alarm", "pthread_kill", "raise_signal"):
        setattr(signal, name, forbidden(f"signal.{name}"))
    for name in ("fork", "forkpty", "posix_spawn", "posix_spawnp", "system", "popen", "kill"):
        setattr(os, name, forbidden(f"os.{name}"))
    for name in ("Popen", "run", "call", "check_call", "check_output"):
        setattr(subprocess, name, forbidden(f"subprocess.{name}"))
    sys.addaudithook(watch)


def tell(name: str, **facts: Any) -> None:
    """Say how far we are and wait for the word to go on."""
    print(json.dumps({"at": name, **facts}), flush=True)
    if sys.stdin.readline().strip() != "go":
        raise SystemExit("the test has gone")


def until(what: str, condition: Callable[[], Any], seconds: float = 30.0) -> Any:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found = condition()
        if found:
            return found
        time.sleep(0.05)
    raise SystemExit(f"no {what} within {seconds} s")


def post(url: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as err:
        return err.code, json.loads(err.read())


def double(url: str) -> tuple[int, dict[str, Any]]:
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1.0, 2.0, 3.0, -4.5]}
    return post(f"{url}/v2/models/double/infer", {"inputs": [tensor]})


def chat(url: str, model: str) -> tuple[int, dict[str, Any]]:
    message = {"role": "user", "content": "Name a river."}
    asked = {"model": model, "messages": [message], "max_tokens": 8, "temperature": 0}
    return post(f"{url}/v1/chat/completions", asked)


def life(number: int, settings: dict[str, Any], host: Any) -> None:
    """Start to stop, once."""
    from agent.config import load
    from agent.embed import EmbeddedAgent

    agent = EmbeddedAgent(load(settings["agent"], environ={}), host)
    agent.start()
    agent.start()
    url = agent.wait_ready(30)
    until("connection", lambda: agent.status()["life"]["connected"] == "connected")
    tell("connected", life=number, device_id=agent.status()["device_id"])
    wanted = settings["policy_version"]
    until("policy", lambda: agent.status()["policy"]["version"] >= wanted)
    until("model in the cloud", lambda: agent.status()["text_model"])
    tell("answered", tensor=double(url), text=chat(url, settings["text_model"]), status=dict(agent.status()))
    agent.pause()
    agent.pause()
    tell("paused", state=agent.state, tensor=double(url), awake=awake(host))
    agent.resume()
    until("connection", lambda: agent.status()["life"]["connected"] == "connected")
    until("model in the cloud", lambda: agent.status()["cloud_available"] and agent.status()["text_model"])
    tell("resumed", state=agent.state, tensor=double(url), text=chat(url, settings["text_model"]))
    host.change(idle=True)
    until("sleep", lambda: agent.status()["paused"] == ["idle"])
    tell("idle", state=agent.state, tensor=double(url))
    host.change(idle=False)
    until("connection", lambda: agent.status()["life"]["connected"] == "connected")
    agent.stop()
    agent.stop()
    tell("stopped", state=agent.state, threads=[t.name for t in threading.enumerate()], watchers=host.watchers)


def awake(host: Any) -> int:
    """Wake locks taken and not left."""
    return sum(1 if on else -1 for name, on in host.calls if name == "hold_awake")


def main() -> None:
    settings = json.loads(sys.argv[1])
    take_away()
    from agent.fakes_host import FakeHost, MemorySecrets
    from agent.host_bridge import HostState
    from engines.fakes_tensor import FakeTensorRuntime

    state = HostState(network="wifi", battery_ratio=0.5, charging=False)
    host = FakeHost(state, secrets=MemorySecrets(), runtimes={"tflite": FakeTensorRuntime()})
    errors: list[BaseException] = []

    def work() -> None:
        try:
            for number in (1, 2):
                life(number, settings, host)
        except BaseException as err:  # noqa: BLE001 - raised again in the main thread
            errors.append(err)

    worker = threading.Thread(target=work, name="worker of the host")
    worker.start()
    worker.join()
    if errors:
        raise errors[0]
    loaded = sorted(name for name in sys.modules if name.split(".")[0] in ABSENT)
    tell("over", broken_rules=broken_rules, loaded=loaded, asked_for=sorted(asked_for), secrets=list(host.secrets.held))


if __name__ == "__main__":
    main()

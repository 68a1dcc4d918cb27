"""What AgentService.kt calls, always from the same worker thread: start, pause, resume, stop."""

from __future__ import annotations

import logging
from typing import Any

from agent.config import load
from agent.embed import EmbeddedAgent
from midstream_host.bridge import PhoneHost, ToJava, java_arrays

PORT = 8790

_agent: EmbeddedAgent | None = None


def start(phone: Any, state_dir: str, models_dir: str, join_token: str, to_java: ToJava = java_arrays) -> str:
    """The URL of the local API. A second call finds the running agent. Raises with the next step in its text."""
    global _agent
    if _agent is None:
        logging.basicConfig(level=logging.INFO)
        settings = {"state_dir": state_dir, "models_dir": models_dir, "port": PORT, "join_token": join_token or None}
        _agent = EmbeddedAgent(load(settings, environ={"HOME": state_dir}), PhoneHost(phone, to_java))
    _agent.start()
    return _agent.wait_ready()


def pause() -> None:
    """Sleep: the fleet is told, apps get 503."""
    if _agent is not None:
        _agent.pause()


def resume() -> None:
    """Wake."""
    if _agent is not None:
        _agent.resume()


def stop() -> None:
    """End in order; the next start begins anew."""
    global _agent
    agent, _agent = _agent, None
    if agent is not None:
        agent.stop()

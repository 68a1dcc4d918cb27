"""What AgentService.kt calls: start, pause, resume, stop. One at a time in this process, whoever calls.

Android may begin the next service while the one before is still ending; both find this module.
"""

from __future__ import annotations

import logging
import threading
from typing import Any

from agent.config import load
from agent.embed import EmbeddedAgent
from midstream_host.bridge import PhoneHost, ToJava, java_arrays

PORT = 8790

_lock = threading.Lock()
_agent: EmbeddedAgent | None = None
_ending = False
"""It was told to stop and has not: its phone is the one of a service that has gone."""


def start(phone: Any, state_dir: str, models_dir: str, join_token: str, to_java: ToJava = java_arrays) -> str:
    """The URL of the local API. A second call finds the running agent. Raises with the next step in its text."""
    global _agent
    with _lock:
        if _ending:
            _end()
        if _agent is None:
            logging.basicConfig(level=logging.INFO)
            token = join_token or None
            settings = {"state_dir": state_dir, "models_dir": models_dir, "port": PORT, "join_token": token}
            _agent = EmbeddedAgent(load(settings, environ={"HOME": state_dir}), PhoneHost(phone, to_java))
        _agent.start()
        return _agent.wait_ready()


def pause() -> None:
    """Sleep: the fleet is told, apps get 503."""
    with _lock:
        if _agent is not None:
            _agent.pause()


def resume() -> None:
    """Wake."""
    with _lock:
        if _agent is not None:
            _agent.resume()


def stop() -> None:
    """End in order; the next start begins anew. Raises TimeoutError; the next start or stop then waits again."""
    with _lock:
        _end()


def _end() -> None:
    global _agent, _ending
    if _agent is None:
        return
    _ending = True
    _agent.stop()
    _agent, _ending = None, False

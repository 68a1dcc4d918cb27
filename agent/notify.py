"""The service manager's notification protocol (sd_notify(3)): datagrams of KEY=VALUE lines to NOTIFY_SOCKET.

No library is needed: systemd documents the protocol as stable, and other managers speak it too. Nothing here raises: a
manager that is gone must not take the agent along.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Mapping, MutableMapping

log = logging.getLogger("midstream.agent.service")

MAX_STATUS_BYTES = 512
SEND_S = 1.0
"""A manager that is busy has a full queue of datagrams; READY must not be lost for that."""


class Notifier:
    """Tells the manager of one process. Every method may be called from any thread.

    Args:
        address: as in NOTIFY_SOCKET: an absolute path, or `@name` for an abstract socket.
    """

    def __init__(self, address: str) -> None:
        self._address = b"\0" + os.fsencode(address[1:]) if address.startswith("@") else os.fsencode(address)

    def ready(self, status: str) -> None:
        """The local API answers; also the end of a reload."""
        self._send("READY=1", _status(status))

    def status(self, text: str) -> None:
        """One line for `systemctl status`."""
        self._send(_status(text))

    def stopping(self, status: str) -> None:
        """The way to the end has begun."""
        self._send("STOPPING=1", _status(status))

    def reloading(self) -> None:
        """The configuration is read anew; the time lets the manager tell this from an older READY."""
        self._send("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def extend(self, seconds: float) -> None:
        """This start or stop may take `seconds` more from now on."""
        self._send(f"EXTEND_TIMEOUT_USEC={round(seconds * 1e6)}")

    def feed(self) -> None:
        """All is alive."""
        self._send("WATCHDOG=1")

    def _send(self, *lines: str) -> None:
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as out:
                out.settimeout(SEND_S)
                out.sendto("\n".join(lines).encode(), self._address)
        except OSError as err:
            log.debug("the service manager was not told %s: %s", lines[0], err)


def notifier_from(environ: MutableMapping[str, str]) -> Notifier | None:
    """The manager that started this process, or None. Takes the variable out, for it is not for child processes."""
    address = environ.pop("NOTIFY_SOCKET", "")
    if address.startswith(("/", "@")) and len(address) > 1:
        return Notifier(address)
    if address:
        log.warning("NOTIFY_SOCKET=%s is of a kind that is not supported; the manager is told nothing", address)
    return None


def watchdog_s(environ: Mapping[str, str], pid: int) -> float | None:
    """Seconds within which the manager wants to be fed, None when it does not watch this process."""
    text = environ.get("WATCHDOG_USEC", "")
    if not text.isdecimal() or int(text) == 0 or environ.get("WATCHDOG_PID", str(pid)) != str(pid):
        return None
    return int(text) / 1e6


def _status(text: str) -> str:
    line = " ".join(text.split()).encode()[:MAX_STATUS_BYTES]
    return "STATUS=" + line.decode(errors="ignore")

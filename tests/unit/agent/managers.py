"""A service manager for tests: a datagram socket, and what came on it."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from pathlib import Path

Message = dict[str, str]


class FakeManager:
    """Listens at `address`; reading blocks, so that a test on the event loop can hold the loop by reading."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.seen: list[Message] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind("\0" + address[1:] if address.startswith("@") else address)

    @classmethod
    def at(cls, folder: Path) -> FakeManager:
        """On a socket file, whose path must be short."""
        return cls(str(folder / "notify"))

    def read(self, seconds: float) -> Message | None:
        """The next message, None when none comes in time."""
        self._socket.settimeout(seconds)
        try:
            text = self._socket.recv(4096).decode()
        except TimeoutError:
            return None
        message = dict(line.split("=", 1) for line in text.splitlines())
        self.seen.append(message)
        return message

    def until(self, wanted: Callable[[Message], bool], seconds: float = 20.0) -> Message:
        """Read on until a message is as `wanted`; AssertionError when none comes in time."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            message = self.read(max(0.01, end - time.monotonic()))
            if message is not None and wanted(message):
                return message
        raise AssertionError(f"not told in {seconds} s; last heard: {self.seen[-5:]}")

    def until_status(self, part: str, seconds: float = 20.0) -> Message:
        return self.until(lambda m: part in m.get("STATUS", ""), seconds)

    def until_fed(self, seconds: float = 20.0) -> Message:
        return self.until(lambda m: "WATCHDOG" in m, seconds)

    def fed_within(self, seconds: float) -> bool:
        """Whether a WATCHDOG comes in the next seconds."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            message = self.read(left)
            if message is not None and "WATCHDOG" in message:
                return True
        return False

    def close(self) -> None:
        self._socket.close()

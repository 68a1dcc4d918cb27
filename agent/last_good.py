"""The address that worked last, kept on disk and written only when it changes."""

from __future__ import annotations

import logging
from pathlib import Path

from attrs import frozen

from agent.discovery import Candidate
from protocol.decode import decode, encode
from protocol.durable import read_durable, write_durable
from protocol.errors import MidstreamError

log = logging.getLogger("midstream.agent.discovery")

MAX_BYTES = 4096


@frozen
class Remembered:
    """last_good.json."""

    host: str
    port: int
    broker_port: int | None = None


class LastGood:
    """One small file; losing it costs a search."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._held = read_durable(path, _parse)

    def read(self) -> Candidate | None:
        """The remembered candidate; None when there is none or the file is damaged."""
        return self._held

    def write(self, found: Candidate) -> None:
        """Remember `found`; a full disk is logged, for the device works without."""
        if self._held and (self._held.host, self._held.port, self._held.broker_port) == (
            found.host, found.port, found.broker_port,
        ):  # fmt: skip
            return
        self._held = Candidate(found.host, found.port, "last_good", found.broker_port)
        try:
            write_durable(self._path, encode(Remembered(found.host, found.port, found.broker_port)))
        except MidstreamError as err:
            log.warning("the coordinator's address was not remembered: %s", err)


def _parse(data: bytes) -> Candidate:
    found = decode(Remembered, data, what="last_good.json", max_bytes=MAX_BYTES)
    return Candidate(found.host, found.port, "last_good", found.broker_port)

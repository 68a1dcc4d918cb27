"""The session epoch: grows with every control session, so that a late will is told from the birth after it."""

from __future__ import annotations

import logging
from pathlib import Path

from protocol.durable import read_durable, write_durable
from protocol.errors import MidstreamError

log = logging.getLogger("midstream.agent.control")


def next_epoch(path: Path) -> int:
    """One more than the last, remembered; a disk that cannot be written is logged and costs only that protection."""
    epoch = (read_durable(path, _parse) or 0) + 1
    try:
        write_durable(path, str(epoch).encode())
    except MidstreamError as err:
        log.warning("the session epoch was not kept: %s", err)
    return epoch


def _parse(data: bytes) -> int:
    value = int(data.decode("ascii"))
    if value < 0:
        raise ValueError("an epoch is not negative")
    return value

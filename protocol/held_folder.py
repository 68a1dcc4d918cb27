"""One process per state folder: two that write the same files would undo each other's work."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from protocol.durable import disk_error
from protocol.errors import ConfigError

LOCK_NAME = ".lock"


@contextmanager
def hold_folder(folder: Path, user: str) -> Iterator[None]:
    """Hold `folder`, made when absent, until the block ends or the process dies in whatever way.

    Raises ConfigError when another process holds it; `user` names who we are in that message. A file system that
    cannot lock (some network mounts) is used without.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as err:
        raise disk_error(err, folder) from err
    try:
        _lock(handle, folder, user)
        yield
    finally:
        os.close(handle)


def _lock(handle: int, folder: Path, user: str) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as err:
        raise ConfigError(
            f"another {user} is running with the state of {folder}",
            next_step="stop it, or choose another state_dir",
            field="state_dir",
        ) from err
    except OSError:
        return  # this file system has no locks

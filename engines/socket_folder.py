"""A folder of one's own for one Unix socket, gone with the process that made it, in whatever way that ended.

It is locked while its maker lives: others of this user remove what dead makers left, and systemd-tmpfiles lets be
what is locked.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

from protocol.errors import EngineError

MOST_PATH_BYTES = 100
"""Of a socket; systems take 103 to 107."""

SETTLED_S = 60.0
"""A folder without a lock that is younger may still get one."""


class SocketFolder:
    """A folder with mode 0700 whose `path(name)` is short enough for a socket.

    Raises EngineError where there is no place for one.
    """

    def __init__(self, prefix: str, longest_name: int = 16) -> None:
        folder = _made(prefix, MOST_PATH_BYTES - longest_name - 1)
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        _lock(handle)
        self._folder = folder
        self.remove = weakref.finalize(self, _remove, folder, handle)
        """Idempotent; done by itself when this object is forgotten."""
        _sweep(folder.parent, prefix)

    def path(self, name: str) -> str:
        """Of a socket in it."""
        return str(self._folder / name)


def _made(prefix: str, most_bytes: int) -> Path:
    problem = "the paths of all folders for temporary files are too long"
    for base in _bases():
        if len(os.fsencode(Path(base) / f"{prefix}12345678")) > most_bytes:
            continue
        try:
            return Path(tempfile.mkdtemp(prefix=prefix, dir=base))
        except OSError as err:
            problem = str(err)
    raise EngineError(
        f"there is no place for a socket: {problem}",
        next_step="set TMPDIR to a folder with a short path that this user may write to",
    )


def _bases() -> Iterator[str]:
    try:
        yield tempfile.gettempdir()
    except OSError:  # none can be written to
        pass
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        yield runtime
    yield "/tmp"


def _sweep(base: Path, prefix: str) -> None:
    """Remove what makers that died left in `base`."""
    for folder in base.glob(f"{prefix}*"):
        try:
            found = folder.lstat()
            if found.st_uid != os.geteuid() or time.time() - found.st_mtime < SETTLED_S:
                continue
            handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue
        if _lock(handle):
            _remove(folder, handle)
        else:
            os.close(handle)


def _lock(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # another's, or a file system without locks
        return False
    return True


def _remove(folder: Path, handle: int) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    os.close(handle)

"""A file on its way into the store: written beside its place, hashed while it comes, renamed only when it is right."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from engines.digest import CHUNK_BYTES
from protocol.durable import disk_error
from protocol.errors import ConfigError, EngineError

Progress = Callable[[int, int], None]
"""Called with (bytes so far, bytes in all); must be quick."""

SPACE_MARGIN_BYTES = 64 << 20
"""Left free beside a model: logs, state and the next update still find room."""

FreeBytes = Callable[[Path], int]


def no_progress(done_bytes: int, total_bytes: int) -> None:
    """A Progress that shows nothing."""


def free_bytes(folder: Path) -> int:
    """Space that this user may fill on the disk of `folder`, which need not exist yet."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free


def check_space(folder: Path, needed_bytes: int, measure: FreeBytes = free_bytes) -> None:
    """Raise ConfigError with the numbers unless `needed_bytes` and a margin fit."""
    found = measure(folder)
    if found < needed_bytes + SPACE_MARGIN_BYTES:
        raise ConfigError(
            f"{_mib(needed_bytes)} and {_mib(SPACE_MARGIN_BYTES)} to spare are needed in {folder}, "
            f"{_mib(found)} are free",
            next_step="free some space, or choose another model folder",
        )


class Incoming:
    """Receives one file. Bytes that came before an interruption are kept and counted in `offset`.

    As a context manager it closes the partial file, which stays for the next attempt unless discard() was called.
    """

    def __init__(self, partial: Path, target: Path, sha256: str, size_bytes: int, progress: Progress) -> None:
        self.partial = partial
        self.target = target
        self._sha256 = sha256
        self._size_bytes = size_bytes
        self._progress = progress
        self._digest = hashlib.sha256()
        self._file: BinaryIO | None = None
        self.offset = 0

    def __enter__(self) -> Incoming:
        try:
            self.partial.parent.mkdir(parents=True, exist_ok=True)
            self.partial.touch(mode=0o600)
            with self.partial.open("rb") as kept:
                while chunk := kept.read(CHUNK_BYTES):
                    self._digest.update(chunk)
                    self.offset += len(chunk)
            self._file = self.partial.open("ab", buffering=0)
        except OSError as err:
            raise disk_error(err, self.partial) from err
        if self.offset > self._size_bytes:
            self.restart()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, err: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def write(self, chunk: bytes) -> None:
        """Append. Raises EngineError past the announced size, ConfigError when the disk is full (and frees it)."""
        assert self._file is not None, "write() belongs inside the with block"
        if self.offset + len(chunk) > self._size_bytes:
            self.discard()
            raise EngineError(
                f"{self.target.name} is longer than the {self._size_bytes} bytes announced",
                next_step="the source has another file than the catalogue; update midstream",
            )
        try:
            view = memoryview(chunk)
            while view:
                view = view[self._file.write(view) :]
        except OSError as err:
            if err.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                self.discard()
            raise disk_error(err, self.target) from err
        self._digest.update(chunk)
        self.offset += len(chunk)
        self._progress(self.offset, self._size_bytes)

    def restart(self) -> None:
        """Begin again at byte 0 (the source cannot resume, or what is here is not its beginning)."""
        assert self._file is not None, "restart() belongs inside the with block"
        self._file.truncate(0)
        self._digest = hashlib.sha256()
        self.offset = 0

    def discard(self) -> None:
        """Remove what came so far."""
        self.partial.unlink(missing_ok=True)

    @property
    def complete(self) -> bool:
        return self.offset == self._size_bytes

    @property
    def right(self) -> bool:
        """Whether the bytes so far are the whole file."""
        return self.complete and self._digest.hexdigest() == self._sha256

    def commit(self) -> Path:
        """Check length and sha256, sync, rename into place. Raises EngineError and removes wrong bytes."""
        assert self._file is not None, "commit() belongs inside the with block"
        if not self.complete:
            raise EngineError(
                f"{self.target.name} ended after {self.offset} of {self._size_bytes} bytes",
                next_step="pull again; it continues where it stopped",
            )
        found = self._digest.hexdigest()
        if found != self._sha256:
            self.discard()
            raise EngineError(
                f"{self.target.name} has sha256 {found[:16]}..., expected {self._sha256[:16]}...",
                next_step="pull again; if it repeats, the source was changed: update midstream or the catalogue",
            )
        try:
            os.fsync(self._file.fileno())
            self.target.parent.mkdir(parents=True, exist_ok=True)
            self.partial.replace(self.target)
            _sync_folder(self.target.parent)
        except OSError as err:
            raise disk_error(err, self.target) from err
        return self.target


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / (1 << 20):.1f} MiB"

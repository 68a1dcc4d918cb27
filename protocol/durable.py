"""State on disk that survives a power cut: atomic files with the previous copy kept, and SQLite in WAL mode.

Order of one write: temporary file, fsync, previous copy linked, rename over the old file, fsync of the folder. At every
point in between, `read_durable` finds either the new or the previous content.
"""

from __future__ import annotations

import errno
import os
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol, TypeVar

from protocol.errors import ConfigError, MidstreamError

T = TypeVar("T")

MAX_STATE_BYTES = 4 << 20
"""Nothing of ours that lives in one file is larger; a bigger file is not ours and is not read into memory."""


class FileSteps(Protocol):
    """The steps of one durable write, so that a test can stop between any two of them."""

    def write(self, path: Path, data: bytes, mode: int) -> None: ...
    def keep(self, path: Path, previous: Path) -> None: ...
    def replace(self, source: Path, target: Path) -> None: ...
    def sync_folder(self, folder: Path) -> None: ...


class DiskSteps:
    """FileSteps on the real file system."""

    def write(self, path: Path, data: bytes, mode: int) -> None:
        """Write and fsync a new file; an old temporary file is overwritten."""
        with suppress(FileNotFoundError):
            path.unlink()
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())

    def keep(self, path: Path, previous: Path) -> None:
        """Let `previous` name the present content of `path`, without a moment in which either is missing."""
        if not path.exists():
            return
        link = previous.with_name(previous.name + ".new")
        with suppress(FileNotFoundError):
            link.unlink()
        try:
            os.link(path, link)
        except OSError:  # a file system without hard links (FAT, some Android volumes)
            self.write(link, path.read_bytes(), 0o600)
        link.replace(previous)

    def replace(self, source: Path, target: Path) -> None:
        source.replace(target)

    def sync_folder(self, folder: Path) -> None:
        """Make the renames themselves durable; folders cannot be synced everywhere."""
        with suppress(OSError):
            handle = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)


DISK: FileSteps = DiskSteps()


def write_durable(path: Path, data: bytes, mode: int = 0o600, *, steps: FileSteps = DISK) -> None:
    """Replace the content of `path` atomically and keep the old content as the previous copy.

    Raises ConfigError when the disk is full, read-only or not ours to write; the old content is then untouched.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        steps.write(temporary, data, mode)
        steps.keep(path, previous_copy(path))
        steps.replace(temporary, path)
        steps.sync_folder(path.parent)
    except OSError as err:
        with suppress(OSError):
            temporary.unlink()
        raise disk_error(err, path) from err


def read_durable(path: Path, check: Callable[[bytes], T]) -> T | None:
    """`check(content)` of the newest copy that passes it: the file, else its previous copy, else None.

    `check` parses and raises a MidstreamError or ValueError for content that is not valid (torn, truncated, foreign).
    """
    for candidate in (path, previous_copy(path)):
        try:
            if candidate.stat().st_size > MAX_STATE_BYTES:
                continue
            return check(candidate.read_bytes())
        except (FileNotFoundError, NotADirectoryError, MidstreamError, ValueError):
            continue
        except OSError as err:
            raise disk_error(err, candidate) from err
    return None


def remove_durable(path: Path) -> None:
    """Remove the file and its copies; absent ones are fine."""
    for candidate in (previous_copy(path), path.with_name(path.name + ".tmp"), path):
        with suppress(FileNotFoundError):
            candidate.unlink()


def previous_copy(path: Path) -> Path:
    """Where the content before the last write is kept."""
    return path.with_name(path.name + ".prev")


def disk_error(err: OSError, path: Path) -> ConfigError:
    """The operator's view of a failed write or read, with the next step."""
    if err.errno in (errno.ENOSPC, errno.EDQUOT):
        return ConfigError(f"no space left to write {path}", next_step=f"free some space on the disk of {path.parent}")
    if err.errno in (errno.EACCES, errno.EPERM):
        return ConfigError(f"not allowed to use {path}", next_step=f"give this user access to {path.parent}")
    if err.errno == errno.EROFS:
        return ConfigError(f"{path} is on a read-only file system", next_step="choose another state folder")
    at = Path(err.filename) if isinstance(err.filename, str) else path
    if err.errno in (errno.EEXIST, errno.ENOTDIR):
        file = next((place for place in (at, *at.parents) if place.is_file()), at)
        return ConfigError(
            f"cannot use {file}: it is no folder", next_step="name another folder, or move that file away"
        )
    if err.errno == errno.EISDIR:
        return ConfigError(f"cannot use {at}: it is a folder", next_step="name another file, or move that folder away")
    return ConfigError(f"cannot use {path}: {err.strerror or err}", next_step=f"check {path.parent}")


def open_sqlite(path: Path, migrations: Sequence[str]) -> sqlite3.Connection:
    """Open a database in WAL mode and bring it up to `len(migrations)`; each migration is one script, applied once.

    Usable from any one thread at a time. The file, its log and its index are the owner's alone. Raises ConfigError when
    the file is not a database, is newer than this release, or cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        connection = sqlite3.connect(path, timeout=5.0, isolation_level=None, check_same_thread=False)
    except (OSError, sqlite3.Error) as err:
        raise sqlite_error(err, path) from err
    try:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=NORMAL")
        connection.execute("PRAGMA foreign_keys=ON")
        _migrate(connection, path, migrations)
    except (sqlite3.Error, ConfigError) as err:
        connection.close()
        raise (err if isinstance(err, ConfigError) else sqlite_error(err, path)) from err
    for suffix in ("", "-wal", "-shm"):  # SQLite gives new ones the mode of the file, which was made with the umask's
        with suppress(OSError):
            path.with_name(path.name + suffix).chmod(0o600)
    return connection


@contextmanager
def written(db: sqlite3.Connection) -> Iterator[None]:
    """One transaction: all of the block is kept at its end, or nothing of it."""
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:  # a full disk may have ended it
            db.execute("ROLLBACK")
        raise


def _migrate(connection: sqlite3.Connection, path: Path, migrations: Sequence[str]) -> None:
    version = int(connection.execute("PRAGMA user_version").fetchone()[0])
    if version > len(migrations):
        raise ConfigError(
            f"{path} was written by a newer release (version {version})", next_step="update midstream, or move the file"
        )
    for at, script in enumerate(migrations[version:], start=version + 1):
        try:
            connection.executescript(f"BEGIN IMMEDIATE;\n{script}\n;PRAGMA user_version={at};\nCOMMIT;")
        except sqlite3.Error:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise


def sqlite_error(err: Exception, path: Path) -> ConfigError:
    """What an error of SQLite or of the disk means for whoever runs this process."""
    if isinstance(err, OSError):
        return disk_error(err, path)
    if "full" in str(err):
        return ConfigError(f"no space left to write {path}", next_step=f"free some space on the disk of {path.parent}")
    return ConfigError(
        f"cannot use the database {path}: {err}", next_step="move the file aside; a new one is made at the next start"
    )

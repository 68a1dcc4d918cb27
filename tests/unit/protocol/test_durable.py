"""Files that survive a power cut at any step, and databases that say what is wrong with them."""

from __future__ import annotations

import errno
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from protocol.durable import (
    MAX_STATE_BYTES,
    DiskSteps,
    disk_error,
    open_sqlite,
    previous_copy,
    read_durable,
    remove_durable,
    write_durable,
)
from protocol.errors import ConfigError


class PowerCut(Exception):
    """Not an OSError on purpose: nothing may clean up after it, like after a real cut."""


class CutSteps(DiskSteps):
    """Real steps until the cut, which comes before, in the middle of, or after the step with this number."""

    def __init__(self, step: int, where: str) -> None:
        self.left = step
        self.where = where

    def _at(self) -> str:
        self.left -= 1
        return self.where if self.left == -1 else ""

    def write(self, path: Path, data: bytes, mode: int) -> None:
        at = self._at()
        if at == "before":
            raise PowerCut
        super().write(path, data[: len(data) // 2] if at == "middle" else data, mode)
        if at:
            raise PowerCut

    def keep(self, path: Path, previous: Path) -> None:
        at = self._at()
        if at == "before":
            raise PowerCut
        if at == "middle":
            os.link(path, previous.with_name(previous.name + ".new"))
            raise PowerCut
        super().keep(path, previous)
        if at:
            raise PowerCut

    def replace(self, source: Path, target: Path) -> None:
        at = self._at()
        if at == "before":
            raise PowerCut
        super().replace(source, target)
        if at:
            raise PowerCut

    def sync_folder(self, folder: Path) -> None:
        if self._at():
            raise PowerCut
        super().sync_folder(folder)


def whole(data: bytes) -> bytes:
    """A check that refuses torn content."""
    if not (data.startswith(b"<") and data.endswith(b">")):
        raise ValueError("torn")
    return data


def cuts() -> Iterator[tuple[int, str]]:
    for step in range(4):
        for where in ("before", "middle", "after"):
            yield step, where


@pytest.mark.parametrize(("step", "where"), list(cuts()))
def test_a_cut_at_any_step_leaves_the_old_or_the_new_content(tmp_path: Path, step: int, where: str) -> None:
    path = tmp_path / "state.json"
    write_durable(path, b"<one>")
    write_durable(path, b"<two>")
    with pytest.raises(PowerCut):
        write_durable(path, b"<three>", steps=CutSteps(step, where))
    assert read_durable(path, whole) in (b"<two>", b"<three>")
    write_durable(path, b"<four>")  # leftovers do not stand in the way of the next write
    assert read_durable(path, whole) == b"<four>"
    assert sorted(p.name for p in tmp_path.iterdir() if p.suffix == ".tmp") == []


@pytest.mark.parametrize("torn", [b"", b"<tw", b"\0" * 5])
def test_the_previous_copy_stands_in_for_a_torn_file(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "state.json"
    write_durable(path, b"<one>")
    write_durable(path, b"<two>")
    path.write_bytes(torn)
    assert read_durable(path, whole) == b"<one>"


def test_a_lost_file_is_read_from_its_previous_copy(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    write_durable(path, b"<one>")
    write_durable(path, b"<two>")
    path.unlink()
    assert read_durable(path, whole) == b"<one>"


def test_nothing_is_read_where_nothing_was_written(tmp_path: Path) -> None:
    assert read_durable(tmp_path / "none", whole) is None
    (tmp_path / "file").write_bytes(b"x")
    assert read_durable(tmp_path / "file" / "below", whole) is None


def test_a_file_of_the_largest_size_is_read_and_a_larger_one_is_not(tmp_path: Path) -> None:
    path = tmp_path / "state"
    path.write_bytes(b"x" * MAX_STATE_BYTES)
    assert read_durable(path, len) == MAX_STATE_BYTES
    path.write_bytes(b"x" * (MAX_STATE_BYTES + 1))
    assert read_durable(path, len) is None


def test_secrets_are_for_their_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "key"
    write_durable(path, b"<k>")
    write_durable(path, b"<l>")
    assert path.stat().st_mode & 0o777 == 0o600
    assert previous_copy(path).stat().st_mode & 0o777 == 0o600


def test_removal_leaves_no_copy(tmp_path: Path) -> None:
    path = tmp_path / "state"
    write_durable(path, b"<1>")
    write_durable(path, b"<2>")
    remove_durable(path)
    remove_durable(path)
    assert list(tmp_path.iterdir()) == []


class FullDisk(DiskSteps):
    """Writes some bytes, then finds no space for the rest."""

    def write(self, path: Path, data: bytes, mode: int) -> None:
        path.write_bytes(data[:2])
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_is_told_with_the_next_step_and_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "state"
    write_durable(path, b"<one>")
    with pytest.raises(ConfigError, match="free some space"):
        write_durable(path, b"<two>", steps=FullDisk())
    assert read_durable(path, whole) == b"<one>"
    assert [p.name for p in tmp_path.iterdir()] == ["state"]


class NoLinks(DiskSteps):
    """A file system without hard links."""

    def keep(self, path: Path, previous: Path) -> None:
        taken = previous.with_name(previous.name + ".new")
        taken.mkdir()  # os.link and unlink both fail on it
        try:
            super().keep(path, previous)
        finally:
            taken.rmdir()


def test_an_obstacle_in_the_way_is_an_error_of_ours(tmp_path: Path) -> None:
    path = tmp_path / "state"
    write_durable(path, b"<one>")
    with pytest.raises(ConfigError):
        write_durable(path, b"<two>", steps=NoLinks())
    assert read_durable(path, whole) == b"<one>"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS, errno.EIO])
def test_every_disk_error_names_the_next_step(number: int) -> None:
    assert disk_error(OSError(number, os.strerror(number)), Path("x/y")).next_step


def test_a_file_where_a_folder_is_needed_is_named_and_so_is_a_folder_for_a_file(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for make in (lambda: file.mkdir(exist_ok=True), lambda: (file / "a" / "b").mkdir(parents=True)):
        with pytest.raises(OSError) as failed:
            make()
        assert disk_error(failed.value, tmp_path / "file" / "a").message == f"cannot use {file}: it is no folder"
    with pytest.raises(IsADirectoryError) as taken:
        tmp_path.read_bytes()
    assert disk_error(taken.value, tmp_path).message == f"cannot use {tmp_path}: it is a folder"


def test_migrations_run_once_and_in_order(tmp_path: Path) -> None:
    path = tmp_path / "db" / "registry.sqlite"
    first = ["CREATE TABLE device(id TEXT PRIMARY KEY)"]
    open_sqlite(path, first).close()
    connection = open_sqlite(path, [*first, "ALTER TABLE device ADD COLUMN seen REAL; CREATE INDEX i ON device(seen)"])
    connection.execute("INSERT INTO device VALUES ('a', 1.0)")
    assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    assert connection.execute("PRAGMA user_version").fetchone() == (2,)
    connection.close()


def test_a_broken_migration_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "registry.sqlite"
    open_sqlite(path, ["CREATE TABLE a(x)"]).close()
    with pytest.raises(ConfigError):
        open_sqlite(path, ["CREATE TABLE a(x)", "CREATE TABLE b(x); CREATE TABLE a(x)"])
    connection = sqlite3.connect(path)
    assert connection.execute("PRAGMA user_version").fetchone() == (1,)
    assert connection.execute("SELECT name FROM sqlite_master").fetchall() == [("a",)]
    connection.close()


def test_a_database_of_a_newer_release_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "registry.sqlite"
    open_sqlite(path, ["CREATE TABLE a(x)", "CREATE TABLE b(x)"]).close()
    with pytest.raises(ConfigError, match="newer release"):
        open_sqlite(path, ["CREATE TABLE a(x)"])


def test_a_file_that_is_no_database_is_told(tmp_path: Path) -> None:
    path = tmp_path / "registry.sqlite"
    path.write_bytes(b"this is no database at all" * 100)
    with pytest.raises(ConfigError, match="move the file aside"):
        open_sqlite(path, [])

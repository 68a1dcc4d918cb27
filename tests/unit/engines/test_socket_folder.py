"""The folder of a socket: private, short, locked, and gone with its maker."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from engines.socket_folder import MOST_PATH_BYTES, SETTLED_S, SocketFolder
from protocol.errors import EngineError

PREFIX = "midstream-test-"


@pytest.fixture(autouse=True)
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    assert tmp_path.exists()  # that one is made by the usual place for temporary files
    with tempfile.TemporaryDirectory(prefix="m-", dir="/tmp") as short:
        monkeypatch.setattr(tempfile, "tempdir", short)
        monkeypatch.setenv("XDG_RUNTIME_DIR", short)
        yield Path(short)


def _age(folder: Path) -> None:
    then_s = time.time() - SETTLED_S - 5
    os.utime(folder, (then_s, then_s))


def test_it_is_this_users_alone_and_goes_when_it_is_removed_or_forgotten(base: Path) -> None:
    folder = SocketFolder(PREFIX)
    inside = Path(folder.path("a.sock"))
    assert inside.parent.parent == base
    assert inside.parent.stat().st_mode & 0o777 == 0o700
    inside.write_bytes(b"")
    folder.remove()
    folder.remove()
    SocketFolder(PREFIX)
    assert list(base.iterdir()) == []


def test_what_a_maker_that_was_killed_left_is_removed_by_the_next_and_what_is_in_use_is_not(base: Path) -> None:
    code = (
        "import sys, tempfile, time; tempfile.tempdir = sys.argv[1]; from engines.socket_folder import SocketFolder; "
        f"folder = SocketFolder({PREFIX!r}); open(folder.path('a.sock'), 'w').close(); "
        "print(folder.path(''), flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(base)], stdout=subprocess.PIPE, text=True) as maker:
        assert maker.stdout is not None
        left = Path(maker.stdout.readline().strip())
        _age(left)
        SocketFolder(PREFIX).remove()
        assert left.exists()
        maker.send_signal(signal.SIGKILL)
        maker.wait(10)
    SocketFolder(PREFIX).remove()
    assert not left.exists()


def test_a_folder_that_was_made_a_moment_ago_may_still_be_locked(base: Path) -> None:
    young = base / f"{PREFIX}young"
    young.mkdir()
    SocketFolder(PREFIX).remove()
    assert young.exists()


def test_a_link_with_such_a_name_is_not_followed(base: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("kept")
    link = base / f"{PREFIX}link"
    link.symlink_to(tmp_path)
    then_s = time.time() - SETTLED_S - 5
    os.utime(link, (then_s, then_s), follow_symlinks=False)
    SocketFolder(PREFIX).remove()
    assert (tmp_path / "mine").exists()


def test_a_long_path_for_temporary_files_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("x" * 120)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    folder = SocketFolder(PREFIX)
    assert len(folder.path("a-name-of-16.txt")) <= MOST_PATH_BYTES
    assert list(deep.iterdir()) == []
    folder.remove()


def test_no_place_at_all_is_told_with_the_next_step() -> None:
    with pytest.raises(EngineError, match="no place for a socket") as caught:
        SocketFolder("p" * 120)
    assert "TMPDIR" in (caught.value.next_step or "")

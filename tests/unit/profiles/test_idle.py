"""The idle share of the CPU from /proc/stat, whatever the file holds."""

from __future__ import annotations

from pathlib import Path

import pytest

from profiles.idle import CpuIdle


def write(root: Path, text: str) -> None:
    (root / "proc").mkdir(exist_ok=True)
    (root / "proc" / "stat").write_text(text)


def test_shares_between_two_looks(tmp_path: Path) -> None:
    idle = CpuIdle(tmp_path)
    write(tmp_path, "cpu  100 0 100 700 100 0 0 0 50 0\ncpu0 1 2 3 4\n")
    assert idle.ratio() is None
    # 40 of work, 50 idle, 10 waiting for a disk
    write(tmp_path, "cpu  130 0 110 750 110 0 0 0 80 0\ncpu0 1 2 3 4\n")
    assert idle.ratio() == pytest.approx(0.6)
    assert idle.ratio() is None


@pytest.mark.parametrize("text", ["", "cpu", "cpu a b c d e", "cpu 1 2 3", "intr 1 2 3 4 5"])
def test_garbage_is_unknown(tmp_path: Path, text: str) -> None:
    idle = CpuIdle(tmp_path)
    for _ in range(2):
        write(tmp_path, text)
        assert idle.ratio() is None


def test_a_machine_without_the_file_is_unknown(tmp_path: Path) -> None:
    idle = CpuIdle(tmp_path)
    assert (idle.ratio(), idle.ratio()) == (None, None)

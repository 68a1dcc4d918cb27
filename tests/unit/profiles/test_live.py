"""What the running system tells beside its files."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys

from profiles.facts import Facts, collect
from profiles.live import fill, host_numbers, onnxruntime_builds


def test_numbers_of_this_process() -> None:
    numbers = host_numbers()
    assert numbers.arch == os.uname().machine
    assert numbers.page_bytes is not None
    assert numbers.page_bytes & (numbers.page_bytes - 1) == 0
    assert numbers.affinity == len(os.sched_getaffinity(0))


def test_what_the_files_told_is_kept() -> None:
    known = Facts(memory_total_bytes=5, memory_bytes=3, cores=1.5, cores_present=4, os="X")
    assert fill(known) == known


def test_a_limit_stays_below_what_psutil_says() -> None:
    importlib.import_module("psutil")
    assert fill(Facts(memory_bytes=1 << 20)).memory_bytes == 1 << 20
    unlimited = fill(Facts())
    assert unlimited.memory_bytes == unlimited.memory_total_bytes
    assert unlimited.memory_total_bytes


def test_builds_are_named_without_importing_them() -> None:
    code = "import sys; from profiles.live import onnxruntime_builds as b; b(); print('onnxruntime' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30)
    assert found.stdout.strip() == "False"
    assert set(onnxruntime_builds()) <= set(collect().accelerators)


def test_psutil_is_not_needed_and_not_imported_where_files_tell() -> None:
    code = "import sys; from profiles.facts import collect; collect(); print('psutil' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30)
    assert found.stdout.strip() == "False"

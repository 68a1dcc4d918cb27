"""Thousands of apps that vanish without a word: their connections end, and so does the memory they took."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT

APPS = 5_000
HEARTBEAT_S = 15.0


@contextlib.contextmanager
def program(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.route.channel_peers", *arguments],
        cwd=ROOT, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def state(folder: Path) -> dict[str, int]:
    time.sleep(0.1)
    found: dict[str, int] = json.loads((folder / "state.json").read_text())
    return found


def wave(folder: Path, port: int) -> tuple[float, int, int]:
    """(seconds from the last sign of life to the last reaped connection, RSS with all, RSS after), bytes."""
    with program("apps", str(port), str(APPS)) as apps:
        assert apps.stdout is not None and apps.stdout.readline() == "ready\n"
        apps.send_signal(signal.SIGSTOP)  # no FIN, no RST: the sockets stay, nobody answers
        begun_s, full = time.monotonic(), 0
        while (found := state(folder))["connected"]:
            full = max(full, found["rss"])
        seconds = time.monotonic() - begun_s
    time.sleep(3.0)
    return seconds, full, state(folder)["rss"]


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_five_thousand_silent_apps_are_reaped_and_their_memory_returns(tmp_path: Path) -> None:
    with program("gateway", str(tmp_path), str(HEARTBEAT_S)) as gateway:
        assert gateway.stdout is not None
        port = int(gateway.stdout.readline())
        first_s, full, after = wave(tmp_path, port)
        second_s, again, end = wave(tmp_path, port)
    print(f"reaped in {first_s:.1f} and {second_s:.1f} s; RSS {full}, {after}, {again}, {end}")
    assert first_s <= 2 * HEARTBEAT_S and second_s <= 2 * HEARTBEAT_S
    # What the interpreter keeps after the first wave is kept once: a second wave adds nothing.
    assert again <= 1.1 * full and end <= 1.1 * after

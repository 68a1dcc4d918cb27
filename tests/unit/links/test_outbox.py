"""The outbox: order, bounds, expiry, and what a killed process leaves behind."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from links.outbox import Outbox
from protocol.clock import FakeClock, WallTime
from protocol.errors import Full, TooLarge

ROOT = Path(__file__).resolve().parents[3]


class Wall:
    """A wall clock that tests set."""

    def __init__(self, unix_s: float = 2e9, trusted: bool = True) -> None:
        self.now = WallTime(unix_s, trusted)

    def __call__(self) -> WallTime:
        return self.now


def _payloads(box: Outbox) -> list[bytes]:
    return [message.payload for message in box.pending()]


def test_messages_wait_in_order_until_they_are_done() -> None:
    box = Outbox()
    numbers = [box.add("t", payload, False, None).number for payload in (b"1", b"2", b"3")]
    box.done(numbers[1])
    assert _payloads(box) == [b"1", b"3"]


def test_a_retained_message_takes_the_place_of_the_older_one() -> None:
    box = Outbox()
    box.add("state", b"old", True, None)
    box.add("event", b"stays", False, None)
    box.add("state", b"new", True, None)
    assert _payloads(box) == [b"stays", b"new"]


def test_expired_messages_are_dropped_and_counted() -> None:
    clock = FakeClock()
    box = Outbox(clock=clock)
    box.add("t", b"short", False, 5.0)
    box.add("t", b"long", False, 50.0)
    clock.advance(6)
    assert _payloads(box) == [b"long"]
    assert box.dropped == 1


def test_full_drops_what_may_expire_and_then_refuses() -> None:
    box = Outbox(max_count=3)
    box.add("t", b"telemetry", False, 60.0)
    for payload in (b"1", b"2", b"3"):
        box.add("t", payload, False, None)
    assert _payloads(box) == [b"1", b"2", b"3"]
    with pytest.raises(Full):
        box.add("t", b"4", False, None)
    with pytest.raises(TooLarge):
        Outbox(max_bytes=100).add("t", bytes(100), False, None)
    assert box.dropped == 1


def test_bytes_are_bounded_and_given_back() -> None:
    box = Outbox(max_bytes=1000)
    for _ in range(50):
        box.done(box.add("t", bytes(900), False, None).number)
    assert len(box) == 0


def test_what_was_kept_is_there_after_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "outbox.db"
    box = Outbox(path)
    kept = [box.add("t", str(i).encode(), i == 2, None) for i in range(3)]
    for message in kept:
        box.keep(message.number)
    box.done(kept[0].number)
    box.close()
    again = Outbox(path)
    assert [(m.payload, m.retain) for m in again.pending()] == [(b"1", False), (b"2", True)]
    assert again.add("t", b"next", False, None).number > kept[-1].number
    again.close()


def test_an_acknowledged_message_never_touches_the_disk(tmp_path: Path) -> None:
    path = tmp_path / "outbox.db"
    box = Outbox(path)
    box.done(box.add("t", b"quick", False, None).number)
    box.close()
    assert not path.exists()


def test_expiry_goes_on_while_the_process_is_away(tmp_path: Path) -> None:
    path, clock, wall = tmp_path / "outbox.db", FakeClock(1000.0), Wall()
    box = Outbox(path, clock=clock, wall=wall)
    for seconds in (100.0, 1000.0):
        box.keep(box.add("t", str(seconds).encode(), False, seconds).number)
    box.close()
    later = Wall(wall.now.unix_s + 500)
    away = Outbox(path, clock=FakeClock(3.0), wall=later)
    assert _payloads(away) == [b"1000.0"]
    away.close()


def test_a_clock_that_was_never_set_expires_nothing(tmp_path: Path) -> None:
    """CL1: without a real-time clock the first true time looks like a jump of years."""
    path = tmp_path / "outbox.db"
    box = Outbox(path, wall=Wall(0.0, trusted=False))
    box.keep(box.add("t", b"still good", False, 100.0).number)
    box.close()
    again = Outbox(path, wall=Wall(2e9))
    assert _payloads(again) == [b"still good"]
    again.close()


_KEEP_AND_DIE = """
import os, sys
from pathlib import Path
from links.outbox import Outbox
box = Outbox(Path(sys.argv[1]))
for i in range(100):
    box.keep(box.add("t", str(i).encode(), False, None).number)
print("kept", flush=True)
os.kill(os.getpid(), 9)
"""


def test_kept_messages_survive_kill_9(tmp_path: Path) -> None:
    """MQ6: a queue in memory is lost when a watchdog kills the process."""
    path = tmp_path / "outbox.db"
    done = subprocess.run(
        [sys.executable, "-c", _KEEP_AND_DIE, str(path)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        timeout=30,
        check=False,
    )
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, b"kept\n")
    box = Outbox(path)
    assert _payloads(box) == [str(i).encode() for i in range(100)]
    box.close()


def test_a_disk_that_is_busy_holds_nobody_up_and_writes_keep_their_order(tmp_path: Path) -> None:
    path = tmp_path / "outbox.db"
    with ThreadPoolExecutor(1) as worker:
        box = Outbox(path, worker=worker)
        first = box.keep(box.add("t", b"0", False, None).number)
        assert first is not None
        first.result(5)
        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            kept = [box.keep(box.add("t", str(number).encode(), False, None).number) for number in range(1, 20)]
            for number in range(1, 6):
                box.done(number)
            assert not any(future.done() for future in kept if future), "all of them wait, and we do not"
            other.execute("COMMIT")
        box.close()
        assert box.keep(box.add("t", b"late", False, None).number) is None, "what comes after the end is not kept"
    again = Outbox(path)
    assert _payloads(again) == [str(number).encode() for number in range(5, 20)]
    again.close()


@pytest.mark.parametrize("content", [b"this is not a database" * 100, b""])
def test_a_damaged_file_is_set_aside(tmp_path: Path, content: bytes) -> None:
    """MQ9: a corrupt store must not keep anything from starting."""
    path = tmp_path / "outbox.db"
    path.write_bytes(content)
    box = Outbox(path)
    box.keep(box.add("t", b"new", False, None).number)
    box.close()
    again = Outbox(path)
    assert _payloads(again) == [b"new"]
    again.close()


def test_a_disk_that_cannot_take_it_leaves_it_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "is-a-file" / "outbox.db"
    path.parent.write_bytes(b"")
    box = Outbox(path)
    box.keep(box.add("t", b"kept in memory", False, None).number)
    assert _payloads(box) == [b"kept in memory"]
    box.close()

"""The audit: a chain that shows every change, files that rotate with it, crashes, bounds, and no word of a prompt."""

from __future__ import annotations

import resource
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.audit import AuditBounds, FileAudit, audit_files, verify
from gateway.audit_chain import Checked, Head, check, link, read
from gateway.context import Caller
from gateway.ports import Findings, Invocation, Span, Spent
from protocol.clock import wall_now
from protocol.errors import ConfigError

RECORD = Invocation(
    request_id="r1", caller=Caller(tenant="acme", key_id="key-1"), model="m", endpoint="chat", status="ok",
    level="named", reason="named by the client", findings=Findings(spans=(Span("messages[0]", 0, 4, "email"),)),
    redacted=True, cached=False, saved_tokens=0, spent=Spent(10, 5, money=0.00015, sides=(("cloud", 5),)), ttft_s=0.1,
    total_s=0.2,
)  # fmt: skip


def lines_of(folder: Path) -> list[bytes]:
    return [line for file in audit_files(folder) for line in file.read_bytes().splitlines(keepends=True)]


def written(folder: Path, count: int = 20, bounds: AuditBounds | None = None) -> Head:
    audit = FileAudit(folder, wall_now, bounds or AuditBounds())
    for number in range(count):
        audit.invocation(evolve(RECORD, request_id=f"r{number}"))
    audit.close()
    return audit.head


def test_requests_and_management_are_chained_and_verified(tmp_path: Path) -> None:
    audit = FileAudit(tmp_path, wall_now)
    audit.invocation(RECORD)
    audit.management("local", "key.add", "key-2", {"tenant": "acme"})
    found = verify(tmp_path)
    assert (found.lines, found.fault, found.head) == (2, None, audit.head), "management is on disk when it returns"
    audit.close()
    fields = read(lines_of(tmp_path)[0][:-1])
    assert not isinstance(fields, str)
    assert fields[1]["tenant"] == "acme" and fields[1]["usd"] == 0.00015 and fields[1]["found"] == {"email": 1}
    assert audit_files(tmp_path)[0].stat().st_mode & 0o777 == 0o600


@settings(max_examples=60)
@given(data=st.data())
def test_any_change_of_any_byte_any_line_out_twice_or_moved_is_found(data: st.DataObject) -> None:
    head, lines = Head(), []
    for number in range(6):
        line, head = link(head, 1.0 + number, "invocation", {"n": number})
        lines.append(line[:-1])
    assert check(lines, "f", Checked()).fault is None
    harm = data.draw(st.sampled_from(("byte", "out", "twice", "swap", "forged")))
    at = data.draw(st.integers(0, 4))
    if harm == "byte":
        place = data.draw(st.integers(0, len(lines[at]) - 1))
        value = data.draw(st.integers(0, 255).filter(lambda v: v != lines[at][place]))
        lines[at] = lines[at][:place] + bytes([value]) + lines[at][place + 1 :]
    elif harm == "out":
        del lines[at + 1 if at else 1]
        lines.append(link(head, 9.0, "invocation", {})[0][:-1])
    elif harm == "twice":
        lines.insert(at, lines[at])
    elif harm == "swap":
        lines[at], lines[at + 1] = lines[at + 1], lines[at]
    else:
        lines[at] = link(Head(at, "f" * 64), 1.0, "invocation", {"n": 99})[0][:-1]
    assert check(lines, "f", Checked()).fault is not None


def test_files_rotate_with_one_chain_and_the_oldest_go(tmp_path: Path) -> None:
    written(tmp_path, 200, AuditBounds(file_bytes=5_000, files=3))
    files = audit_files(tmp_path)
    assert len(files) == 3 and all(file.stat().st_size <= 5_000 for file in files)
    found = verify(tmp_path)
    assert found.fault is None and found.first_seq > 1 and found.head.seq == 200
    files[1].unlink()
    assert verify(tmp_path).fault is not None, "a file out of the middle is missed"


def test_a_hash_that_was_noted_proves_that_nothing_was_cut_off(tmp_path: Path) -> None:
    noted = written(tmp_path, 10)
    last = audit_files(tmp_path)[-1]
    whole = last.read_bytes()
    written(tmp_path, 5)
    assert verify(tmp_path, noted.hash).seen
    last.write_bytes(b"".join(whole.splitlines(keepends=True)[:-1]))
    cut = verify(tmp_path, noted.hash)
    assert cut.fault is None and not cut.seen


@pytest.mark.parametrize("cut", [1, 40, 200])
def test_a_torn_last_line_is_cut_off_and_that_is_recorded(tmp_path: Path, cut: int) -> None:
    written(tmp_path, 3)
    last = audit_files(tmp_path)[-1]
    last.write_bytes(last.read_bytes()[:-cut])
    written(tmp_path, 2)
    found = verify(tmp_path)
    assert found.fault is None
    kinds = [line.split(b'"kind":"')[1].split(b'"')[0] for line in lines_of(tmp_path)]
    assert kinds == [b"invocation", b"invocation", b"recovered", b"invocation", b"invocation"]


def test_an_empty_new_file_goes_on_with_the_chain_of_the_one_before(tmp_path: Path) -> None:
    written(tmp_path, 3)
    (tmp_path / "audit-000002.jsonl").write_bytes(b"")
    assert written(tmp_path, 1).seq == 4
    assert verify(tmp_path).fault is None


def test_a_kill_at_any_moment_leaves_a_chain_that_verifies(tmp_path: Path) -> None:
    script = textwrap.dedent("""
        import sys
        from pathlib import Path
        from gateway.audit import AuditBounds, FileAudit
        from protocol.clock import wall_now
        from tests.unit.gateway.test_audit import RECORD
        audit = FileAudit(Path(sys.argv[1]), wall_now, AuditBounds(file_bytes=20_000, sync_every_s=0.001))
        print("ready", flush=True)
        while True:
            audit.invocation(RECORD)
    """)
    for _ in range(3):
        process = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
        before = sum(file.stat().st_size for file in audit_files(tmp_path))
        while sum(file.stat().st_size for file in audit_files(tmp_path)) < before + 10_000:
            time.sleep(0.01)  # however slow the disk is: the test's own time-out bounds it
        process.kill()
        process.wait()
        process.stdout.close()
    written(tmp_path, 1)
    found = verify(tmp_path)
    assert found.fault is None and found.lines > 10


def test_what_the_queue_has_no_room_for_is_counted_in_the_chain(tmp_path: Path) -> None:
    audit = FileAudit(tmp_path, wall_now, AuditBounds(queue_records=5, sync_every_s=30.0))
    for _ in range(12):
        audit.invocation(RECORD)
    audit.close()
    assert b'"kind":"dropped","records":7' in b"".join(lines_of(tmp_path))
    assert verify(tmp_path).fault is None


def test_a_disk_that_is_full_loses_records_but_not_the_chain(tmp_path: Path) -> None:
    """The kernel refuses to let files of this process grow, as a full disk does, in the middle of a line."""
    audit = FileAudit(tmp_path, wall_now, AuditBounds(sync_every_s=0.01))
    audit.invocation(RECORD)
    audit.management("local", "key.add", "k", {})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (audit_files(tmp_path)[0].stat().st_size + 100, hard))
    try:
        audit.invocation(RECORD)
        with pytest.raises(ConfigError):
            audit.management("local", "key.add", "k", {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    audit.management("local", "key.revoke", "k", {})
    audit.close()
    found = verify(tmp_path)
    assert (found.fault, found.lines) == (None, 4)
    assert b'"kind":"dropped","records":2' in b"".join(lines_of(tmp_path))


def test_two_writers_of_one_folder_are_refused(tmp_path: Path) -> None:
    audit = FileAudit(tmp_path, wall_now)
    with pytest.raises(ConfigError):
        FileAudit(tmp_path, wall_now)
    audit.close()


def test_an_invocation_costs_the_request_microseconds(tmp_path: Path) -> None:
    """The queue takes it while the disk hangs; nothing waits."""
    audit = FileAudit(tmp_path, wall_now)
    began = threading.Event()
    waiter = threading.Thread(target=lambda: (began.set(), audit.management("a", "b", "c", {})), name="manager")
    waiter.start()
    began.wait()
    audit.invocation(RECORD)
    waiter.join(5.0)
    assert not waiter.is_alive()
    audit.close()
    assert verify(tmp_path).lines == 2


def test_nothing_to_verify_is_an_error_with_a_next_step(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--state-dir"):
        verify(tmp_path)

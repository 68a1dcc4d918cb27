"""The audit on disk: who asked what of which model at which price, and who changed what; never a word of a prompt.

Requests only put a record into a bounded queue; one thread makes lines of them, chains them (gateway.audit_chain) and
syncs them a few times a second. A file that is full is followed by the next, which goes on with the same chain; the
oldest ones are removed. After a crash a torn last line is cut off and that is recorded. Records that the queue had no
room for are counted, and the count is recorded.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Any

from attrs import define, field, frozen

from gateway.audit_chain import MAX_LINE_BYTES, Checked, Head, check, link, read
from gateway.ports import Invocation
from gateway.shadow_measure import Difference
from gateway.shadow_measure import fields_of as difference_fields
from protocol.clock import WallClock
from protocol.durable import disk_error
from protocol.errors import ConfigError
from protocol.held_folder import hold_folder

log = logging.getLogger("midstream.gateway.audit")

MAX_TEXT_CHARS = 256
_NAME = re.compile(r"audit-(\d{6})\.jsonl")


@frozen
class AuditBounds:
    """file_bytes: a file is full then. files: kept at once. queue_records: wait for the disk at once; further ones are
    counted only. sync_every_s: what a power cut may lose."""

    file_bytes: int = 16 << 20
    files: int = 64
    queue_records: int = 20_000
    sync_every_s: float = 0.25


@define(eq=False)
class _Done:
    """A management record that waits to be on disk."""

    event: threading.Event = field(factory=threading.Event)
    error: ConfigError | None = None


_Entry = tuple[float, str, Any, _Done | None]


class FileAudit:
    """`gateway.ports.Audit` on a folder that this process holds. Raises ConfigError when it cannot be opened."""

    def __init__(self, folder: Path, wall: WallClock, bounds: AuditBounds = AuditBounds()) -> None:
        self.folder = folder
        self._wall = wall
        self._bounds = bounds
        self._hold = hold_folder(folder, "the audit")
        self._hold.__enter__()
        try:
            self._file, self._size_bytes, self._head = self._open()
        except BaseException:
            self._hold.__exit__(None, None, None)
            raise
        self._queue: deque[_Entry] = deque()
        self._dropped = 0
        self._ending = False
        self._batch: list[tuple[bytes, Head]] = []
        self._batch_bytes = 0
        self._wake = threading.Event()
        self._hurry = threading.Event()
        self._thread = threading.Thread(target=self._write_on, name="audit", daemon=True)
        self._thread.start()

    @property
    def head(self) -> Head:
        """The last line that was written."""
        return self._head

    def invocation(self, record: Invocation) -> None:
        """Takes about a microsecond; never waits, never raises."""
        self._put("invocation", record)

    def shadow(self, difference: Difference) -> None:
        """As `invocation`."""
        self._put("shadow", difference)

    def _put(self, kind: str, record: Invocation | Difference) -> None:
        if len(self._queue) >= self._bounds.queue_records:
            self._dropped += 1
            return
        self._queue.append((self._wall().unix_s, kind, record, None))
        if not self._wake.is_set():
            self._wake.set()

    def management(self, who: str, action: str, subject: str, detail: Mapping[str, Any]) -> None:
        """Returns when it is on disk; for threads. Raises ConfigError when it could not be written."""
        done = _Done()
        fields = {"who": who, "action": action, "subject": subject, "detail": dict(detail)}
        self._queue.append((self._wall().unix_s, "management", fields, done))
        self._hurry.set()
        self._wake.set()
        done.event.wait()
        if done.error is not None:
            raise done.error

    def noted(self, who: str, action: str, subject: str, detail: Mapping[str, Any]) -> None:
        """As `management`, for changes that cannot wait for the disk: on it a moment later, never dropped."""
        fields = {"who": who, "action": action, "subject": subject, "detail": dict(detail)}
        self._queue.append((self._wall().unix_s, "management", fields, None))
        self._hurry.set()
        self._wake.set()

    def close(self) -> None:
        """Write what waits, then let the folder go."""
        if self._thread.is_alive():
            self._ending = True
            self._hurry.set()
            self._wake.set()
            self._thread.join()
            self._file.close()
            self._hold.__exit__(None, None, None)

    def _write_on(self) -> None:
        while not self._ending:
            self._wake.wait()
            self._hurry.wait(self._bounds.sync_every_s)  # so that one sync serves many records
            self._hurry.clear()
            self._wake.clear()
            self._write_all()
        self._write_all()

    def _write_all(self) -> None:
        """Everything that waits now, and one sync. What cannot be written is counted; the count is written later."""
        waiting: list[_Done] = []
        error: ConfigError | None = None
        count = len(self._queue)
        dropped, self._dropped = self._dropped, 0
        try:
            if dropped:
                self._add("dropped", self._wall().unix_s, {"records": dropped})
            for _ in range(count):
                at_s, kind, record, done = self._queue.popleft()
                if done is not None:
                    waiting.append(done)
                self._add(kind, at_s, _document(record))
            self._commit()
        except OSError as err:
            error = disk_error(err, self.folder)
            log.error("the audit cannot be written: %s", error)
            self._dropped += dropped + len(self._batch)
            self._batch.clear()
        for done in waiting:
            done.error = error
            done.event.set()

    def _add(self, kind: str, at_s: float, fields: Mapping[str, Any]) -> None:
        """A line for the next commit; a full file is closed before it."""
        head = self._batch[-1][1] if self._batch else self._head
        line, after = link(head, at_s, kind, fields)
        if len(line) > MAX_LINE_BYTES:
            line, after = link(head, at_s, kind, {"too_long": len(line)})
        size_bytes = self._size_bytes + self._batch_bytes
        if size_bytes + len(line) > self._bounds.file_bytes and size_bytes:
            self._commit()
            self._next_file()
        self._batch.append((line, after))
        self._batch_bytes += len(line)

    def _commit(self) -> None:
        """Write and sync the batch as a whole, or leave the file as it was."""
        batch, self._batch_bytes = b"".join(line for line, _ in self._batch), 0
        if not batch:
            return
        try:
            if self._file.write(batch) != len(batch):
                raise OSError(errno.ENOSPC, "a part of a batch only")
            os.fdatasync(self._file.fileno())
        except OSError:
            with suppress(OSError):
                self._file.truncate(self._size_bytes)
            raise
        self._size_bytes += len(batch)
        self._head = self._batch[-1][1]
        self._batch.clear()

    def _next_file(self) -> None:
        files = audit_files(self.folder)
        file = _append(_path(self.folder, _number(files[-1]) + 1))
        self._file.close()
        self._file, self._size_bytes = file, 0
        for old in files[: max(0, len(files) + 1 - self._bounds.files)]:
            old.unlink()

    def _open(self) -> tuple[FileIO, int, Head]:
        try:
            files = audit_files(self.folder)
            path = files[-1] if files else _path(self.folder, 1)
            file = _append(path)
            head, whole_bytes, torn_bytes = _last_line(path, files)
            if torn_bytes:
                file.truncate(whole_bytes)
        except OSError as err:
            raise disk_error(err, self.folder) from err
        if torn_bytes:
            line, head = link(head, self._wall().unix_s, "recovered", {"torn_bytes": torn_bytes})
            file.write(line)
            os.fdatasync(file.fileno())
            whole_bytes += len(line)
        return file, whole_bytes, head


def _document(record: Invocation | Difference | Mapping[str, Any]) -> Mapping[str, Any]:
    if isinstance(record, Invocation):
        return fields_of(record)
    return difference_fields(record) if isinstance(record, Difference) else record


def fields_of(record: Invocation) -> dict[str, Any]:
    """An invocation as it is kept. What left the device shows by sides; what was hidden from them by kinds."""
    caller, spent = record.caller, record.spent
    kinds: dict[str, int] = {}
    for span in record.findings.spans:
        kinds[span.kind] = kinds.get(span.kind, 0) + 1
    return {
        "request_id": record.request_id,
        "tenant": caller.tenant,
        "key_id": caller.key_id,
        "user": _short(caller.user),
        "model": _short(record.model),
        "endpoint": record.endpoint,
        "status": record.status,
        "level": record.level,
        "reason": _short(record.reason),
        "local_only": record.findings.local_only,
        "found": kinds,
        "redacted": record.redacted,
        "cached": record.cached,
        "saved_tokens": record.saved_tokens,
        "prompt_tokens": spent.prompt_tokens,
        "completion_tokens": spent.completion_tokens,
        "cached_tokens": spent.cached_tokens,
        "usd": round(spent.money, 9),
        "sides": [[side, tokens] for side, tokens in spent.sides],
        "ttft_s": None if record.ttft_s is None else round(record.ttft_s, 4),
        "total_s": round(record.total_s, 4),
    }


def verify(folder: Path, wanted: str = "") -> Checked:
    """Go over every line that is kept, oldest first. Raises ConfigError when there is no audit or it cannot be read.

    wanted: a hash that was noted earlier. A last line without its newline belongs to a writer at work and is left out.
    """
    files = audit_files(folder)
    if not files:
        raise ConfigError(f"there is no audit in {folder}", next_step="name the state folder with --state-dir")
    found = Checked()
    for before, path in zip([None, *files], files, strict=False):
        if before is not None and _number(path) != _number(before) + 1:
            log.warning("%s does not follow %s", path.name, before.name)
        found = check(_lines(path), path.name, found, wanted)
        if found.fault is not None:
            break
    return found


def records(folder: Path) -> Iterator[Mapping[str, Any]]:
    """The fields of every line that is whole, oldest first; `midstream audit verify` judges the rest.

    Raises ConfigError when there is no audit or it cannot be read.
    """
    files = audit_files(folder)
    if not files:
        raise ConfigError(f"there is no audit in {folder}", next_step="name the state folder with --state-dir")
    for path in files:
        for line in _lines(path):
            got = read(line)
            if not isinstance(got, str):
                yield got[1]


def audit_files(folder: Path) -> Sequence[Path]:
    """The audit's files, oldest first."""
    return sorted(path for path in folder.glob("audit-*.jsonl") if _NAME.fullmatch(path.name))


def _lines(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            while line := file.readline(MAX_LINE_BYTES + 1):
                if line.endswith(b"\n"):
                    yield line[:-1]
                elif len(line) > MAX_LINE_BYTES:
                    yield line
                    return
    except OSError as err:
        raise disk_error(err, path) from err


def _last_line(path: Path, files: Sequence[Path]) -> tuple[Head, int, int]:
    """Head of the chain, whole bytes of `path`, and torn bytes at its end. Looks into the file before an empty one."""
    size_bytes = path.stat().st_size
    with path.open("rb") as file:
        file.seek(max(0, size_bytes - 2 * MAX_LINE_BYTES))
        tail = file.read()
    torn_bytes = len(tail) - (tail.rfind(b"\n") + 1)
    whole = tail[: len(tail) - torn_bytes]
    while whole:
        line = whole[:-1].rpartition(b"\n")[2]
        got = read(line)
        if not isinstance(got, str):
            return got[0], size_bytes - torn_bytes, torn_bytes
        torn_bytes += len(line) + 1  # blocks of a file may reach the disk in another order than they were written
        whole = whole[: -len(line) - 1]
    if len(files) > 1 and size_bytes == torn_bytes:
        return _last_line(files[-2], files[:-1])[0], 0, torn_bytes
    if size_bytes > torn_bytes:
        raise ConfigError(
            f"{path} is damaged", next_step="move the audit folder away; `midstream audit verify` tells more"
        )
    return Head(), 0, torn_bytes


def _append(path: Path) -> FileIO:
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    return FileIO(handle, "ab")


def _path(folder: Path, number: int) -> Path:
    return folder / f"audit-{number:06}.jsonl"


def _number(path: Path) -> int:
    found = _NAME.fullmatch(path.name)
    return int(found[1]) if found else 0


def _short(text: str | None) -> str | None:
    return text if text is None or len(text) <= MAX_TEXT_CHARS else text[: MAX_TEXT_CHARS - 1] + "…"

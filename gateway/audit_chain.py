"""The audit's lines and their chain: each line carries the hash of the one before it, so none can be changed, taken out
or moved without a trace. Pure.

One line is one JSON object. `seq` counts from 1 over all files, `prev` is the hash of the line before, `hash` comes
last: SHA-256 over the line's bytes up to `,"hash":`. Whoever keeps a hash elsewhere can also prove that nothing was cut
off.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

from attrs import evolve, frozen

FIRST = "0" * 64
"""`prev` of the very first line."""

MAX_LINE_BYTES = 64 << 10
_encode = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode
_TAIL = b',"hash":"'
_TAIL_BYTES = len(_TAIL) + 64 + len(b'"}')


@frozen
class Head:
    """The last line of a chain: its number and its hash."""

    seq: int = 0
    hash: str = FIRST


@frozen
class Fault:
    """Where a chain is broken. line: from 1, in its file."""

    file: str
    line: int
    what: str


def link(head: Head, at_s: float, kind: str, fields: Mapping[str, Any]) -> tuple[bytes, Head]:
    """The next line, with its newline, and the chain's new head. at_s: wall seconds."""
    document = {"seq": head.seq + 1, "at_s": round(at_s, 3), "kind": kind, **fields, "prev": head.hash}
    body = _encode(document).encode("utf-8", "replace")[:-1]
    digest = hashlib.sha256(body).hexdigest()
    return body + _TAIL + digest.encode() + b'"}\n', Head(head.seq + 1, digest)


def read(line: bytes) -> tuple[Head, Mapping[str, Any]] | str:
    """A line (without its newline) as the head it makes and its fields, or what is wrong with it by itself."""
    body, tail = line[:-_TAIL_BYTES], line[-_TAIL_BYTES:]
    if not (tail.startswith(_TAIL) and tail.endswith(b'"}')):
        return "it does not end with its hash"
    digest = tail[len(_TAIL) : -2].decode("ascii", "replace")
    if hashlib.sha256(body).hexdigest() != digest:
        return "its hash does not fit its content"
    try:
        fields = json.loads(body + b"}")
        return Head(int(fields["seq"]), digest), fields
    except (ValueError, KeyError, TypeError):
        return "it is no JSON object with a number"


@frozen
class Checked:
    """What a look over lines found. first_seq: of the oldest line that is still there; lines: how many were right."""

    head: Head = Head()
    first_seq: int = 0
    lines: int = 0
    fault: Fault | None = None
    seen: bool = False


def check(lines: Iterable[bytes], file: str, before: Checked, wanted: str = "") -> Checked:
    """Go over the lines of one file after those of `before`. wanted: a hash that somebody kept; `seen`: it is there.

    The oldest file may begin anywhere, for older ones are removed in time; from there on nothing may be missing.
    """
    found = before
    for number, line in enumerate(lines, start=1):
        got = read(line)
        if isinstance(got, str):
            return evolve(found, fault=Fault(file, number, got))
        head, fields = got
        if found.lines and (fields.get("prev") != found.head.hash or head.seq != found.head.seq + 1):
            what = f"line {head.seq} does not follow line {found.head.seq}"
            return evolve(found, fault=Fault(file, number, what))
        if not found.lines and head.seq == 1 and fields.get("prev") != FIRST:
            return evolve(found, fault=Fault(file, number, "the first line names one before it"))
        seen = found.seen or (bool(wanted) and wanted in (head.hash, fields.get("prev")))
        found = evolve(found, head=head, lines=found.lines + 1, first_seq=found.first_seq or head.seq, seen=seen)
    return found

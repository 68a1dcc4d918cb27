"""The examples of docs/handoff-protocol.md are frames of this release."""

from __future__ import annotations

import re
from pathlib import Path

from protocol.handoff import Ack, Extend, Prepare, Query, Ready, Refuse, Resume, Start, Stop, Tokens
from protocol.handoff_headers import HandoffReader, HandoffWriter, whole_frame

DOCUMENT = Path(__file__).parents[3] / "docs" / "handoff-protocol.md"
WHOLE = re.compile(r"^(01 [0-9a-f]{2} [0-9a-f]{32} [0-9a-f]{8}) \| (.+)$", re.MULTILINE)
SENT = re.compile(r"^([0-9a-f]{2} [0-9a-f ]+) \| (.+?)  +(\w+)", re.MULTILINE)
JSON = re.compile(r"\{.*\}")


def example(header: str, body: str) -> bytes:
    text = JSON.search(body)
    if text is None:
        return bytes.fromhex(header) + bytes.fromhex(body)
    before, after = body[: text.start()], body[text.end() :]
    return bytes.fromhex(header) + bytes.fromhex(before) + text.group().encode() + bytes.fromhex(after)


def examples() -> tuple[str, str]:
    """Those of single frames, and those of a connection."""
    single, _, connection = DOCUMENT.read_text().partition("What a client sends over one connection")
    return single, connection


def test_every_example_is_what_the_code_writes() -> None:
    found = [example(header, body) for header, body in WHOLE.findall(examples()[0])]
    frames = [HandoffReader().decode(data) for data in found]
    assert {type(framed.frame) for framed in frames} == {Prepare, Extend, Ready, Start, Tokens, Ack, Resume, Refuse}
    assert [whole_frame(framed.stream, framed.epoch, framed.frame) for framed in frames] == found


def test_the_example_of_a_connection_is_what_the_code_writes_in_that_order() -> None:
    lines = SENT.findall(examples()[1])
    found = [example(header, body) for header, body, _ in lines]
    reader, writer = HandoffReader(), HandoffWriter()
    frames = [reader.decode(data) for data in found]
    assert [type(framed.frame) for framed in frames] == [Start, Ack, Extend, Extend, Ack, Resume, Stop, Query]
    assert [type(framed.frame).__name__ for framed in frames] == [name for _, _, name in lines]
    assert len({framed.stream for framed in frames}) == 3
    for framed, data in zip(frames, found, strict=True):
        assert writer.encode(framed.stream, framed.epoch, framed.frame) == data
        writer.sent()

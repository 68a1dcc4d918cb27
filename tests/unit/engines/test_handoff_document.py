"""The examples of docs/handoff-protocol.md are frames of this release."""

from __future__ import annotations

import re
from pathlib import Path

from protocol.handoff import Ack, Extend, Prepare, Ready, Refuse, Resume, Start, Tokens, decode, encode

DOCUMENT = Path(__file__).parents[3] / "docs" / "handoff-protocol.md"
LINE = re.compile(r"^(01 [0-9a-f]{2} [0-9a-f]{32} [0-9a-f]{8}) \| (.+)$", re.MULTILINE)
JSON = re.compile(r"\{.*\}")


def example(header: str, body: str) -> bytes:
    text = JSON.search(body)
    if text is None:
        return bytes.fromhex(header) + bytes.fromhex(body)
    before, after = body[: text.start()], body[text.end() :]
    return bytes.fromhex(header) + bytes.fromhex(before) + text.group().encode() + bytes.fromhex(after)


def test_every_example_is_what_the_code_writes() -> None:
    found = [example(header, body) for header, body in LINE.findall(DOCUMENT.read_text())]
    frames = [decode(data) for data in found]
    assert {type(framed.frame) for framed in frames} == {Prepare, Extend, Ready, Start, Tokens, Ack, Resume, Refuse}
    assert [encode(framed.stream, framed.epoch, framed.frame) for framed in frames] == found

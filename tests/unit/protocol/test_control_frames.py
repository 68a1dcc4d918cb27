"""Control frames: what is read, what is refused, and that numbered frames arrive once."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.control_frames import (
    Ack,
    Beat,
    Bye,
    Frame,
    Hello,
    Instruction,
    Outbox,
    Result,
    Welcome,
    read_frame,
    write_frame,
)
from protocol.errors import Full, ProtocolError, TooLarge

FRAMES: list[Frame] = [
    Hello(session="0" * 32, device="pi", received=3, engines=("device",), models=("m",)),
    Welcome(received=7, heartbeat_s=15.0, resumed=True, lost=2),
    Instruction(seq=1, id="x", do="warm", target="device", model="m", reason="why"),
    Result(seq=2, of="x", kind="done", body={"cold_ttft_ms": 1.5, "list": [1, "a"]}),
    Ack(seq=9),
    Beat(),
    Bye(reason="end"),
]


@pytest.mark.parametrize("frame", FRAMES)
def test_frames_come_back_as_they_went(frame: Frame) -> None:
    assert read_frame(write_frame(frame)) == frame


@pytest.mark.parametrize(
    ("data", "field"),
    [
        (b"[]", "type"),
        (b'{"type":3}', "type"),
        (b'{"type":"ack"}', "seq"),
        (b'{"type":"ack","seq":-1}', "seq"),
        (b'{"type":"ack","seq":true}', "seq"),
        (b'{"type":"hello","schema":"midstream.channel/1.0","session":"short"}', "session"),
        (b'{"type":"hello","schema":"midstream.channel/2.0","session":"' + b"0" * 32 + b'"}', "schema"),
        (b'{"type":"instruct","id":"x","do":"explode"}', "do"),
    ],
)
def test_bad_frames_name_their_field(data: bytes, field: str) -> None:
    with pytest.raises(ProtocolError) as caught:
        read_frame(data)
    assert caught.value.field == field


def test_frames_of_unknown_kind_are_passed_over_and_large_ones_refused() -> None:
    assert read_frame(b'{"type":"tomorrow","x":1}') is None
    with pytest.raises(TooLarge):
        read_frame(b'{"type":"bye","reason":"' + b"x" * (70 << 10) + b'"}')
    with pytest.raises(ProtocolError, match="in parts"):
        write_frame(Result(of="x", kind="part", body={"text": "x" * (70 << 10)}))


def test_a_full_outbox_refuses_and_keeps_what_it_has() -> None:
    box = Outbox(limit=2)
    box.put(Result(of="a", kind="part"))
    box.put(Result(of="b", kind="part"))
    with pytest.raises(Full):
        box.put(Result(of="c", kind="part"))
    assert (len(box), box.last) == (2, 2)
    with pytest.raises(Full, match="acknowledgement") as full:
        box.put(Result(of="c", kind="part"))
    assert "ack" in full.value.next_step
    box.acknowledge(1)
    box.put(Result(of="c", kind="part"))
    assert [getattr(read_frame(data), "of", "") for data in box.waiting()] == ["b", "c"]


@pytest.mark.parametrize(
    ("received", "lost", "waiting"),
    [
        (0, 3, [(1, "3"), (2, "4"), (3, "5")]),
        (2, 1, [(3, "3"), (4, "4"), (5, "5")]),
        (3, 0, [(4, "3"), (5, "4"), (6, "5")]),
        (5, 0, [(6, "5")]),
        (90, 3, [(91, "3"), (92, "4"), (93, "5")]),
    ],
    ids=["restarted", "one-of-them", "all-of-them", "more", "forgotten"],
)
def test_dropped_frames_leave_no_gap_and_are_counted_unless_they_had_arrived(
    received: int, lost: int, waiting: list[tuple[int, str]]
) -> None:
    box = Outbox()
    for number in range(6):
        box.put(Result(of=str(number), kind="part"))
    for _ in range(3):
        box.drop_first()
    box.resume(received)
    frames = [read_frame(data) for data in box.waiting()]
    assert [(frame.seq, frame.of) for frame in frames if isinstance(frame, Result)] == waiting
    assert box.lost == lost


def test_what_was_lost_stays_to_be_told_until_somebody_told_it() -> None:
    box = Outbox()
    for number in range(4):
        box.put(Result(of=str(number), kind="part"))
    box.drop_first()
    box.drop_first()
    for _ in range(2):  # the welcome to the first of the two never arrived
        box.resume(0)
        assert box.lost == 2
    assert [number for number, _ in box.numbered(1)] == [2]


def test_frames_that_are_not_wanted_any_more_are_taken_out_of_the_line() -> None:
    box = Outbox()
    for name in ("a", "b", "a", "c"):
        box.put(Result(of=name, kind="part"))
    box.resume(1)
    box.keep(lambda frame: isinstance(frame, Result) and frame.of != "a")
    frames = [read_frame(data) for data in box.waiting()]
    assert [(frame.seq, frame.of) for frame in frames if isinstance(frame, Result)] == [(2, "b"), (3, "c")]
    assert (box.last, box.lost) == (3, 0)


@given(st.integers(0, 2**32), st.integers(1, 60))
def test_over_any_cuts_every_number_arrives_once_and_in_order(seed: int, count: int) -> None:
    draw, box, taken = random.Random(seed), Outbox(), []
    sent: list[bytes] = []
    for number in range(count):
        sent.append(box.put(Result(of=str(number), kind="part")))
        if draw.random() < 0.3:  # the connection breaks: some of what was sent never arrives, some acks neither
            sent = sent[: draw.randint(0, len(sent))]
        for data in sent:
            frame = read_frame(data)
            assert isinstance(frame, Result)
            if frame.seq == len(taken) + 1:
                taken.append(frame.of)
        if draw.random() < 0.5:
            box.acknowledge(len(taken))
        sent = list(box.waiting())
    for data in box.waiting():
        frame = read_frame(data)
        assert isinstance(frame, Result)
        if frame.seq == len(taken) + 1:
            taken.append(frame.of)
    assert taken == [str(number) for number in range(count)]

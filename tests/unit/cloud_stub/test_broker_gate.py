"""The gate's rules over CONNECT and topics."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloud_stub.broker_gate import (
    BAD_VERSION_V5,
    NOT_AUTHORISED_V4,
    judge,
    may_publish,
    may_read,
    parse_connect,
    publish_topic,
    remaining_length,
    without_keepalive,
)
from protocol.errors import ProtocolError


def text(value: str) -> bytes:
    raw = value.encode()
    return len(raw).to_bytes(2, "big") + raw


def connect(client_id: str = "pi-1", level: int = 4, will: str | None = None, keepalive_s: int = 60) -> bytes:
    flags = 0x02 | (0x04 if will else 0)
    body = text("MQTT") + bytes([level, flags]) + keepalive_s.to_bytes(2, "big")
    body += b"\0" if level == 5 else b""
    body += text(client_id) + (text(will) + text("gone") if will else b"")
    return bytes([0x10, len(body)]) + body


def test_reads_what_decides() -> None:
    found = parse_connect(connect(will="midstream/v1/lab/pi-1/state", keepalive_s=300))
    assert (found.level, found.client_id, found.keepalive_s) == (4, "pi-1", 300)
    assert found.will_topic == "midstream/v1/lab/pi-1/state"
    rewritten = without_keepalive(connect(keepalive_s=300), found)
    assert parse_connect(rewritten).keepalive_s == 0
    assert len(rewritten) == len(connect())


def test_only_the_certificates_owner_connects() -> None:
    assert judge(parse_connect(connect("pi-1")), "pi-1", "lab") is None
    assert judge(parse_connect(connect("pi-1:doctor")), "pi-1", "lab") is None
    for wrong in ("pi-2", "", "pi-1x", "coordinator"):
        refused = judge(parse_connect(connect(wrong)), "pi-1", "lab")
        assert refused is not None and refused.answer == NOT_AUTHORISED_V4


def test_a_will_on_anothers_topic_is_refused() -> None:
    own, other = "midstream/v1/lab/pi-1/state", "midstream/v1/lab/_coord/state"
    assert judge(parse_connect(connect(will=own)), "pi-1", "lab") is None
    assert judge(parse_connect(connect(will=other)), "pi-1", "lab") is not None
    assert judge(parse_connect(connect("coordinator", will=other)), "coordinator", "lab") is None


def test_mqtt_5_is_told_to_step_down() -> None:
    refused = judge(parse_connect(connect(level=5)), "pi-1", "lab")
    assert refused is not None and refused.answer == BAD_VERSION_V5


@pytest.mark.parametrize(
    ("topic", "writes", "reads"),
    [
        ("midstream/v1/lab/pi-1/state", True, True),
        ("midstream/v1/lab/pi-1/profile", True, True),
        ("midstream/v1/lab/pi-1/policy/reported", True, True),
        ("midstream/v1/lab/pi-1/tele/canary", True, True),
        ("midstream/v1/lab/pi-1/signal/offer", True, True),
        ("midstream/v1/lab/pi-1/signal/answer", False, True),
        ("midstream/v1/lab/pi-2/signal/offer", False, False),
        ("midstream/v1/lab/pi-1/policy/desired", False, True),
        ("midstream/v1/lab/pi-1/later/+", False, True),
        ("midstream/v1/lab/_coord/state", False, True),
        ("midstream/v1/lab/pi-2/state", False, False),
        ("midstream/v1/lab/+/state", False, False),
        ("midstream/v1/other/pi-1/state", False, False),
        ("midstream/v1/lab/pi-10/state", False, False),
        ("#", False, False),
        ("$SYS/#", False, False),
    ],
)
def test_topic_rules_of_a_device(topic: str, writes: bool, reads: bool) -> None:
    assert may_publish("pi-1", "lab", topic) is writes
    assert may_read("pi-1", "lab", topic) is reads


def test_lengths_and_publish_topics() -> None:
    assert remaining_length(b"\x80\x01") == (128, 2)
    assert remaining_length(b"\x80") is None
    with pytest.raises(ProtocolError):
        remaining_length(b"\xff\xff\xff\xff")
    body = text("a/b") + b"payload"
    assert publish_topic(bytes([0x31, len(body)]) + body) == ("a/b", 0)
    assert publish_topic(bytes([0x32, len(body)]) + body) == ("a/b", 1)
    assert publish_topic(b"\xd0\x00") is None


@given(st.binary(max_size=200))
def test_garbage_is_a_protocol_error_or_a_reading(data: bytes) -> None:
    for packet in (data, b"\x10" + data, connect()[:12] + data):
        try:
            parse_connect(packet)
        except ProtocolError:
            pass

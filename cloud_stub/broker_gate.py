"""Who may enter the embedded broker and what each may read and write: pure rules over MQTT 3.1.1 packets.

The embedded broker looks at credentials only after a newcomer has taken over the session of the same client id, sends
wills and retained messages past its own access rules, and never ends a silent connection. So identity is settled here,
on the bytes of CONNECT and the client certificate, before the broker sees the connection; see MQTT 3.1.1, section 3.1.
"""

from __future__ import annotations

from attrs import frozen

from cloud_stub.authority import OWN_NAME
from protocol.errors import MidstreamError, ProtocolError
from protocol.topics import ROOT, Topics, coord_state

MAX_CONNECT_BYTES = 16 << 10
"""A CONNECT of ours has a will of a hundred bytes; nothing legitimate comes near."""

MAX_PACKET_BYTES = 256 << 10
"""Four times the largest document; a longer packet ends the connection before it is read."""

NOT_AUTHORISED_V4 = b"\x20\x02\x00\x05"
BAD_VERSION_V4 = b"\x20\x02\x00\x01"
BAD_VERSION_V5 = b"\x20\x03\x00\x84\x00"
"""CONNACK of MQTT 5 with reason 0x84, by which a client learns to step down to 3.1.1."""

CONNECT_BYTE = 0x10
"""The whole first byte of a CONNECT: its flags are zero."""

_CONNECT, _PUBLISH = 1, 3


@frozen
class Connect:
    """The parts of CONNECT that decide. Fields after `level` are meaningful for level 4 only."""

    level: int
    client_id: str = ""
    keepalive_s: int = 0
    keepalive_at: int = 0
    will_topic: str | None = None


@frozen
class Refused:
    """`answer` is the CONNACK to send."""

    answer: bytes
    reason: str


def remaining_length(data: bytes) -> tuple[int, int] | None:
    """(value, bytes used) of the length field at the start of `data`, None while it is incomplete (section 2.2.3)."""
    value = 0
    for at in range(4):
        if at >= len(data):
            return None
        value |= (data[at] & 0x7F) << (7 * at)
        if not data[at] & 0x80:
            return value, at + 1
    raise ProtocolError("the packet length of MQTT has at most four bytes", field="remaining_length")


def parse_connect(packet: bytes) -> Connect:
    """Take a whole CONNECT packet apart. Raises ProtocolError."""
    if not packet or packet[0] >> 4 != _CONNECT:
        raise ProtocolError("the first packet is not a CONNECT", field="packet")
    length = remaining_length(packet[1:5])
    if length is None:
        raise ProtocolError("the CONNECT is cut short", field="packet")
    reader = _Reader(packet, 1 + length[1])
    name, level = reader.text(), reader.byte()
    if name not in ("MQTT", "MQIsdp"):
        raise ProtocolError(f"protocol name {name[:16]!r} is not MQTT", field="protocol_name")
    if name != "MQTT" or level != 4:
        return Connect(level if name == "MQTT" else 3)
    flags = reader.byte()
    keepalive_at = reader.at
    keepalive_s = reader.byte() << 8 | reader.byte()
    client_id = reader.text()
    will = reader.text() if flags & 0x04 else None
    return Connect(4, client_id, keepalive_s, keepalive_at, will)


def judge(connect: Connect, certificate_name: str, fleet: str) -> Refused | None:
    """None when the holder of the certificate may connect like this."""
    if connect.level == 5:
        return Refused(BAD_VERSION_V5, "speaks MQTT 5; this broker has 3.1.1")
    if connect.level != 4:
        return Refused(BAD_VERSION_V4, f"speaks protocol level {connect.level}; this broker has 3.1.1")
    if device_of(connect.client_id) != certificate_name:
        return Refused(NOT_AUTHORISED_V4, f"client id {connect.client_id[:64]!r} is not the certificate's name")
    if connect.will_topic is not None and not may_publish(certificate_name, fleet, connect.will_topic):
        return Refused(NOT_AUTHORISED_V4, f"its will goes to {connect.will_topic[:128]!r}")
    return None


def without_keepalive(packet: bytes, connect: Connect) -> bytes:
    """The CONNECT with a keep-alive of 0: the gate watches silence itself, with the 1.5 of section 3.1.2.10."""
    return packet[: connect.keepalive_at] + b"\0\0" + packet[connect.keepalive_at + 2 :]


def device_of(client_id: str) -> str:
    """The device behind a client id: `name`, or `name:purpose` for a second session of the same device."""
    return client_id.partition(":")[0]


def may_publish(name: str, fleet: str, topic: str) -> bool:
    """A device writes its own documents; the coordinator anything of the fleet."""
    if name == OWN_NAME:
        return topic.startswith(f"{ROOT}/{fleet}/")
    own = _topics(fleet, name)
    if own is None:
        return False
    return topic in (own.state, own.profile, own.policy_reported, own.signal_offer) or topic.startswith(
        f"{own.root}/tele/"
    )


def may_read(name: str, fleet: str, pattern: str) -> bool:
    """A device reads what stands below its own root, and where the coordinator is; wildcards only below its root."""
    if name == OWN_NAME:
        return pattern.startswith(f"{ROOT}/{fleet}/")
    own = _topics(fleet, name)
    return own is not None and (pattern.startswith(f"{own.root}/") or pattern == coord_state(fleet))


def publish_topic(packet: bytes) -> tuple[str, int] | None:
    """(topic, QoS) if `packet` is a PUBLISH, else None."""
    if not packet or packet[0] >> 4 != _PUBLISH:
        return None
    length = remaining_length(packet[1:5])
    if length is None:
        return None
    return _Reader(packet, 1 + length[1]).text(), packet[0] >> 1 & 0x03


def _topics(fleet: str, name: str) -> Topics | None:
    try:
        return Topics(fleet, name)
    except MidstreamError:
        return None


class _Reader:
    """Bounded reading of one packet."""

    def __init__(self, data: bytes, at: int) -> None:
        self._data = data
        self.at = at

    def byte(self) -> int:
        if self.at >= len(self._data):
            raise ProtocolError("the packet is cut short", field="packet")
        self.at += 1
        return self._data[self.at - 1]

    def text(self) -> str:
        size = self.byte() << 8 | self.byte()
        if self.at + size > len(self._data):
            raise ProtocolError("the packet is cut short", field="packet")
        raw = self._data[self.at : self.at + size]
        self.at += size
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as err:
            raise ProtocolError("a string of the packet is not UTF-8", field="packet") from err

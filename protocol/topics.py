"""MQTT topic names: `midstream/v1/{fleet}/{device}/...`, one document per topic."""

from __future__ import annotations

import re
from typing import Literal

from attrs import field, frozen

from protocol.errors import ProtocolError

ROOT = "midstream/v1"
COORDINATOR = "_coord"
"""Stands where a device id would; ids never begin with an underscore."""

MAX_PAYLOAD_BYTES = 64 << 10
"""Largest document on a topic; larger messages are dropped unread."""

Kind = Literal[
    "state", "profile", "policy/desired", "policy/reported", "signal/offer", "signal/answer", "tele"
]  # fmt: skip

_ID = re.compile(r"[a-z0-9-]{1,32}", re.ASCII)


def check_id(text: str, *, what: str = "id") -> str:
    """`text` if it may name a fleet or device ([a-z0-9-], 1 to 32 of them); raises ProtocolError otherwise."""
    if not _ID.fullmatch(text):
        raise ProtocolError(
            f"{what} {text[:64]!r} is not valid",
            next_step="use 1 to 32 of the characters a-z, 0-9 and '-'",
            field=what,
        )
    return text


def _checked(instance: object, attribute: object, text: str) -> None:
    check_id(text, what=getattr(attribute, "name", "id"))


@frozen
class Topics:
    """All topics of one device."""

    fleet: str = field(validator=_checked)
    device_id: str = field(validator=_checked)

    @property
    def root(self) -> str:
        return f"{ROOT}/{self.fleet}/{self.device_id}"

    @property
    def state(self) -> str:
        """Retained presence: birth, goodbye, and the broker's will."""
        return f"{self.root}/state"

    @property
    def profile(self) -> str:
        """Retained registration: profile, endpoints, models."""
        return f"{self.root}/profile"

    @property
    def policy_desired(self) -> str:
        """Retained signed policy, written by the coordinator."""
        return f"{self.root}/policy/desired"

    @property
    def policy_reported(self) -> str:
        """Retained answer of the device: what is in force and why not what was asked."""
        return f"{self.root}/policy/reported"

    @property
    def signal_offer(self) -> str:
        """Signed offer of a WebRTC connection, written by the device; not retained."""
        return f"{self.root}/signal/offer"

    @property
    def signal_answer(self) -> str:
        """The coordinator's signed answer or refusal; not retained."""
        return f"{self.root}/signal/answer"

    def tele(self, kind: str) -> str:
        """Telemetry of one kind; not retained."""
        return f"{self.root}/tele/{check_id(kind, what='kind')}"


def coord_state(fleet: str) -> str:
    """Retained addresses of the coordinator, for networks without mDNS."""
    return f"{ROOT}/{check_id(fleet, what='fleet')}/{COORDINATOR}/state"


def fleet_pattern(fleet: str, kind: Kind) -> str:
    """Subscription over all devices of a fleet; `tele` covers every kind below."""
    tail = f"{kind}/+" if kind == "tele" else kind
    return f"{ROOT}/{check_id(fleet, what='fleet')}/+/{tail}"


@frozen
class ParsedTopic:
    """`name` is the telemetry kind, else empty. `device_id` is `_coord` for the coordinator's own."""

    fleet: str
    device_id: str
    kind: Kind
    name: str = ""


def parse(topic: str) -> ParsedTopic:
    """Take a topic of ours apart. Raises ProtocolError for any other."""
    parts = topic.split("/")
    if len(parts) < 5 or "/".join(parts[:2]) != ROOT:
        raise ProtocolError(f"topic {topic[:128]!r} is not one of ours", field="topic")
    fleet, device_id, rest = check_id(parts[2], what="fleet"), parts[3], "/".join(parts[4:])
    if device_id == COORDINATOR and rest == "state":
        return ParsedTopic(fleet, device_id, "state")
    check_id(device_id, what="device_id")
    if rest in ("state", "profile", "policy/desired", "policy/reported", "signal/offer", "signal/answer"):
        return ParsedTopic(fleet, device_id, rest)  # type: ignore[arg-type]
    if len(parts) == 6 and parts[4] == "tele":
        return ParsedTopic(fleet, device_id, "tele", check_id(parts[5], what="kind"))
    raise ProtocolError(f"topic {topic[:128]!r} is not one of ours", field="topic")

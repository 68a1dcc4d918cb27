"""Settings of the control channel."""

from __future__ import annotations

import ssl as ssl_module
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from attrs import field, frozen

from links.port import Delivery
from links.session import DEFAULT_RULES, SessionRules

MAX_CONTROL_BYTES = 8 << 10


@frozen
class MqttPace:
    """How often the channel may use the network from now on; a keepalive holds for the connections that follow."""

    keepalive_s: int
    rules: SessionRules
    may_dial: bool = True


@frozen
class MqttSettings:
    """How to reach the broker and who we are.

    client_id: the same for every start of this device: the broker keeps our session under it.
    will: published by the broker when we vanish, `will_delay_s` later (MQTT 5 only; at once on 3.1.1).
    session_expiry_s: how long the broker keeps messages for us while we are away (MQTT 5; on 3.1.1 its own limit).
    max_payload_bytes: longer messages are refused both ways.
    connect_s: longest wait for name, TCP and TLS, and then for the broker's welcome.
    welcome_s: a broker that says nothing for so long to the very first MQTT 5 attempt is tried with 3.1.1.
    outbox_path: database of unsent messages; None keeps them in memory.
    durable_over_s: messages that expire sooner than this are not worth a write to disk.
    pace: asked before each attempt where a host saves power; its keepalive and rules replace those here.
    """

    host: str
    port: int
    client_id: str
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    ssl: ssl_module.SSLContext | None = None
    will: Delivery | None = None
    will_delay_s: float = 0.0
    keepalive_s: int = 30
    session_expiry_s: int = 86_400
    connect_s: float = 15.0
    welcome_s: float = 2.0
    max_payload_bytes: int = MAX_CONTROL_BYTES
    outbox_path: Path | None = None
    outbox_count: int = 1000
    outbox_bytes: int = 4 << 20
    durable_over_s: float = 120.0
    version: Literal[4, 5] = 5
    rules: SessionRules = DEFAULT_RULES
    pace: Callable[[], MqttPace] | None = None

    def paced(self) -> MqttPace:
        """The pace now."""
        return MqttPace(self.keepalive_s, self.rules) if self.pace is None else self.pace()

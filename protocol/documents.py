"""Documents on MQTT topics and on the join endpoint; decode them with protocol.decode.

The address of a coordinator is `addresses` x `port`; `fingerprint` is the SHA-256 of the fleet CA in lower-case hex.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from attrs import field, frozen

from protocol.device import DeviceProfile

PRESENCE_SCHEMA = "midstream.presence/1.0"
COORDINATOR_SCHEMA = "midstream.coordinator/1.0"
REGISTRATION_SCHEMA = "midstream.registration/1.0"
REPORTED_SCHEMA = "midstream.reported/1.0"
TELEMETRY_SCHEMA = "midstream.telemetry/1.0"
JOIN_SCHEMA = "midstream.join/1.0"
INFO_SCHEMA = "midstream.info/1.0"


@frozen(kw_only=True)
class Presence:
    """Retained on `state`. Birth and will of one session carry the same epoch, so an overtaken will is recognised.

    s: online, draining, sleeping or offline. boot: random id of the process. at: wall seconds, 0 when unknown.
    """

    s: Literal["online", "draining", "sleeping", "offline"]
    epoch: int
    boot: str = ""
    at: float = 0.0
    schema: str = PRESENCE_SCHEMA


@frozen(kw_only=True)
class CoordinatorState:
    """Retained on `_coord/state`: where the coordinator is reached. Candidates only: TLS identity decides.

    broker_version: the newest MQTT version that its broker speaks: 5, or 4 for 3.1.1. webrtc: it answers offers.
    """

    addresses: tuple[str, ...]
    port: int
    broker_port: int
    fingerprint: str
    epoch: int
    broker_version: Literal[4, 5] = 5
    webrtc: bool = False
    schema: str = COORDINATOR_SCHEMA


@frozen(kw_only=True)
class Registration:
    """Retained on `profile`: who this is, what it runs, what it can answer."""

    profile: DeviceProfile
    epoch: int
    version: str = ""
    models: tuple[str, ...] = ()
    endpoints: Mapping[str, str] = field(factory=dict)
    policy_version: int = 0
    schema: str = REGISTRATION_SCHEMA


@frozen(kw_only=True)
class Reported:
    """Retained on `policy/reported`: the judgement over the last document seen, and what is in force.

    code: a reason code of protocol.acceptance. sections: section name -> `applied`, `clamped: ...` or `failed: ...`.
    held_version: the version in force after the judgement. ignored: fields of the document that were not understood.
    """

    version: int
    epoch: int
    accepted: bool
    code: str
    detail: str = ""
    sections: Mapping[str, str] = field(factory=dict)
    held_version: int = 0
    ignored: tuple[str, ...] = ()
    schema: str = REPORTED_SCHEMA


@frozen(kw_only=True)
class Telemetry:
    """On `tele/<kind>`: counters and gauges since `boot`; numbers and ids only."""

    kind: str
    at: float
    boot: str
    values: Mapping[str, float] = field(factory=dict)
    labels: Mapping[str, str] = field(factory=dict)
    schema: str = TELEMETRY_SCHEMA


@frozen(kw_only=True)
class JoinRequest:
    """POST /midstream/v1/join: the one-time secret of the join string and a certificate request; the key stays here."""

    secret: str = field(repr=False)
    device_id: str
    csr_pem: str
    schema: str = JOIN_SCHEMA


@frozen(kw_only=True)
class JoinAnswer:
    """The certificate and what to trust from now on. `policy_keys`: key id -> Ed25519 public key (32 bytes).

    broker_host None: the coordinator's own address. broker_tls: whether the broker expects TLS. broker_version: the
    newest MQTT version it speaks: 5, or 4 for 3.1.1. Credentials are for brokers without client certificates.
    """

    cert_pem: str
    ca_pem: str
    policy_keys: Mapping[str, bytes]
    fleet: str
    broker_port: int
    broker_host: str | None = None
    broker_tls: bool = True
    broker_version: Literal[4, 5] = 5
    mqtt_username: str | None = None
    mqtt_password: str | None = field(default=None, repr=False)
    schema: str = JOIN_SCHEMA


@frozen(kw_only=True)
class CoordinatorInfo:
    """GET /midstream/v1/info, for members of the fleet: where the broker is now, in the terms of the join answer."""

    fleet: str
    broker_port: int
    broker_host: str | None = None
    broker_tls: bool = True
    broker_version: Literal[4, 5] = 5
    schema: str = INFO_SCHEMA

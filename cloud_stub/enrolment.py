"""POST /midstream/v1/join: a one-time secret and a certificate request in, a certificate and trust anchors out.

The device's key never leaves the device. Order matters: cheap checks and the secret come before any cryptography, the
secret is bound durably before the certificate is given away, so a crash can only lead to a repeat by the same device.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Literal

from attrs import frozen

from cloud_stub.authority import OWN_NAME, Authority
from cloud_stub.certificates import CheckedRequest, check_request
from cloud_stub.join_secrets import JoinSecrets, SecretRecord
from cloud_stub.registry import DeviceRegistry
from protocol.clock import WallClock
from protocol.decode import check_schema
from protocol.documents import JOIN_SCHEMA, JoinAnswer, JoinRequest
from protocol.errors import NotAllowed
from protocol.topics import check_id

EMBEDDED_BROKER_VERSION: Literal[4] = 4
"""amqtt speaks MQTT 3.1.1; devices are told, so that they need not find out by waiting for it."""


@frozen
class BrokerAddress:
    """Where devices find the broker, and how it is spoken to; host None: at the coordinator's own address.

    version: the newest MQTT version it speaks: 5, or 4 for 3.1.1.
    """

    host: str | None
    port: int
    tls: bool = True
    version: Literal[4, 5] = 5


class Enrolment:
    """Judges join requests."""

    def __init__(
        self,
        authority: Authority,
        secrets: JoinSecrets,
        registry: DeviceRegistry,
        broker: Callable[[], BrokerAddress],
        wall: WallClock,
    ) -> None:
        self._authority = authority
        self._secrets = secrets
        self._registry = registry
        self._broker = broker
        self._wall = wall
        self._one_at_a_time = asyncio.Lock()

    async def join(self, request: JoinRequest) -> JoinAnswer:
        """Issue a certificate. Raises ProtocolError (field named), NotAllowed, Full or ConfigError (disk).

        One after the other. Secrets and cryptography are a thread's work, the registry is used on the event loop only.
        """
        now_s = self._wall().unix_s
        check_schema(request.schema, JOIN_SCHEMA)
        device_id = check_id(request.device_id, what="device_id")
        if device_id == OWN_NAME:
            raise NotAllowed(f"the id {OWN_NAME!r} is taken", next_step="choose another device_id", field="device_id")
        async with self._one_at_a_time:
            record, checked = await asyncio.to_thread(self._examine, request, now_s)
            self._check_known(device_id, checked.key_sha256)
            certificate = await asyncio.to_thread(self._issue, record, checked, device_id, now_s)
            self._check_known(device_id, checked.key_sha256)  # it may have been revoked meanwhile
            self._registry.enrol(device_id, checked.key_sha256, now_s)
        broker = self._broker()
        return JoinAnswer(
            cert_pem=certificate,
            ca_pem=self._authority.ca_pem,
            policy_keys=self._authority.policy_keys,
            fleet=self._authority.fleet,
            broker_port=broker.port,
            broker_host=broker.host,
            broker_tls=broker.tls,
            broker_version=broker.version,
        )

    def _examine(self, request: JoinRequest, now_s: float) -> tuple[SecretRecord, CheckedRequest]:
        record = self._secrets.check(request.secret, request.device_id, now_s)
        return record, check_request(request.csr_pem, request.device_id)

    def _issue(self, record: SecretRecord, checked: CheckedRequest, device_id: str, now_s: float) -> str:
        self._secrets.redeem(record, device_id, checked.key_sha256)
        return self._authority.issue(checked, now_s)

    def _check_known(self, device_id: str, key_sha256: str) -> None:
        if self._registry.was_revoked(key_sha256):
            raise NotAllowed(
                "a device with this key was revoked",
                next_step="if it may come back: remove its identity folder, so that it makes a new key, and join again",
                field="csr_pem",
            )
        known = self._registry.device(device_id)
        if known is None:
            return
        if known.revoked:
            raise NotAllowed(
                f"device {device_id} was revoked",
                next_step=f"join with a new identity under another device_id; {_forget(device_id)} frees the id, "
                "its old key stays refused",
                field="device_id",
            )
        if known.key_sha256 not in (None, key_sha256):
            raise NotAllowed(
                f"device {device_id} has already joined with another key",
                next_step=f"choose another device_id, or free it: {_forget(device_id)}",
                field="device_id",
            )


def _forget(device_id: str) -> str:
    return f"`midstream fleet forget {device_id}`"

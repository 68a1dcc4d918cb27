"""Who this device is: its id, its key, its certificate and what it trusts, on disk and durable.

The key is made here and never leaves. One document (`enrolment.json`) holds everything that must agree, so that a power
cut leaves the old enrolment or the new one; the certificate file that TLS needs is written from it.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from attrs import field, frozen

from agent.device_key import FileKey, KeyKeeper, check_pair, new_key, request
from protocol import topics
from protocol.decode import check_schema, decode, encode
from protocol.documents import JoinAnswer
from protocol.durable import read_durable, remove_durable, write_durable
from protocol.errors import ConfigError, ProtocolError

SCHEMA = "midstream.enrolment/1.0"
ID_RANDOM_BYTES = 3
MAX_ID_CHARACTERS = 32


@frozen(kw_only=True)
class Enrolment:
    """Membership in one fleet, as the coordinator granted it. `coordinator_host` is where we joined.

    joined_with: the hash of the join secret that made it; empty when it was made by an earlier release.
    """

    device_id: str
    fleet: str
    cert_pem: str
    ca_pem: str
    policy_keys: Mapping[str, bytes]
    coordinator_host: str
    coordinator_port: int
    broker_host: str | None
    broker_port: int
    broker_tls: bool = True
    broker_version: Literal[4, 5] = 5
    mqtt_username: str | None = None
    mqtt_password: str | None = field(default=None, repr=False)
    joined_with: str = ""
    schema: str = SCHEMA


class IdentityStore:
    """The identity folder (0700). Blocking; small files.

    key: where the private key is; in the folder, too, unless given.
    """

    def __init__(self, folder: Path, key: KeyKeeper | None = None) -> None:
        self._folder = folder
        self.key_path = folder / "device.key"
        self.key = FileKey(self.key_path) if key is None else key
        self.cert_path = folder / "device.crt"
        self._id_path = folder / "device_id"
        self._enrolment_path = folder / "enrolment.json"

    def device_id(self, configured: str | None, hostname: str) -> str:
        """The id of this device: configured, else enrolled or remembered, else made from the host's name once.

        Raises ConfigError for a configured id that is not [a-z0-9-]{1,32} or not the enrolled one.
        """
        enrolment = self.enrolment()
        if configured is not None:
            _check_configured(configured)
            if enrolment and enrolment.device_id != configured:
                raise ConfigError(
                    f"device_id is {configured!r}, but this device is enrolled as {enrolment.device_id!r}",
                    next_step="remove the setting, or join again after removing the identity folder",
                    field="device_id",
                )
            return configured
        if enrolment:
            return enrolment.device_id
        known = read_durable(self._id_path, lambda data: topics.check_id(data.decode().strip(), what="device_id"))
        return known or self._make_id(hostname)

    def _make_id(self, hostname: str) -> str:
        made = made_id(hostname, secrets.token_hex(ID_RANDOM_BYTES))
        self._prepare()
        write_durable(self._id_path, made.encode())
        return made

    @property
    def has_enrolment(self) -> bool:
        """Whether an enrolment is on disk, usable or not: one look at the folder."""
        try:
            return self._enrolment_path.exists()
        except OSError:
            return False

    def enrolment(self) -> Enrolment | None:
        """The enrolment in force, or None; a torn newest copy falls back to the one before."""
        if self.key.read() is None:
            return None
        found = read_durable(self._enrolment_path, _parse_enrolment)
        if found is not None and not self._cert_matches(found.cert_pem):
            write_durable(self.cert_path, found.cert_pem.encode())
        return found

    def _cert_matches(self, cert_pem: str) -> bool:
        try:
            return self.cert_path.read_bytes() == cert_pem.encode()
        except OSError:
            return False

    def csr(self, device_id: str) -> str:
        """A certificate request for `device_id`, PEM; makes the key at the first call and keeps it for later ones."""
        self._prepare()
        key_pem = self.key.read()
        if key_pem is None:
            key_pem = new_key()
            self.key.write(key_pem)
        return request(key_pem, device_id)

    def save(self, device_id: str, answer: JoinAnswer, host: str, port: int, *, joined_with: str = "") -> Enrolment:
        """Make a join durable; the enrolment before stays as the previous copy.

        The certificate must be for our key; ProtocolError otherwise.
        """
        check_pair(answer.cert_pem, self.key.read() or b"")
        enrolment = Enrolment(
            device_id=topics.check_id(device_id, what="device_id"),
            fleet=topics.check_id(answer.fleet, what="fleet"),
            cert_pem=answer.cert_pem,
            ca_pem=answer.ca_pem,
            policy_keys=answer.policy_keys,
            coordinator_host=host,
            coordinator_port=port,
            broker_host=answer.broker_host,
            broker_port=answer.broker_port,
            broker_tls=answer.broker_tls,
            broker_version=answer.broker_version,
            mqtt_username=answer.mqtt_username,
            mqtt_password=answer.mqtt_password,
            joined_with=joined_with,
        )
        self.keep(enrolment)
        write_durable(self.cert_path, answer.cert_pem.encode())
        return enrolment

    def keep(self, enrolment: Enrolment) -> None:
        """Make a changed enrolment durable; the one before stays as the previous copy."""
        write_durable(self._enrolment_path, encode(enrolment))

    def forget(self) -> None:
        """Leave the fleet: enrolment and certificate go, key and id stay."""
        for path in (self._enrolment_path, self.cert_path):
            remove_durable(path)

    def _prepare(self) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as err:
            raise ConfigError(
                f"cannot make {self._folder}: {err.strerror}", next_step="choose a writable state_dir"
            ) from err


def made_id(hostname: str, random_hex: str) -> str:
    """An id that people recognise and that does not clash.

    >>> made_id("Raspberry Pi.local", "a1b2c3")
    'raspberry-pi-a1b2c3'
    """
    stem = re.sub(r"[^a-z0-9]+", "-", hostname.partition(".")[0].lower()).strip("-")
    room = MAX_ID_CHARACTERS - len(random_hex) - 1
    return f"{stem[:room].strip('-') or 'device'}-{random_hex}"


def _check_configured(device_id: str) -> None:
    try:
        topics.check_id(device_id, what="device_id")
    except ProtocolError as err:
        raise ConfigError(err.message, next_step=err.next_step, field="device_id") from err


def _parse_enrolment(data: bytes) -> Enrolment:
    found = decode(Enrolment, data, what="enrolment.json")
    check_schema(found.schema, SCHEMA)
    topics.check_id(found.device_id, what="device_id")
    topics.check_id(found.fleet, what="fleet")
    return found

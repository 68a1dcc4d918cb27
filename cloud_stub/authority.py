"""The fleet's root of trust on disk: CA, server certificate, policy key, client key, admin key.

The first start makes them; every later start finds them again. Each secret is one file of mode 0600, written durably,
with its previous copy; `fleet.json` is written last and marks the whole as complete. A root that was there once and can
no longer be read is never replaced in silence, for every device would have to join anew.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from attrs import evolve, field, frozen

from cloud_stub.certificates import (
    DAY_S,
    CheckedRequest,
    Pair,
    facts,
    issue_client,
    issue_own_client,
    issue_server,
    make_ca,
    read_pair,
    signed_by,
)
from protocol.decode import decode, encode
from protocol.durable import disk_error, read_durable, remove_durable, write_durable
from protocol.errors import ConfigError
from protocol.signature import key_id_of, new_private_key, public_key

T = TypeVar("T")

OWN_NAME = "coordinator"
"""Common name of the coordinator's own client certificate; no device may take it."""

RENEW_BEFORE_S = 30 * DAY_S
CLIENT_KEY_PREFIX = "msk-"
ROOTS_FILE = "ca-certificate.pem"
CLIENT_KEY_FILE = "client-key.sha256"
ALWAYS_NAMED = ("localhost", "127.0.0.1", "::1")


@frozen
class FleetRecord:
    """fleet.json. policy_epoch grows when the policy history starts anew, run with each start."""

    fleet: str
    policy_epoch: int
    run: int


@frozen
class PolicyKey:
    """policy.key: the Ed25519 seed that signs policy."""

    key_id: str
    seed: bytes = field(repr=False)


@frozen(kw_only=True)
class Authority:
    """What `open_authority` found or made. new_client_key: only on the start that made it, to be shown once."""

    state_dir: Path
    record: FleetRecord
    ca: Pair = field(repr=False)
    policy_key: PolicyKey
    admin_key: str = field(repr=False)
    client_key_sha256: str
    new_client_key: str | None = field(repr=False)
    first_start: bool

    @property
    def fleet(self) -> str:
        return self.record.fleet

    @property
    def server_file(self) -> Path:
        """Server key, certificate and CA in one PEM file."""
        return self.state_dir / "server.pem"

    @property
    def own_file(self) -> Path:
        """The coordinator's own client key and certificate in one PEM file."""
        return self.state_dir / "coordinator.pem"

    @property
    def roots_file(self) -> Path:
        """The CA certificate alone; the only file that may be handed out."""
        return self.state_dir / ROOTS_FILE

    @property
    def ca_pem(self) -> str:
        return self.ca.cert_pem.decode("ascii")

    @property
    def ca_fingerprint(self) -> str:
        """SHA-256 of the CA certificate's DER form, lower-case hex."""
        return facts(self.ca).sha256

    @property
    def policy_keys(self) -> dict[str, bytes]:
        """Key id -> public key, as devices hold them."""
        return {self.policy_key.key_id: public_key(self.policy_key.seed)}

    def issue(self, request: CheckedRequest, now_s: float) -> str:
        """A device certificate, PEM."""
        return issue_client(self.ca, request, now_s).decode("ascii")

    def with_new_history(self, now_s: float) -> Authority:
        """Note durably that the policy history starts anew, so that devices take its first document."""
        epoch = max(self.record.policy_epoch + 1, int(now_s))
        record = evolve(self.record, policy_epoch=epoch)
        write_durable(self.state_dir / "fleet.json", encode(record))
        return evolve(self, record=record)


def open_authority(state_dir: Path, fleet: str, now_s: float) -> Authority:
    """Find or make the roots in `state_dir`. Raises ConfigError when they are damaged or belong to another fleet."""
    _make_folder(state_dir)
    record = _read(state_dir / "fleet.json", _fleet_record)
    complete = record is not None
    if record is not None and record.fleet != fleet:
        raise ConfigError(
            f"{state_dir} belongs to fleet {record.fleet!r}, the configuration says {fleet!r}",
            next_step="correct `fleet` or choose another state_dir",
            field="fleet",
        )
    ca = _root(state_dir / "ca.pem", read_pair, complete, lambda: make_ca(fleet, now_s), lambda p: p.bundle)
    key = _root(state_dir / "policy.key", _policy_key, complete, _new_policy_key, encode)
    admin = _root(state_dir / "admin.key", _key_text, False, lambda: secrets.token_urlsafe(32), str.encode)
    client_sha256, client_key = _client_key(state_dir / CLIENT_KEY_FILE)
    record = evolve(record, run=record.run + 1) if record else FleetRecord(fleet, int(now_s), 1)
    write_durable(state_dir / ROOTS_FILE, ca.cert_pem, 0o644)
    write_durable(state_dir / "fleet.json", encode(record))
    return Authority(
        state_dir=state_dir, record=record, ca=ca, policy_key=key, admin_key=admin, client_key_sha256=client_sha256,
        new_client_key=client_key, first_start=not complete,
    )  # fmt: skip


def take_back_client_key(authority: Authority) -> None:
    """Forget a client key that this start made and could not show; the next start makes another."""
    if authority.new_client_key is not None:
        remove_durable(authority.state_dir / CLIENT_KEY_FILE)


def ensure_certificates(authority: Authority, addresses: Sequence[str], now_s: float) -> bool:
    """Make or renew the server's and the own client certificate; True when a file changed.

    Renewed: near the end, signed by another CA, or (server) without one of the wanted names.
    """
    wanted = tuple(dict.fromkeys((*addresses, *ALWAYS_NAMED)))
    server = _read(authority.server_file, read_pair)
    own = _read(authority.own_file, read_pair)
    changed = False
    if server is None or not set(wanted) <= facts(server).names or _must_renew(server, authority.ca, now_s):
        write_durable(authority.server_file, issue_server(authority.ca, wanted, now_s).bundle)
        changed = True
    if own is None or _must_renew(own, authority.ca, now_s):
        write_durable(authority.own_file, issue_own_client(authority.ca, OWN_NAME, now_s).bundle)
        changed = True
    return changed


def read_admin_key(state_dir: Path) -> str:
    """The admin key of a coordinator on this machine, for the command line."""
    key = _read(state_dir / "admin.key", _key_text)
    if key is None:
        raise ConfigError(
            f"no coordinator keeps its state in {state_dir}",
            next_step="start `midstream coordinator` first, or name its folder with --state-dir",
            field="state_dir",
        )
    return key


def _must_renew(pair: Pair, ca: Pair, now_s: float) -> bool:
    return facts(pair).not_after_s - now_s < RENEW_BEFORE_S or not signed_by(pair, ca)


def _make_folder(state_dir: Path) -> None:
    try:
        state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        state_dir.chmod(0o700)
    except OSError as err:
        raise disk_error(err, state_dir) from err


def _read(path: Path, check: Callable[[bytes], T]) -> T | None:
    return read_durable(path, check)


def _root(
    path: Path, check: Callable[[bytes], T], must_exist: bool, make: Callable[[], T], dump: Callable[[T], bytes]
) -> T:
    found = _read(path, check)
    if found is not None:
        return found
    if must_exist or path.exists():
        raise ConfigError(
            f"{path} is missing or damaged, and so is its previous copy",
            next_step="restore it from a backup; or move the whole state folder away to start a new fleet, "
            "which every device must join again",
        )
    made = make()
    write_durable(path, dump(made))
    return made


def _client_key(path: Path) -> tuple[str, str | None]:
    """(hash, key); the key only when it was made now. A lost hash means a new key: the old one cannot be told."""
    found = _read(path, _hash_text)
    if found is not None:
        return found, None
    key = CLIENT_KEY_PREFIX + secrets.token_urlsafe(32)
    write_durable(path, _sha256(key).encode("ascii"))
    return _sha256(key), key


def _new_policy_key() -> PolicyKey:
    seed = new_private_key()
    return PolicyKey(key_id_of(public_key(seed)), seed)


def _fleet_record(data: bytes) -> FleetRecord:
    return decode(FleetRecord, data, what="fleet.json")


def _policy_key(data: bytes) -> PolicyKey:
    key = decode(PolicyKey, data, what="policy.key")
    if len(key.seed) != 32:
        raise ValueError("the seed has 32 bytes")
    return key


def _key_text(data: bytes) -> str:
    text = data.decode("ascii").strip()
    if not 32 <= len(text) <= 128 or not text.isprintable():
        raise ValueError("not a key")
    return text


def _hash_text(data: bytes) -> str:
    text = data.decode("ascii").strip()
    if len(bytes.fromhex(text)) != 32:
        raise ValueError("not a SHA-256")
    return text


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()

"""Policy from a file to signed documents: compile, number, sign, keep, choose per device, roll back.

A policy file is TOML, JSON or YAML with the sections of protocol.policy, each optional; schema, fleet, epoch and
version are set here. A device gets the newest document whose selector matches its labels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attrs import evolve, frozen

from cloud_stub.authority import Authority
from cloud_stub.policy_files import Form, check_armed, parsed
from cloud_stub.registry import DeviceRegistry, PublishedPolicy
from protocol.acceptance import check_ranges
from protocol.clock import WallClock
from protocol.decode import decode, decode_listing, encode, plain
from protocol.errors import BadRequest, NotFound, ProtocolError, TooLarge
from protocol.policy import SCHEMA, Policy
from protocol.signature import Envelope, encode_envelope, sign

MAX_POLICY_BYTES = 32 << 10
DEFAULT_LIFE_S = 365 * 86_400.0
SET_HERE = ("schema", "fleet", "epoch", "version")


@frozen
class Published:
    """One document of the history, decoded."""

    policy: Policy
    record: PublishedPolicy


class Publisher:
    """Numbers, signs and keeps policy documents of one fleet; the only writer of the registry's policies.

    The history is read once after each change and each document decoded once: `desired` is asked for every device, and
    again for each thing that one says.
    """

    def __init__(self, authority: Authority, registry: DeviceRegistry, wall: WallClock) -> None:
        self._authority = authority
        self._registry = registry
        self._wall = wall
        self._records: Sequence[PublishedPolicy] | None = None
        self._decoded: dict[tuple[int, int], Published] = {}

    def publish(self, data: bytes, form: Form, note: str = "") -> Published:
        """Compile, sign and keep a policy file. Raises BadRequest (field named) or TooLarge; nothing is kept then."""
        return self._keep(compile_policy(data, form), note)

    def rollback(self, version: int) -> Published:
        """Publish the content of an earlier version again, under a new number. Raises NotFound."""
        return self._keep(self.version(version).policy, f"rollback to {version}")

    def history(self) -> list[Published]:
        """Newest first."""
        return [self._opened(record) for record in self._newest_first()]

    def version(self, version: int) -> Published:
        """One version of the present epoch, else of the newest epoch that has it. Raises NotFound."""
        for record in self._newest_first():
            if record.version == version:
                return self._opened(record)
        raise NotFound(f"there is no policy version {version}", next_step="see midstream policy history")

    def desired(self, labels: Mapping[str, str]) -> Published | None:
        """The newest document whose selector matches; None before the first."""
        for record in self._newest_first():
            found = self._opened(record)
            if selects(found.policy, labels):
                return found
        return None

    def _keep(self, policy: Policy, note: str) -> Published:
        now_s = self._wall().unix_s
        numbered = evolve(
            policy,
            schema=SCHEMA,
            fleet=self._authority.fleet,
            epoch=self._authority.record.policy_epoch,
            version=1 + self._registry.newest_version(self._authority.record.policy_epoch),
            expires_s=policy.expires_s or now_s + DEFAULT_LIFE_S,
        )
        if numbered.expires_s <= now_s:
            raise BadRequest("the policy has already expired", next_step="set a later expires_s", field="expires_s")
        if numbered.not_before_s >= numbered.expires_s:
            raise BadRequest("the policy expires before it begins", field="not_before_s")
        key = self._authority.policy_key
        envelope = sign(encode(numbered), key.seed, key.key_id)
        record = PublishedPolicy(numbered.epoch, numbered.version, now_s, note[:200], encode_envelope(envelope))
        self._records = None
        self._registry.add_policy(record)
        return Published(numbered, record)

    def _newest_first(self) -> Sequence[PublishedPolicy]:
        if self._records is None:
            records = self._registry.policies()
            kept = {(record.epoch, record.version) for record in records}
            self._decoded = {number: found for number, found in self._decoded.items() if number in kept}
            self._records = records
        return self._records

    def _opened(self, record: PublishedPolicy) -> Published:
        number = record.epoch, record.version
        found = self._decoded.get(number)
        if found is None:
            envelope = decode(Envelope, record.envelope, what="a kept policy")
            found = Published(decode(Policy, envelope.payload, what="a kept policy"), record)
            self._decoded[number] = found
        return found


def compile_policy(data: bytes, form: Form) -> Policy:
    """A whole, validated Policy from a file's content. Raises BadRequest with the field, or TooLarge."""
    if len(data) > MAX_POLICY_BYTES:
        raise TooLarge(f"the policy has {len(data)} bytes, at most {MAX_POLICY_BYTES} are taken")
    raw = parsed(data, form)
    for name in SET_HERE:
        if name in raw:
            raise BadRequest(
                f"{name!r} is set by the coordinator", next_step="remove it from the policy file", field=name
            )
    try:
        policy, unknown = decode_listing(Policy, raw, what="the policy")
        check_ranges(policy)
    except ProtocolError as err:
        raise BadRequest(err.message, next_step="correct the field; see docs/policy.md", field=err.field) from err
    if unknown:
        raise BadRequest(
            f"unknown field {unknown[0]!r}", next_step="check its spelling; see docs/policy.md", field=unknown[0]
        )
    if not policy.split.codecs:
        raise BadRequest(
            "split.codecs is empty", next_step="name at least one codec, such as raw", field="split.codecs"
        )
    check_armed(policy)
    return policy


def selects(policy: Policy, labels: Mapping[str, str]) -> bool:
    """Every label of the selector must be there; an empty selector matches all."""
    return all(labels.get(name) == value for name, value in policy.selector.items())


def as_document(published: Published) -> dict[str, Any]:
    """For people and scripts: number, time, note and the whole policy."""
    record = published.record
    return {
        "version": record.version,
        "epoch": record.epoch,
        "published_s": record.published_s,
        "note": record.note,
        "policy": plain(published.policy),
    }

"""Policy from a file to signed documents: compile, number, sign, keep, choose per device, roll back.

A policy file is TOML or JSON with the sections of protocol.policy, each optional; schema, fleet, epoch and version are
set here. A device gets the newest document whose selector matches its labels.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from typing import Any, Literal

from attrs import evolve, frozen

from cloud_stub.authority import Authority
from cloud_stub.registry import DeviceRegistry, PublishedPolicy
from protocol.acceptance import check_ranges
from protocol.clock import WallClock
from protocol.decode import decode, decode_listing, encode, load_json, plain
from protocol.errors import BadRequest, NotFound, ProtocolError, TooLarge
from protocol.policy import SCHEMA, Policy
from protocol.signature import Envelope, sign

MAX_POLICY_BYTES = 32 << 10
DEFAULT_LIFE_S = 365 * 86_400.0
SET_HERE = ("schema", "fleet", "epoch", "version")

Form = Literal["toml", "json"]


@frozen
class Published:
    """One document of the history, decoded."""

    policy: Policy
    record: PublishedPolicy


class Publisher:
    """Numbers, signs and keeps policy documents of one fleet."""

    def __init__(self, authority: Authority, registry: DeviceRegistry, wall: WallClock) -> None:
        self._authority = authority
        self._registry = registry
        self._wall = wall

    def publish(self, data: bytes, form: Form, note: str = "") -> Published:
        """Compile, sign and keep a policy file. Raises BadRequest (field named) or TooLarge; nothing is kept then."""
        return self._keep(compile_policy(data, form), note)

    def rollback(self, version: int) -> Published:
        """Publish the content of an earlier version again, under a new number. Raises NotFound."""
        return self._keep(self.version(version).policy, f"rollback to {version}")

    def history(self) -> list[Published]:
        """Newest first."""
        return [_opened(record) for record in self._registry.policies()]

    def version(self, version: int) -> Published:
        """One version of the present epoch, else of the newest epoch that has it. Raises NotFound."""
        for record in self._registry.policies():
            if record.version == version:
                return _opened(record)
        raise NotFound(f"there is no policy version {version}", next_step="see midstream policy history")

    def desired(self, labels: Mapping[str, str]) -> Published | None:
        """The newest document whose selector matches; None before the first."""
        for record in self._registry.policies():
            found = _opened(record)
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
            version=self._next_version(),
            expires_s=policy.expires_s or now_s + DEFAULT_LIFE_S,
        )
        if numbered.expires_s <= now_s:
            raise BadRequest("the policy has already expired", next_step="set a later expires_s", field="expires_s")
        if numbered.not_before_s >= numbered.expires_s:
            raise BadRequest("the policy expires before it begins", field="not_before_s")
        key = self._authority.policy_key
        envelope = sign(encode(numbered), key.seed, key.key_id)
        record = PublishedPolicy(numbered.epoch, numbered.version, now_s, note[:200], encode(envelope))
        self._registry.add_policy(record)
        return Published(numbered, record)

    def _next_version(self) -> int:
        epoch = self._authority.record.policy_epoch
        return 1 + max((r.version for r in self._registry.policies() if r.epoch == epoch), default=0)


def compile_policy(data: bytes, form: Form) -> Policy:
    """A whole, validated Policy from a file's content. Raises BadRequest with the field, or TooLarge."""
    if len(data) > MAX_POLICY_BYTES:
        raise TooLarge(f"the policy has {len(data)} bytes, at most {MAX_POLICY_BYTES} are taken")
    raw = _parsed(data, form)
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


def _parsed(data: bytes, form: Form) -> dict[str, Any]:
    try:
        raw = tomllib.loads(data.decode("utf-8")) if form == "toml" else load_json(data, what="the policy")
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as err:
        raise BadRequest(f"the policy is not TOML: {err}", next_step="correct the line it names") from err
    except ProtocolError as err:
        raise BadRequest(err.message, next_step="correct the file", field=err.field) from err
    if not isinstance(raw, dict):
        raise BadRequest("the policy must be a table of sections")
    return raw


def _opened(record: PublishedPolicy) -> Published:
    envelope = decode(Envelope, record.envelope, what="a kept policy")
    return Published(decode(Policy, envelope.payload, what="a kept policy"), record)

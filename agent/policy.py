"""The policy in force: accepted by pure rules, bounded by local configuration, kept on disk, swapped as a whole.

Requests read `current()` once and keep what they got. An older, forged or broken document changes nothing and is
reported with its reason; the last good one stays in force, across restarts too.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from pathlib import Path

from attrs import evolve, frozen

from agent.apply import Action, apply
from agent.bounds import clamp
from agent.config import PolicyBounds
from protocol.acceptance import Refused, Verdict, judge
from protocol.clock import Clock, WallClock
from protocol.decode import decode
from protocol.documents import Reported
from protocol.durable import read_durable, write_durable
from protocol.errors import MidstreamError, ProtocolError
from protocol.events import Emit, PolicyJudged
from protocol.policy import Policy
from protocol.signature import Envelope, decode_envelope, verify

log = logging.getLogger("midstream.agent.policy")

NOT_KEPT = "not_kept"
"""Our own reason code: the document is good, and the disk would not take it."""


@frozen(kw_only=True)
class PolicyPorts:
    """What judging needs. keys: id -> Ed25519 public key."""

    keys: Mapping[str, bytes]
    labels: Mapping[str, str]
    bounds: PolicyBounds
    wall: WallClock
    clock: Clock
    emit: Emit
    actions: Mapping[str, Action]


@frozen
class _Held:
    """What is in force: as signed (`asked`), as followed here (`followed`), and the bytes it came in."""

    asked: Policy | None
    followed: Policy
    payload: bytes = b""


class PolicyHolder:
    """Holds the policy; `current` is a PolicySource."""

    def __init__(self, path: Path, ports: PolicyPorts) -> None:
        self._path = path
        self._ports = ports
        self._reported: Reported | None = None
        self._refused_payload = b""
        self._held = _Held(None, clamp(Policy(), ports.bounds)[0])
        for action in ports.actions.values():
            action(self._held.followed)

    def current(self) -> Policy:
        """The policy in force now."""
        return self._held.followed

    def reported(self) -> Reported | None:
        """The last judgement, to be told again on every new session."""
        return self._reported

    def load(self) -> None:
        """Take up the last good policy; a damaged file falls back to the one before, then to the defaults."""
        payload = read_durable(self._path, self._check_kept)
        if payload is not None:
            asked = _policy_of(decode_envelope(payload))
            sections = self._swap(asked, payload)
            self._reported = Reported(
                version=asked.version, epoch=asked.epoch, accepted=True, code="kept", sections=sections,
                held_version=asked.version,
            )  # fmt: skip

    def rebound(self, bounds: PolicyBounds) -> None:
        """Follow other local bounds at once: the policy in force is bounded anew."""
        self._ports = evolve(self._ports, bounds=bounds)
        held = self._held
        followed, clamped = clamp(held.asked or Policy(), bounds)
        self._held = evolve(held, followed=followed)
        sections = apply(held.followed, followed, self._ports.actions) | clamped
        if self._reported is not None and self._reported.accepted:
            self._reported = evolve(self._reported, sections={**self._reported.sections, **sections})

    async def consider(self, payload: bytes) -> Reported | None:
        """Judge a desired document; None when it was judged before and nothing changed."""
        if payload in (self._held.payload, self._refused_payload):
            return None
        verdict = await asyncio.to_thread(self._judge, payload)
        if isinstance(verdict, Refused):
            return self._refuse(payload, verdict.code, verdict.detail)
        if verdict.code == "unchanged":
            return self._reported
        try:
            # Durable before it is in force: after a power cut the device must not fall back behind what it reported.
            await asyncio.to_thread(write_durable, self._path, payload)
        except MidstreamError as err:
            return self._refuse(payload, NOT_KEPT, str(err), judge_again=True)
        return self._take(verdict, payload)

    def _judge(self, payload: bytes) -> Verdict | Refused:
        try:
            envelope = decode_envelope(payload)
        except MidstreamError as err:
            return Refused("malformed", str(err))
        ports = self._ports
        return judge(envelope, self._held.asked, ports.keys, ports.labels, ports.wall())

    def _take(self, verdict: Verdict, payload: bytes) -> Reported:
        asked = verdict.policy
        self._refused_payload = b""
        self._reported = Reported(
            version=asked.version,
            epoch=asked.epoch,
            accepted=True,
            code=verdict.code,
            detail=verdict.detail,
            sections=self._swap(asked, payload),
            held_version=asked.version,
            ignored=verdict.ignored,
        )
        log.info("policy version %d is in force", asked.version)
        self._tell(asked.version, True, verdict.code)
        return self._reported

    def _swap(self, asked: Policy, payload: bytes) -> dict[str, str]:
        followed, clamped = clamp(asked, self._ports.bounds)
        before, self._held = self._held, _Held(asked, followed, payload)
        return apply(before.followed, followed, self._ports.actions) | clamped

    def _refuse(self, payload: bytes, code: str, detail: str, *, judge_again: bool = False) -> Reported:
        # A clock that is set later, or a disk with room again, may make the same document acceptable.
        self._refused_payload = b"" if judge_again or not self._ports.wall().trusted else payload
        seen, held = _peek(payload), self._held.asked
        self._reported = Reported(
            version=seen.version,
            epoch=seen.epoch,
            accepted=False,
            code=code,
            detail=detail,
            held_version=held.version if held else 0,
        )
        log.warning("policy version %d refused: %s (%s)", seen.version, code, detail)
        self._tell(seen.version, False, code)
        return self._reported

    def _tell(self, version: int, accepted: bool, code: str) -> None:
        self._ports.emit(PolicyJudged(at_s=self._ports.clock(), version=version, accepted=accepted, code=code))

    def _check_kept(self, data: bytes) -> bytes:
        """Kept documents are verified again, for the disk is not the coordinator; their dates are not."""
        envelope = decode_envelope(data)
        if not verify(envelope, self._ports.keys):
            raise ProtocolError("the kept policy is not signed by this fleet", field="signature")
        _policy_of(envelope)
        return data


def _policy_of(envelope: Envelope) -> Policy:
    return decode(Policy, envelope.payload, what="the policy")


def _peek(payload: bytes) -> Policy:
    """Version and epoch of a document that is not trusted, for the report only."""
    try:
        return _policy_of(decode_envelope(payload))
    except MidstreamError:
        return Policy()

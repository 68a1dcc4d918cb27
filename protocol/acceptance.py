"""Whether a policy document takes effect: a pure function of the document, what is held, the keys and the time.

Order: signature, form, what must be understood, addressee, age against what is held, validity in time. An untrusted
clock (no RTC, NTP not yet heard) never makes a document expired or not yet valid: the verdict says so instead.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import attrs
from attrs import frozen

from protocol.clock import WallTime
from protocol.decode import check_schema, decode_listing, load_json
from protocol.errors import MidstreamError, ProtocolError
from protocol.policy import SCHEMA, Policy
from protocol.policy_privacy import check_privacy
from protocol.policy_routing import check_routing
from protocol.signature import Envelope, verify

RefusalCode = Literal[
    "unknown_key", "bad_signature", "malformed", "schema", "critical_unknown", "wrong_fleet", "not_selected",
    "older_epoch", "older_version", "version_conflict", "expired", "not_yet_valid",
]  # fmt: skip
AcceptCode = Literal["accepted", "unchanged", "accepted_clock_untrusted"]

CLOCK_SKEW_S = 300.0
"""Clocks of a fleet without common time may differ by this much before validity is denied."""

Keys = Mapping[str, bytes]

_RANGES: dict[str, tuple[float, float]] = {
    "epoch": (0, 2**53), "version": (0, 2**53), "not_before_s": (0, 2**53), "expires_s": (0, 2**53),
    "split.ratio": (0, 100), "split.periods": (1, 10_000), "split.period_s": (0.01, 86_400),
    "split.max_error_ratio": (0, 1), "split.explore_one_in": (0, 1_000_000), "split.hedge_ratio": (0, 1),
    "split.deadline_s": (0.001, 86_400),
    "dispatch.budget_ratio": (0, 1), "dispatch.tail_ratio": (0, 1), "dispatch.money_per_joule": (0, math.inf),
    "dispatch.battery_factor": (0, 1e6), "dispatch.empty_factor": (0, 1e6), "dispatch.hot_factor": (0, 1e6),
    "migration.consume_tokens_per_s": (0.01, 1e6), "migration.min_tokens": (0, 1_000_000),
    "migration.min_remaining_tokens": (0, 1_000_000), "migration.max_moves": (0, 1000),
    "migration.stall_s": (0.05, 3600),
    "delivery.reading_tokens_per_s": (0.01, 1e6), "delivery.listening_tokens_per_s": (0.01, 1e6),
    "routing.cloud_threshold": (0, 1), "routing.low_below": (0, 1), "routing.plugin_deadline_s": (0.0001, 1),
    "routing.fallback.confidence_threshold": (0, 1), "routing.intent.threshold": (0, 1),
    "routing.dynamic.max_ttft_s": (0.001, 3600), "routing.dynamic.latency_shift": (0, 1),
    "routing.dynamic.battery_low_ratio": (0, 1), "routing.dynamic.battery_drop": (0, 1),
    "routing.dynamic.hot_drop": (0, 1), "routing.dynamic.queue_s": (0, 3600), "routing.dynamic.queue_drop": (0, 1),
    "routing.dynamic.slow_ttft_s": (0.001, 3600), "routing.dynamic.slow_lift": (0, 1),
    "routing.dynamic.failing_ratio": (0, 1), "routing.dynamic.failing_lift": (0, 1),
    "limits.max_prompt_bytes": (1, 2**31), "limits.max_answer_tokens": (1, 2**31),
    "limits.requests_per_s": (0, 1e5), "limits.tokens_per_min": (0, 1e10), "limits.max_concurrent": (0, 1e5),
    "limits.usd_per_day": (0, 1e6), "limits.usd_per_month": (0, 1e6),
    "engines.wait_target_s": (0.001, 3600),
}  # fmt: skip


@frozen
class Refused:
    """Why a document has no effect. `detail` is one sentence for people."""

    code: RefusalCode
    detail: str


@frozen
class Verdict:
    """An accepted document. `policy` is the held object itself when nothing changed. ignored: fields not understood."""

    policy: Policy
    code: AcceptCode
    detail: str = ""
    ignored: tuple[str, ...] = ()


def accept(
    envelope: Envelope,
    held: Policy | None,
    keys: Keys,
    labels: Mapping[str, str],
    now: WallTime,
    *,
    fleet: str | None = None,
) -> Policy | Refused:
    """The policy that is now in force, or why this document has no effect; see `judge` for the whole verdict."""
    verdict = judge(envelope, held, keys, labels, now, fleet=fleet)
    return verdict if isinstance(verdict, Refused) else verdict.policy


def judge(
    envelope: Envelope,
    held: Policy | None,
    keys: Keys,
    labels: Mapping[str, str],
    now: WallTime,
    *,
    fleet: str | None = None,
) -> Verdict | Refused:
    """Judge one document. `fleet` is ours (default: the label `fleet`; without either any fleet is ours)."""
    if envelope.key_id not in keys:
        return Refused("unknown_key", f"key {envelope.key_id[:64]!r} is not one of this fleet's policy keys")
    if not verify(envelope, keys):
        return Refused("bad_signature", "the signature does not fit the document")
    read = _read(envelope.payload)
    if isinstance(read, Refused):
        return read
    policy, ignored = read
    refused = _not_for_us(policy, labels, fleet or labels.get("fleet")) or _older(policy, held)
    if refused is not None:
        return refused
    if held is not None and (policy.epoch, policy.version) == (held.epoch, held.version):
        return Verdict(held, "unchanged", ignored=ignored)
    if not now.trusted:
        return Verdict(policy, "accepted_clock_untrusted", "validity in time was not checked: no clock", ignored)
    return _out_of_time(policy, now.unix_s) or Verdict(policy, "accepted", ignored=ignored)


def check_ranges(policy: Policy) -> None:
    """Raise ProtocolError naming the first field whose value makes no sense."""
    for path, (least, most) in _RANGES.items():
        value: Any = policy
        for name in path.split("."):
            value = getattr(value, name)
        if value is not None and not least <= value <= most:
            raise ProtocolError(f"{path} is {value}, it must be {least:g} to {most:g}", field=path)
    for key, weight in policy.split.objective.items():
        if key not in ("seconds", "joules", "server_seconds") or weight < 0:
            raise ProtocolError(
                f"split.objective.{key[:32]} must be a known cost with a weight of 0 or more", field="split.objective"
            )
    check_routing(policy.routing)
    check_privacy(policy.privacy)
    for name, price in policy.dispatch.prices.items():
        cached = price.per_million_cached_tokens or 0.0
        if min(price.per_million_prompt_tokens, cached, price.per_million_completion_tokens) < 0:
            path = f"dispatch.prices.{name[:64]}"
            raise ProtocolError(f"{path} has a price below 0", field=path)


def _read(payload: bytes) -> tuple[Policy, tuple[str, ...]] | Refused:
    try:
        raw = load_json(payload, what="policy")
        if not isinstance(raw, dict) or not isinstance(raw.get("schema"), str):
            return Refused("malformed", "a policy is an object with a schema")
        check_schema(raw["schema"], SCHEMA)
    except ProtocolError as err:
        return Refused("schema" if err.field == "schema" else "malformed", str(err))
    except MidstreamError as err:
        return Refused("malformed", str(err))
    critical = raw.get("critical", [])
    unknown = [name for name in critical if not _is_known(name)] if isinstance(critical, list) else []
    if unknown:
        return Refused("critical_unknown", f"this release does not know {str(unknown[0])[:64]!r}, which is critical")
    try:
        policy, ignored = decode_listing(Policy, raw, what="policy")
        check_ranges(policy)
    except MidstreamError as err:
        return Refused("malformed", str(err))
    return policy, ignored[:64]


def _is_known(name: object) -> bool:
    """True when `name` ("section" or "section.field") is a field of Policy."""
    kind: Any = Policy
    for part in str(name).split("."):
        if not attrs.has(kind):
            return False
        found = next((item for item in attrs.fields(attrs.resolve_types(kind)) if item.name == part), None)
        if found is None:
            return False
        kind = found.type
    return True


def _not_for_us(policy: Policy, labels: Mapping[str, str], fleet: str | None) -> Refused | None:
    if fleet is not None and policy.fleet != fleet:
        return Refused("wrong_fleet", f"the document is for fleet {policy.fleet[:64]!r}, this is {fleet!r}")
    for key, value in policy.selector.items():
        if labels.get(key) != value:
            return Refused("not_selected", f"the document wants {key[:32]}={value[:32]}, this device does not have it")
    return None


def _older(policy: Policy, held: Policy | None) -> Refused | None:
    if held is None or policy.epoch > held.epoch:
        return None
    if policy.epoch < held.epoch:
        return Refused("older_epoch", f"epoch {policy.epoch}, {held.epoch} is held")
    if policy.version < held.version:
        return Refused("older_version", f"version {policy.version}, {held.version} is held")
    if policy.version == held.version and policy != held:
        return Refused("version_conflict", f"version {policy.version} is held with another content")
    return None


def _out_of_time(policy: Policy, now_s: float) -> Refused | None:
    if policy.not_before_s > now_s + CLOCK_SKEW_S:
        return Refused("not_yet_valid", f"valid in {policy.not_before_s - now_s:.0f} s")
    if 0 < policy.expires_s <= now_s - CLOCK_SKEW_S:
        return Refused("expired", f"expired {now_s - policy.expires_s:.0f} s ago")
    return None

"""Local configuration over policy: the device's owner may be stricter than the fleet's, never the other way round."""

from __future__ import annotations

from typing import TypeVar

from attrs import evolve, fields

from agent.config import PolicyBounds
from protocol.policy import Policy

Number = TypeVar("Number", int, float)

SECTIONS: tuple[str, ...] = (
    "split", "dispatch", "migration", "delivery", "routing", "privacy", "limits", "engines", "log_level",
)  # fmt: skip
"""Parts of a policy that are applied and reported one by one."""


def clamp(policy: Policy, bounds: PolicyBounds) -> tuple[Policy, dict[str, str]]:
    """The policy this device follows, and for each section that bounds changed, what they changed."""
    changed = evolve(
        policy,
        split=evolve(policy.split, raw_input_leaves=policy.split.raw_input_leaves and bounds.allow_raw_input),
        privacy=evolve(policy.privacy, local_only=policy.privacy.local_only or not bounds.allow_cloud_text),
        limits=evolve(
            policy.limits,
            max_prompt_bytes=_least(policy.limits.max_prompt_bytes, bounds.max_prompt_bytes),
            max_answer_tokens=_least(policy.limits.max_answer_tokens, bounds.max_answer_tokens),
            usd_per_day=_tighter(policy.limits.usd_per_day, bounds.usd_per_day),
            usd_per_month=_tighter(policy.limits.usd_per_month, bounds.usd_per_month),
        ),
        engines=evolve(policy.engines, wait_target_s=_least(policy.engines.wait_target_s, bounds.wait_target_s)),
        log_level=bounds.log_level or policy.log_level,
    )
    return changed, {name: _difference(policy, changed, name) for name in changed_sections(policy, changed)}


def changed_sections(old: Policy, new: Policy) -> tuple[str, ...]:
    """Names of the sections that differ, in the order in which they are applied."""
    return tuple(name for name in SECTIONS if getattr(old, name) != getattr(new, name))


def _least(asked: Number, bound: Number | None) -> Number:
    return asked if bound is None else min(asked, bound)


def _tighter(asked: float | None, bound: float | None) -> float | None:
    """Where either may be absent."""
    return bound if asked is None else _least(asked, bound)


def _difference(asked: Policy, held: Policy, section: str) -> str:
    before, after = getattr(asked, section), getattr(held, section)
    if isinstance(before, str):
        return f"clamped: {section} stays {after}"
    names = [f.name for f in fields(type(before)) if getattr(before, f.name) != getattr(after, f.name)]
    return "clamped: " + ", ".join(f"{name} = {getattr(after, name)}" for name in names)

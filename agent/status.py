"""The status document of the local API: what the agent is, where its tracks stand, and what is wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attrs import frozen

from agent.health import Warnable
from agent.lifecycle import Life
from netprobe.view import LinkView
from protocol.decode import plain
from protocol.device import DeviceProfile
from protocol.policy import Policy


@frozen(kw_only=True)
class Facts:
    """What the status is made of, read at the moment of the request. `where` is host:port of the coordinator.

    text_place: "device" or "cloud", where the text model answers now; None without one.
    """

    device_id: str
    version: str
    uptime_s: float
    url: str
    life: Life
    fleet: str | None
    where: str | None
    via: str | None
    broker: str | None
    policy: Policy
    profile: DeviceProfile
    tensor_models: Sequence[str]
    text_model: str | None
    text_place: str | None
    cloud_available: bool
    warnings: Sequence[Warnable]
    now_s: float
    extra: Mapping[str, Any]


def measured(view: LinkView) -> dict[str, Any]:
    """What is known of a link, None for what is not."""
    known = view.samples > 0 and view.bytes_per_s > 0
    return {
        "bytes_per_s": round(view.bytes_per_s) if known else None,
        "rtt_ms": None if view.rtt_s is None else round(view.rtt_s * 1000, 2),
        "samples": view.samples,
    }


def document(facts: Facts) -> dict[str, Any]:
    """JSON types only."""
    return {
        "device_id": facts.device_id,
        "fleet": facts.fleet,
        "version": facts.version,
        "uptime_s": round(facts.uptime_s, 1),
        "url": facts.url,
        "life": plain(facts.life),
        "coordinator": facts.where,
        "via": facts.via,
        "broker": facts.broker,
        "cloud_available": facts.cloud_available,
        "policy": {"epoch": facts.policy.epoch, "version": facts.policy.version},
        "profile": plain(facts.profile),
        "tensor_models": list(facts.tensor_models),
        "text_model": facts.text_model,
        "text_place": facts.text_place,
        "warnings": [
            {"name": w.name, "text": w.text, "next_step": w.next_step, "seconds": round(facts.now_s - w.since_s, 1)}
            for w in facts.warnings
        ],
        **facts.extra,
    }

"""Settings and ports in, the text way out: routes with a symmetric start and stop, for both houses."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence

from attrs import field, frozen

from gateway.front import Front
from gateway.pipeline import TextWay, WayPorts
from gateway.settings import GatewaySettings
from gateway.targets import Target
from links.port import Mount
from protocol.clock import Clock, WallClock, wall_now
from protocol.events import Emit, ignore
from protocol.policy import Policy


def _request_id() -> str:
    return uuid.uuid4().hex


@frozen
class GatewayPorts:
    """What a house gives to the text way.

    targets: what can answer now; read at each request, so peers may come and go. policy: the policy in force, read once
    per request. rtt_s: round trips by target name, as the links have seen them. loading: models that will be here soon.
    """

    targets: Callable[[], Sequence[Target]]
    policy: Callable[[], Policy]
    emit: Emit = ignore
    clock: Clock = time.monotonic
    wall: WallClock = wall_now
    ids: Callable[[], str] = _request_id
    rtt_s: Callable[[], Mapping[str, float]] = field(default=dict)
    loading: Callable[[], Collection[str]] = field(default=frozenset)


def build(settings: GatewaySettings, ports: GatewayPorts) -> Mount:
    """The text way. Engines belong to the house: stop() ends answers and closes no engine."""
    way = TextWay(
        settings,
        WayPorts(ports.targets, ports.policy, ports.emit, ports.clock, ports.ids, ports.rtt_s, ports.loading),
    )

    async def start() -> None:
        """Nothing runs between requests."""

    return Mount(routes=Front(way, ports.wall).routes(), frame_routes=(), start=start, stop=way.stop)

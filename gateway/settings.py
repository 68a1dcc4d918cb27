"""Settings and ports of the text way, the same for both houses. What may change at run time is policy."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection, Mapping, Sequence

from attrs import field, frozen

from gateway.control_channel import ControlChannel
from gateway.dispatch_live import NoPower, Power
from gateway.doubt import Curves
from gateway.ports import (
    AnswerCache,
    Audit,
    Conversations,
    KeyRing,
    Limits,
    NoAudit,
    NoCache,
    NoConversations,
    NoLimits,
    OpenKeys,
    Privacy,
    Router,
)
from gateway.privacy import PrivacyGuard
from gateway.routing import PolicyRouter
from gateway.targets import Target
from protocol.clock import Clock, WallClock, wall_now
from protocol.events import Emit, ignore
from protocol.policy import Policy


@frozen
class GatewaySettings:
    """Bounds of the text way.

    max_body_bytes: larger request bodies are refused before they are read.
    max_concurrent: requests under way at once; one more gets 503 with Retry-After.
    deadline_s: a whole request may take this long.
    ahead_tokens: how far an engine may generate past what the client has taken.
    hold_headers_s: a streamed answer's headers wait this long for the first content, so that a failure before it still
        gets its own status; then they go out with comment pings.
    ping_every_s: a silent stream carries a comment line this often (load balancers cut silent ones at 60 s).
    max_losses: an answer survives this many lost engines; more means that something else is wrong.
    drain_s: how long stop() lets running answers end before it closes them.
    """

    max_body_bytes: int = 8 << 20
    max_concurrent: int = 64
    deadline_s: float = 600.0
    ahead_tokens: int = 32
    hold_headers_s: float = 15.0
    ping_every_s: float = 10.0
    max_losses: int = 8
    drain_s: float = 5.0


def _request_id() -> str:
    return f"{random.getrandbits(128):032x}"  # it names a request and guards nothing


@frozen
class GatewayPorts:
    """What a house gives to the text way.

    targets: what can answer now; read at each request, so peers may come and go. policy: the policy in force, read once
    per request. rtt_s: round trips by target name, as the links have seen them. loading: models that will be here soon.
    curves: calibrated confidence of local models, see gateway.calibration.
    channel: the control channel to apps, started and stopped with the way; None: there is none.
    draw: a random number in [0, 1). chance: so many random bytes; they name things and guard nothing. power: where the
    device's energy comes from. The rest are the steps of gateway.pipeline, open where a house brings none.
    """

    targets: Callable[[], Sequence[Target]]
    policy: Callable[[], Policy]
    emit: Emit = ignore
    clock: Clock = time.monotonic
    wall: WallClock = wall_now
    ids: Callable[[], str] = _request_id
    rtt_s: Callable[[], Mapping[str, float]] = field(default=dict)
    loading: Callable[[], Collection[str]] = field(default=frozenset)
    draw: Callable[[], float] = random.random
    chance: Callable[[int], bytes] = random.randbytes
    power: Power = field(factory=NoPower)
    keys: KeyRing = field(factory=OpenKeys)
    limits: Limits = field(factory=NoLimits)
    privacy: Privacy = field(factory=PrivacyGuard)
    router: Router = field(factory=PolicyRouter)
    cache: AnswerCache = field(factory=NoCache)
    conversations: Conversations = field(factory=NoConversations)
    audit: Audit = field(factory=NoAudit)
    channel: ControlChannel | None = None
    curves: Curves = tuple

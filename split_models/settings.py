"""Settings and ports of the tensor way: what a house must bring."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

from attrs import field, frozen

from engines.batching import BatchSettings
from engines.local import LocalEndpoint
from engines.port import TensorEndpoint
from engines.store import ModelStore
from links.port import Link
from netprobe.probe import LinkProbe
from netprobe.view import LinkView
from profiles.rates import Slowdowns
from profiles.strategy import UNCLASSED, Strategy
from protocol.clock import Clock
from protocol.events import Emit, ignore
from protocol.policy import SplitPolicy
from split_models.arms import Compute
from split_models.front import DEADLINE_S
from split_models.planner import DOWN


@frozen
class SplitSettings:
    """bundle_root: where the server's bundles are; None on a device.

    speed_ratio: device seconds over server seconds, believed until something was measured. watts: drawn while the
    device computes. refresh_s: how often a device looks for new bundles. preload: keep whole models loaded on a device,
    so that the fallback never waits for a load; without it they are loaded by their first request.
    batch: how a server puts requests together that wait for the same model.
    """

    bundle_root: Path | None = None
    deadline_s: float = DEADLINE_S
    speed_ratio: float = 1.0
    watts: float = 0.0
    refresh_s: float = 300.0
    retry_s: float = 5.0
    preload: bool = True
    batch: BatchSettings = field(factory=BatchSettings)


@frozen
class Remote:
    """One far end: the endpoint that runs tails and whole models, and the link below it, for bundles."""

    endpoint: TensorEndpoint
    link: Link


@frozen
class SplitPorts:
    """compute: an executor of its own for pre- and post-processing (engines.executor.BoundedExecutor).

    links: what is known of each link, see `views_of`. remotes: the far ends by link name; may grow, shrink and be
    empty. slowdowns: of this device's engines by name; the house gives the same one to both ways. All three are for
    devices only. strategy: of this class of device; a device that nobody classified begins on itself. may_fetch: False
    while heads are not to be fetched, for example over a metered network.
    """

    local: LocalEndpoint
    store: ModelStore
    compute: Compute
    later: Compute | None = None
    policy: Callable[[], SplitPolicy] = SplitPolicy
    links: Callable[[], Mapping[str, LinkView]] = dict
    remotes: Callable[[], Mapping[str, Remote]] = dict
    slowdowns: Slowdowns = field(factory=Slowdowns)
    strategy: Callable[[], Strategy] = lambda: UNCLASSED
    may_fetch: Callable[[], bool] = lambda: True
    emit: Emit = field(default=ignore)
    clock: Clock = field(default=time.monotonic)


def views_of(probe: LinkProbe) -> Mapping[str, LinkView]:
    """All links of a probe as the planner names them: `name` up, `name` + DOWN down."""
    down = {name + DOWN: view for name, view in probe.views("down").items()}
    return {**probe.views("up"), **down}

"""What a runner needs from its house, and what it gives back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from attrs import field, frozen

from netprobe.view import LinkView
from profiles.strategy import UNCLASSED, Strategy
from protocol.clock import Clock
from protocol.errors import MidstreamError
from protocol.events import Emit
from protocol.policy import SplitPolicy
from protocol.tensors import Tensor
from split_models.arm_cost import Arm
from split_models.arms import Spent


def _nothing(name: str, err: MidstreamError | None) -> None:
    """Nobody keeps count of heads."""


@frozen
class RunnerPorts:
    """`links` names views by link, with planner.DOWN appended for the way down.

    loaded: whether a head, or a tail for a late link, is in memory, warm, and not set aside. preload: make a cut arm
    ready off the path of requests. rest: the same for its tail on this device. ran: told after each run of one of them,
    with the error if it failed here. zstd: whether the far end of a link takes compressed bodies. strategy: what this
    class of device begins with, and its bounds.
    """

    policy: Callable[[], SplitPolicy]
    links: Callable[[], Mapping[str, LinkView]]
    link_names: Callable[[], Sequence[str]]
    device_wait_s: Callable[[], float]
    server_wait_s: Callable[[str], float]
    loaded: Callable[[str], bool]
    preload: Callable[[Arm], None]
    stale: Callable[[], None]
    emit: Emit
    clock: Clock
    ran: Callable[[str, MidstreamError | None], None] = field(default=_nothing)
    zstd: Callable[[str], bool] = lambda link: False
    strategy: Callable[[], Strategy] = lambda: UNCLASSED
    rest: Callable[[Arm], None] = lambda arm: None


@frozen
class Answer:
    """What leaves: the outputs, the arm that made them, the digest of its weights, and why this arm."""

    outputs: tuple[Tensor, ...]
    arm: Arm
    digest: str
    spent: Spent
    reason: str

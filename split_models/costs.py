"""What each arm of one model costs on this device: priors from the bundle, measurements, and what requests report.

The table is owned by the device, which alone decides per request. All parts of one side share a slow-down: a hot or
busy device makes its heads dearer before one has run, and a spike of the arm in use does not make the others look good.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from attrs import define, field

from protocol.device import Measured
from protocol.models import BundleManifest, CutEntry
from split_models.arm_cost import DEVICE_ARM, Arm, ArmCost

Side = Literal["device", "server"]

WEIGHT = 0.3
"""Of the newest observation; the step after a change is half made by the second request."""

ENVELOPE_BYTES = 400
"""Headers and the JSON part around one request's tensors."""

_RATIO_LIMITS = (0.02, 50.0)


@define
class _Part:
    """base_s: seconds at a slow-down of 1. seen_s: as seen, at a slow-down of `seen_at`."""

    base_s: float
    seen_s: float | None = None
    seen_at: float = 1.0


@define
class _SideState:
    parts: dict[str, _Part] = field(factory=dict)
    slowdown: float = 1.0


class CostTable:
    """One model's costs. Parts of the device: `whole`, `before`, `after`, `head:<id>:<codec>`; of the server: `cloud`,
    `tail:<id>:<codec>`.

    Args:
        speed_ratio: device seconds over server seconds, until something was measured here.
        watts: power drawn while the device computes; 0 when unknown.
    """

    def __init__(self, manifest: BundleManifest, *, speed_ratio: float = 1.0, watts: float = 0.0) -> None:
        self._manifest = manifest
        self._watts = watts
        around_s = max(0.0, manifest.cloud_s - manifest.whole_s)
        self._sides: dict[Side, _SideState] = {"device": _SideState(), "server": _SideState()}
        self._prior("device", "whole", manifest.whole_s * speed_ratio)
        self._prior("device", "before", around_s / 2 * speed_ratio)
        self._prior("device", "after", around_s / 2 * speed_ratio)
        self._prior("server", "cloud", manifest.cloud_s or manifest.whole_s)
        for cut in manifest.cuts:
            share = cut.head_flops / manifest.flops if manifest.flops else 1.0
            self._prior("device", _head(cut), manifest.whole_s * speed_ratio * share)
            self._prior("server", _tail(cut), cut.tail_s)

    def learn(self, measured: Sequence[Measured]) -> None:
        """Take benchmark figures of this model as priors; heads that were not measured follow the whole.

        Of several figures of one part the prepared graph's comes before the source file's, and the first before the
        rest, since a benchmark begins with the usual number of threads.
        """
        mine: dict[str, float] = {}
        for digest in (self._manifest.digest, self._manifest.source_sha256):
            for figure in measured:
                if figure.digest == digest:
                    mine.setdefault(figure.what, figure.median_s)
        parts = self._sides["device"].parts
        if mine.get("whole", 0.0) > 0:
            _rebase_unseen(parts, mine["whole"] / max(parts["whole"].base_s, 1e-9))
        for what, seconds in mine.items():
            if what in parts and seconds > 0:
                parts[what] = _Part(seconds)

    def observe(self, side: Side, part: str, seconds: float) -> None:
        """What a live request took, waiting left out; unknown parts and nonsense are ignored."""
        state = self._sides[side]
        entry = state.parts.get(part)
        if entry is None or not 0.0 <= seconds < float("inf"):
            return
        if entry.seen_s is None:
            self._first_seen(state, part, seconds)
        elif entry.base_s > 1e-6:
            low, high = _RATIO_LIMITS
            state.slowdown += WEIGHT * (min(high, max(low, seconds / entry.base_s)) - state.slowdown)
        entry.seen_s = seconds if entry.seen_s is None else entry.seen_s + WEIGHT * (seconds - entry.seen_s)
        entry.seen_at = state.slowdown

    def _first_seen(self, state: _SideState, part: str, seconds: float) -> None:
        """The prior was a guess: the part's own figure replaces it, and the whole's also corrects unseen heads."""
        entry = state.parts[part]
        base_s = seconds / state.slowdown
        if part == "whole" and entry.base_s > 0:
            _rebase_unseen({n: p for n, p in state.parts.items() if n.startswith("head:")}, base_s / entry.base_s)
        entry.base_s = base_s

    def seconds(self, side: Side, part: str) -> float:
        """The present estimate of one part."""
        state = self._sides[side]
        entry = state.parts[part]
        if entry.seen_s is not None:
            return entry.seen_s * state.slowdown / entry.seen_at
        return entry.base_s * state.slowdown

    def arms(
        self,
        encoded_bytes: int | None,
        links: Sequence[str],
        loaded: Callable[[str, str], bool],
        server_wait_s: Mapping[str, float] | None = None,
    ) -> Sequence[ArmCost]:
        """The arms of one request.

        encoded_bytes: size of the encoded input, None for raw tensors (no cloud arm, no recipe). loaded: whether the
        head (cut id, codec) is loaded. server_wait_s: queue at the far end of each link.
        """
        encoded = encoded_bytes is not None
        around_s = self.seconds("device", "before") + self.seconds("device", "after") if encoded else 0.0
        device_s = around_s + self.seconds("device", "whole")
        found = [ArmCost(DEVICE_ARM, device_s=device_s, joules=self._watts * device_s)]
        for link in links:
            wait_s = (server_wait_s or {}).get(link, 0.0)
            found += [self._cut(cut, link, around_s, wait_s, loaded(cut.id, cut.codec)) for cut in self._manifest.cuts]
            if encoded_bytes is not None:
                found.append(self._cloud(encoded_bytes, link, wait_s))
        return found

    def _cut(self, cut: CutEntry, link: str, around_s: float, wait_s: float, loaded: bool) -> ArmCost:
        device_s = around_s + self.seconds("device", _head(cut))
        return ArmCost(
            Arm("cut", cut.id, cut.codec, link),
            device_s=device_s,
            up_bytes=cut.wire_bytes + ENVELOPE_BYTES,
            down_bytes=cut.down_bytes + ENVELOPE_BYTES,
            server_s=wait_s + self.seconds("server", _tail(cut)),
            joules=self._watts * device_s,
            error_ratio=cut.error_ratio,
            loaded=loaded,
        )

    def _cloud(self, encoded_bytes: int, link: str, wait_s: float) -> ArmCost:
        return ArmCost(
            Arm("cloud", link=link),
            device_s=0.0,
            up_bytes=encoded_bytes + ENVELOPE_BYTES,
            down_bytes=self._manifest.down_bytes + ENVELOPE_BYTES,
            server_s=wait_s + self.seconds("server", "cloud"),
        )

    def _prior(self, side: Side, part: str, seconds: float) -> None:
        self._sides[side].parts[part] = _Part(seconds)


def _head(cut: CutEntry) -> str:
    return f"head:{cut.id}:{cut.codec}"


def _tail(cut: CutEntry) -> str:
    return f"tail:{cut.id}:{cut.codec}"


def _rebase_unseen(parts: Mapping[str, _Part], ratio: float) -> None:
    for part in parts.values():
        if part.seen_s is None:
            part.base_s *= ratio

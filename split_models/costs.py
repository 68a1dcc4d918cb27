"""What each arm of one model costs on this device: priors from the bundle, measurements, and what requests report.

The table is owned by the device, which alone decides per request. What runs on one engine shares its slow-down: a hot
or busy device makes heads dearer before one has run, and a spike of the arm in use does not make the others look good.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Literal

from attrs import define, evolve, field

from profiles.rates import WINDOW, Slowdowns
from protocol.device import Measured
from protocol.models import BundleManifest, CutEntry
from split_models.arm_cost import DEVICE_ARM, ZSTD_SUFFIX, Arm, ArmCost

Side = Literal["device", "server"]

FAR_ENGINE = "far"
"""The far end's engines count as one; its slow-down is this table's own."""

SETTLING_RUNS = 3
"""The least of so many first runs is what a part takes at a slow-down of 1: a cold first run does not count."""

ENVELOPE_BYTES = 400
"""Headers and the JSON part around one request's tensors."""

PACKED_GAIN = 0.2
"""Weight of the newest compressed size."""

WORTH_PACKING_RATIO = 0.95
"""Compressed forms that save less than a twentieth are no arms: float32 hardly shrinks."""


@define
class _Part:
    """base_s: seconds at a slow-down of 1, fixed once measured or settled. seen: the latest runs as they were,
    at a slow-down of `seen_at`. engine: whose slow-down; None for work outside engines, which follows the picture's
    size and says nothing of an engine. recalled: learnt by live requests before the last start.
    """

    base_s: float
    engine: str | None
    settling: int = SETTLING_RUNS
    seen: deque[float] = field(factory=lambda: deque(maxlen=WINDOW))
    seen_at: float = 1.0
    recalled: bool = False


class CostTable:
    """One model's costs. Parts of the device: `whole`, `before`, `after`, `head:<id>:<codec>`, `tail:<id>:<codec>`; of
    the server: `cloud`, `tail:<id>:<codec>`.

    Args:
        speed_ratio: device seconds over server seconds, until something was measured here.
        watts: power drawn while the device computes; 0 when unknown.
        engine: what runs the device's parts.
        slowdowns: of this device's engines, shared with whatever else runs on them; default: an own one.
    """

    def __init__(
        self,
        manifest: BundleManifest,
        *,
        speed_ratio: float = 1.0,
        watts: float = 0.0,
        engine: str = "onnx",
        slowdowns: Slowdowns | None = None,
    ) -> None:
        self._manifest = manifest
        self._watts = watts
        self._speed_ratio = speed_ratio
        self._packed_bytes: dict[tuple[str | None, str | None], tuple[float, float]] = {}
        self._slowdowns: dict[Side, Slowdowns] = {"device": slowdowns or Slowdowns(), "server": Slowdowns()}
        around_s = max(0.0, manifest.cloud_s - manifest.whole_s) / 2 * speed_ratio
        whole_s = manifest.whole_s * speed_ratio
        self._parts: dict[Side, dict[str, _Part]] = {
            "device": {
                "whole": _Part(whole_s, engine),
                "before": _Part(around_s, None),
                "after": _Part(around_s, None),
            },
            "server": {
                "cloud": _Part(manifest.cloud_s or manifest.whole_s, FAR_ENGINE),
                "input": _Part(manifest.whole_s, FAR_ENGINE),
            },
        }
        for cut in manifest.cuts:
            share = head_share(manifest, cut)
            self._parts["device"][_head(cut)] = _Part(whole_s * share, engine)
            self._parts["device"][_tail(cut)] = _Part(whole_s * max(0.0, 1.0 - share), engine)
            self._parts["server"][_tail(cut)] = _Part(cut.tail_s, FAR_ENGINE)

    def learn(self, measured: Sequence[Measured]) -> None:
        """Take benchmark figures of this model as priors; heads that were not measured follow the whole.

        Of several figures of one part the prepared graph's comes before the source file's, and the first before the
        rest, since a benchmark begins with the usual number of threads.
        """
        mine: dict[str, tuple[float, bool]] = {}
        for digest in (self._manifest.digest, self._manifest.source_sha256):
            for figure in measured:
                if figure.digest == digest:
                    mine.setdefault(figure.what, (figure.median_s, digest == self._manifest.digest))
        parts = self._parts["device"]
        whole_s, _ = mine.get("whole", (0.0, False))
        if whole_s > 0 and not parts["whole"].recalled:
            _rebase_unseen(parts, whole_s / max(parts["whole"].base_s, 1e-9))
        for what, (seconds, exact) in mine.items():
            if what in parts and seconds > 0 and not parts[what].recalled:
                parts[what] = _Part(seconds, parts[what].engine, settling=0 if exact else SETTLING_RUNS)

    def learnt(self) -> Mapping[Side, Mapping[str, float]]:
        """Seconds at a slow-down of 1 of every part that live requests have run often enough."""
        return {
            side: {
                name: median(part.seen) / part.seen_at
                for name, part in parts.items()
                if len(part.seen) >= SETTLING_RUNS and median(part.seen) > 0
            }
            for side, parts in self._parts.items()
        }

    def recall(self, learnt: Mapping[Side, Mapping[str, float]]) -> None:
        """Begin with what a table of the same bundle had learnt, which goes before benchmarks."""
        for side, parts in self._parts.items():
            kept = learnt.get(side, {})
            whole_s = kept.get("whole", 0.0)
            if side == "device" and whole_s > 0:
                _rebase_unseen(parts, whole_s / max(parts["whole"].base_s, 1e-9))
            for name, seconds in kept.items():
                if name in parts:
                    parts[name] = _Part(seconds, parts[name].engine, settling=0, recalled=True)

    def observe(self, side: Side, part: str, seconds: float) -> None:
        """What a live request took, waiting left out; unknown parts and nonsense are ignored."""
        entry = self._parts[side].get(part)
        if entry is None or not 0.0 <= seconds < float("inf"):
            return
        if entry.settling > 0:
            self._settle(side, part, seconds)
        if entry.engine is not None and (entry.seen or entry.settling == 0):
            self._slowdowns[side].observe(entry.engine, entry.base_s, seconds)
        entry.settling = max(0, entry.settling - 1)
        entry.seen.append(seconds)
        entry.seen_at = self._factor(side, entry)

    def observe_packed(self, arm: Arm, up_bytes: int, down_bytes: int) -> None:
        """What the compressed bodies of a live request weighed; a moving mean, for pictures differ."""
        key = (arm.cut, arm.form)
        up, down = self._packed_bytes.get(key, (float(up_bytes), float(down_bytes)))
        self._packed_bytes[key] = (up + PACKED_GAIN * (up_bytes - up), down + PACKED_GAIN * (down_bytes - down))

    def _settle(self, side: Side, part: str, seconds: float) -> None:
        """The prior was a guess: the part's own runs replace it, and the whole's also correct unseen heads."""
        entry = self._parts[side][part]
        base_s = seconds / self._factor(side, entry)
        if entry.seen:
            base_s = min(base_s, entry.base_s)
        if part == "whole" and entry.base_s > 0:
            parts = {name: one for name, one in self._parts[side].items() if name.startswith(("head:", "tail:"))}
            _rebase_unseen(parts, base_s / entry.base_s)
        entry.base_s = base_s

    def seconds(self, side: Side, part: str) -> float:
        """The present estimate of one part."""
        entry = self._parts[side][part]
        factor = self._factor(side, entry)
        return median(entry.seen) * factor / entry.seen_at if entry.seen else entry.base_s * factor

    def _factor(self, side: Side, entry: _Part) -> float:
        return self._slowdowns[side].factor(entry.engine) if entry.engine is not None else 1.0

    def arms(
        self,
        encoded_bytes: int | None,
        links: Sequence[str],
        loaded: Callable[[str, str], bool],
        server_wait_s: Mapping[str, float] | None = None,
        *,
        zstd: Callable[[str], bool] = lambda link: False,
        raw_bytes: int | None = None,
        ends_here: Callable[[str, str], bool] = lambda cut, codec: False,
    ) -> Sequence[ArmCost]:
        """The arms of one request.

        encoded_bytes: size of the encoded input, None for raw tensors, which no recipe stands around. raw_bytes: of
        those tensors; their cloud arm is the cut before the first layer, and exists where the size is told. loaded:
        whether the head (cut id, codec) is loaded. server_wait_s: queue at the far end of each link. zstd: whether a
        link's far end takes compressed bodies. ends_here: whether the tail (cut id, codec) is loaded on this device.
        """
        encoded = encoded_bytes is not None
        after_s = self.seconds("device", "after") if encoded else 0.0
        around_s = self.seconds("device", "before") + after_s if encoded else 0.0
        device_s = around_s + self.seconds("device", "whole")
        found = [ArmCost(DEVICE_ARM, device_s=device_s, joules=self._watts * device_s)]
        for link in links:
            wait_s = (server_wait_s or {}).get(link, 0.0)
            cuts = [self._cut(cut, link, around_s, wait_s, loaded(cut.id, cut.codec)) for cut in self._manifest.cuts]
            cuts = [self._ended_here(cost, after_s) if ends_here(*_form(cost)) else cost for cost in cuts]
            found += cuts
            if zstd(link):
                packed = map(self._packed, self._manifest.cuts, cuts)
                found += [cost for cost in packed if cost is not None]
            if encoded_bytes is not None:
                found.append(self._cloud(encoded_bytes, "cloud", link, wait_s))
            elif raw_bytes is not None:
                found.append(self._cloud(raw_bytes, "input", link, wait_s))
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
            sends_input=cut.sends_input,
        )

    def _ended_here(self, cost: ArmCost, after_s: float) -> ArmCost:
        """A tail that was only run cold cannot take longer than the whole of which it is a part."""
        cut, codec = _form(cost)
        tail_s = min(self.seconds("device", f"tail:{cut}:{codec}"), self.seconds("device", "whole"))
        return evolve(cost, rest_s=tail_s + after_s)

    def _packed(self, cut: CutEntry, plain: ArmCost) -> ArmCost | None:
        """The same cut with compressed bodies: the sizes that were seen last, else those of calibration."""
        up, down = self._packed_bytes.get((cut.id, cut.codec)) or (cut.zstd_bytes, cut.zstd_down_bytes)
        if up <= 0 or up + down > WORTH_PACKING_RATIO * (plain.up_bytes + plain.down_bytes):
            return None
        here_s = cut.zstd_s * self._speed_ratio
        return evolve(
            plain,
            arm=evolve(plain.arm, codec=cut.codec + ZSTD_SUFFIX),
            device_s=plain.device_s + here_s,
            up_bytes=round(up) + ENVELOPE_BYTES,
            down_bytes=round(down) + ENVELOPE_BYTES,
            server_s=plain.server_s + cut.zstd_s,
            joules=plain.joules + self._watts * here_s,
        )

    def _cloud(self, up_bytes: int, part: str, link: str, wait_s: float) -> ArmCost:
        return ArmCost(
            Arm("cloud", link=link),
            device_s=0.0,
            up_bytes=up_bytes + ENVELOPE_BYTES,
            down_bytes=self._manifest.down_bytes + ENVELOPE_BYTES,
            server_s=wait_s + self.seconds("server", part),
            sends_input=True,
        )


def head_share(manifest: BundleManifest, cut: CutEntry) -> float:
    """A head's part of the whole model's time: as measured where the bundle was made, else by operations."""
    if cut.head_s > 0 and manifest.whole_s > 0:
        return cut.head_s / manifest.whole_s
    return cut.head_flops / manifest.flops if manifest.flops else 1.0


def _head(cut: CutEntry) -> str:
    return f"head:{cut.id}:{cut.codec}"


def _tail(cut: CutEntry) -> str:
    return f"tail:{cut.id}:{cut.codec}"


def _form(cost: ArmCost) -> tuple[str, str]:
    return cost.arm.cut or "", cost.arm.form or ""


def _rebase_unseen(parts: Mapping[str, _Part], ratio: float) -> None:
    for part in parts.values():
        if not part.seen and part.settling:
            part.base_s *= ratio

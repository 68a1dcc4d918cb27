"""What crosses the wire and how fast: the int8 form with zstd on real pictures, and our link against raw TCP.

Codecs: the bundles of three models are built as a coordinator builds them; every offered cut's int8 head runs on real
pictures (the sample page, its lines), and the compressed bodies are weighed against the same tensors in float32.

Link: the same bytes go over a raw TCP connection, over OIP by HTTP, and over tensor frames, in turns: on loopback, and
through the user-space shaper at 100 Mbit/s and 20 ms round trip. Tensor frames are what a device uses with a server of
ours; foreign servers get OIP.

    python -m benchmarks.wire --json wire.json
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from benchmarks.report import arguments, publish
from benchmarks.wire_codecs import MODELS, Weighed, weighed
from benchmarks.wire_link import KB64, MB, Series, measured
from split_models.bundle import BundleLimits

DEFAULT = "frames"
"""The way that the keys without a suffix are of."""

QUICK_BUILD_S = 6.0
"""For each of three bundles."""


def main() -> None:
    options = arguments(__doc__ or "").parse_args()
    # In a short run the slowest model may find no int8 form in its seconds; the notes tell which cuts were weighed.
    limits = BundleLimits(max_cuts=4, seconds=QUICK_BUILD_S, batches=False) if options.quick else BundleLimits()
    cuts = weighed(limits, MODELS)
    rounds, shaped_rounds = (60, 10) if options.quick else (400, 40)
    loopback, shaped = measured(rounds, shaped_rounds)
    keys = {**codec_keys(cuts), **link_keys(loopback, shaped)}
    notes = [*(f"{one.model} {one.cut}: {one.ratio:.2f}x, error {one.error_ratio:.4f}" for one in cuts)]
    few = ["a sample: few cuts and rounds; the figures are those of the full run"] if options.quick else []
    publish("wire", keys, options.json, [*few, *notes, *map(_told, loopback), *map(_told, shaped)])


def codec_keys(cuts: Sequence[Weighed]) -> dict[str, object]:
    """Ratios over float32 and the worst error of the task's answer."""
    ratios = [one.ratio for one in cuts]
    return {
        "int8_zstd_ratio_median": statistics.median(ratios),
        "int8_zstd_ratio_min": min(ratios),
        "error": max(one.error_ratio for one in cuts),
        "int8_cuts": len(cuts),
    }


def link_keys(loopback: Sequence[Series], shaped: Sequence[Series]) -> dict[str, object]:
    """Of the default way first, then of both by name."""
    by_size = {series.size_bytes: series for series in loopback}
    keys: dict[str, object] = {"default": DEFAULT}
    for way, suffix in ((DEFAULT, ""), ("frames", "_frames"), ("http", "_http")):
        keys[f"shaped_time_ratio{suffix}"] = max(series.ratio(way) for series in shaped)
        keys[f"loopback_added_ms_1mb{suffix}"] = by_size[MB].added_ms(way)
        keys[f"loopback_added_ms_64kb{suffix}"] = by_size[KB64].added_ms(way)
    return keys


def _told(series: Series) -> str:
    ways = ", ".join(f"{way} {1000 * series.median_s(way):.2f} ms" for way in series.seconds)
    return f"{series.size_bytes >> 10} KiB: {ways}"


if __name__ == "__main__":
    main()

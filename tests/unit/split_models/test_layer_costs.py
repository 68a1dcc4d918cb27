"""The planner on measured tables of others: SplitRL's seconds per cut (ParetoPipe, batch 8), from a folder.

MIDSTREAM_LAYERCOSTS names the folder that holds `splitrl/`; without it a generated table of the same kind stands in.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from netprobe.view import LinkView
from protocol.policy import SplitPolicy
from split_models.arm_cost import Arm, ArmCost
from split_models.planner import propose

# Argmin of head + tail + network seconds, worked out from the raw columns.
BEST = {
    "GPU": {"resnet50": 1, "VGG16": 1, "AlexNet": 3, "ResNet18": 1, "MobileNetV2": 1, "InceptionV3": 2},
    "pi": {"resnet50": 15, "VGG16": 29, "AlexNet": 6, "ResNet18": 8, "MobileNetV2": 6, "InceptionV3": 19},
}
BYTES_PER_S = 1e6

Row = tuple[int, float, float, float]
"""Cut, seconds of its head, of its tail, and of the network."""


def table(far: str) -> Mapping[str, Sequence[Row]]:
    """Rows by model; generated when no folder is given."""
    folder = os.environ.get("MIDSTREAM_LAYERCOSTS")
    if not folder:
        return {name: _generated(far, best) for name, best in BEST[far].items()}
    found: dict[str, list[Row]] = {}
    file = Path(folder, "splitrl", f"splitrl_lookup_table_1_pi_to_{far}.csv")
    with file.open(encoding="utf-8", newline="") as lines:
        for row in list(csv.reader(lines))[1:]:
            found.setdefault(row[0], []).append((int(row[1]), float(row[2]), float(row[3]), float(row[4])))
    return found


def _generated(far: str, best: int) -> Sequence[Row]:
    """Heads grow, tails shrink, and the network is dear everywhere but at the best cut."""
    count = 30
    speed = 30.0 if far == "GPU" else 1.0
    rows = [(k, 0.05 * k, 0.05 * (count - k) / speed, 2.0 + 0.01 * (k % 7)) for k in range(1, count + 1)]
    rows[best - 1] = (best, 0.05 * best, 0.05 * (count - best) / speed, 0.1)
    return rows


def _costs(rows: Sequence[Row]) -> Sequence[ArmCost]:
    return [
        ArmCost(
            Arm("cut", f"{cut:03d}", "raw", "cloud"),
            device_s=head_s,
            up_bytes=round(network_s * BYTES_PER_S),
            server_s=tail_s,
        )
        for cut, head_s, tail_s, network_s in rows
    ]


@pytest.mark.parametrize("far", list(BEST))
@pytest.mark.parametrize("model", list(BEST["GPU"]))
def test_the_planner_picks_the_cut_that_the_table_says(far: str, model: str) -> None:
    rows = table(far)[model]
    link = LinkView(floor_s=0.0, bytes_per_s=BYTES_PER_S, rtt_s=None, samples=10, age_s=0.0)
    policy = SplitPolicy(codecs=("raw",))
    found = propose(_costs(rows), {"cloud": link}, 0.0, policy)
    assert found.arm.cut == f"{BEST[far][model]:03d}"
    assert found.predicted_s == pytest.approx(min(sum(row[1:]) for row in rows), rel=1e-4)


@pytest.mark.parametrize("far", list(BEST))
def test_a_faster_link_never_makes_the_planner_send_less(far: str) -> None:
    """At equal costs, over four orders of magnitude of the link."""
    policy = SplitPolicy(codecs=("raw",))
    for rows in table(far).values():
        chosen = []
        for ratio in (0.1, 1.0, 10.0, 100.0, 1000.0):
            link = LinkView(0.0, BYTES_PER_S * ratio, None, 10, 0.0)
            chosen.append(propose(_costs(rows), {"cloud": link}, 0.0, policy))
        seconds = [one.predicted_s for one in chosen]
        assert seconds == sorted(seconds, reverse=True)
        by_cut = {f"{row[0]:03d}": row for row in rows}
        sent = [by_cut[str(one.arm.cut)][3] for one in chosen]
        assert sent == sorted(sent), "what a faster link chooses sends at least as much"

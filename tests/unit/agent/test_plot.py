"""The terminal's plot of every arm: what is drawn where there are more arms than marks."""

from __future__ import annotations

from math import inf

from agent.cli.plot import MARKS, terminal_plot
from split_models.arm_cost import DEVICE_ARM, Arm
from split_models.explain import Curve

RATES = (1e5, 1e6, 1e7)


def cut(number: int, factor: float, excluded: str = "") -> Curve:
    return Curve(Arm("cut", f"{number:03}", "raw", "cloud"), (10.0 * factor, 1.0 * factor, 0.1 * factor), excluded)


def test_the_arms_that_come_nearest_to_the_best_are_drawn_and_the_others_are_named() -> None:
    poor = [cut(number, 3.0 + number, "not loaded" if number % 2 else "") for number in range(20)]
    device, cloud = Curve(DEVICE_ARM, (0.5, 0.5, 0.5)), Curve(Arm("cloud", link="cloud"), (20.0, 2.0, 0.05))
    silent = Curve(Arm("cut", "099", "raw", "cloud"), (inf, inf, inf))
    lines = terminal_plot([*poor, silent, device, cloud], RATES)
    legend = [line.split(maxsplit=1)[1] for line in lines if line[:2] == "  " and line[2:3] in MARKS and line[3] == " "]
    assert len(legend) == len(MARKS)
    assert {"device", "cloud"} <= set(legend)
    assert not any("not loaded" in line for line in legend), "what may be taken comes first"
    left_out = [line for line in lines if line.endswith(": not drawn")]
    assert len(left_out) == 23 - len(MARKS) and any("cut:099" in line for line in left_out)


def test_the_scale_is_written_in_plain_numbers() -> None:
    lines = terminal_plot([Curve(DEVICE_ARM, (80.0, 8.0, 0.004))], RATES)
    labels = [line.split("|")[0].strip() for line in lines if "|" in line and line.split("|")[0].strip()]
    assert labels[0] == "88,000 ms" and labels[-1] == "3.6 ms"

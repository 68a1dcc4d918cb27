"""Device classes: who belongs to which, what the shipped figures say, and what a strategy may not do."""

from __future__ import annotations

import tomllib
from importlib import resources
from math import log, sqrt
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from profiles.classes import parse_classes, seen_of, shipped_classes
from profiles.facts import collect, named
from profiles.strategy import KINDS, UNCLASSED, ClassMap, DeviceClass, Seen, Strategy, choose, nearest
from protocol.errors import ConfigError
from tests.unit.profiles.fake_root import build, raspberry_pi

KNOWN = shipped_classes()
RATES = st.floats(1e6, 1e14)


def name_of(*names: str, flops_per_s: tuple[float, ...] = (), arch: str | None = None, npu: str | None = None) -> str:
    return choose(Seen(names, arch, npu, flops_per_s), KNOWN, trusted=True).name


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Raspberry Pi 3 Model B Plus Rev 1.3", "raspberry-pi-3"),
        ("Raspberry Pi 4 Model B Rev 1.5", "raspberry-pi-4"),
        ("Raspberry Pi 400 Rev 1.0", "raspberry-pi-4"),
        ("Raspberry Pi 5 Model B Rev 1.0", "raspberry-pi-5"),
        ("qcom,sm7150", "snapdragon-730g"),
        ("qcom,sm8550", "snapdragon-8-gen-2"),
        ("NVIDIA Jetson Orin Nano Developer Kit", "jetson"),
        ("Dell Inc. Laptop 7420", "laptop"),
    ],
)
def test_boards_and_chips_are_known_by_name_whatever_they_measured(name: str, expected: str) -> None:
    assert name_of(name) == expected
    assert name_of(name, flops_per_s=(1e9,)) == expected


def test_hints_count_while_nothing_was_measured_and_not_after() -> None:
    assert name_of("Cortex-A55+Cortex-A76") == "snapdragon-730g"
    assert name_of("Cortex-A76") == "raspberry-pi-5"
    assert name_of("Cortex-A510+Cortex-A710+Cortex-A715+Cortex-X3") == "snapdragon-8-gen-2"
    assert name_of("board", npu="jetson") == "jetson"
    assert name_of("Xeon", arch="x86_64") == "laptop"
    assert name_of("Cortex-A55+Cortex-A76", arch="aarch64", flops_per_s=(8e9, 9e9)) == "raspberry-pi-3"


def test_a_device_like_none_is_given_the_careful_strategy() -> None:
    choice = choose(Seen(("fridge",), "riscv64"), KNOWN, trusted=True)
    assert (choice.name, choice.strategy.start, choice.strategy.hedge_ratio) == ("unknown", ("device",), 0.1)
    assert "not known" in choice.why


def test_a_device_that_acts_another_one_is_known_by_what_it_measures() -> None:
    slowed = Seen(("MacBook Pro",), "x86_64", None, (), slowed=True)
    assert choose(slowed, KNOWN, trusted=False).name == "unknown"
    slowed = Seen(("MacBook Pro",), "x86_64", None, (17e9, 18e9, 900e9), slowed=True)
    assert choose(slowed, KNOWN, trusted=True).name == "raspberry-pi-4"


def test_until_its_models_are_measured_a_device_begins_on_itself() -> None:
    pi = Seen(("Raspberry Pi 4 Model B",))
    assert choose(pi, KNOWN, trusted=True).strategy.start == ("cloud", "cut")
    provisional = choose(pi, KNOWN, trusted=False)
    assert provisional.strategy.start == ("device",)
    assert provisional.strategy.speed_ratio == 16.0


@settings(max_examples=200)
@given(rates=st.lists(RATES, min_size=1, max_size=9))
def test_the_nearest_class_is_no_farther_than_any_other(rates: list[float]) -> None:
    found = nearest(rates, KNOWN.classes)
    assert found is not None
    middle = sorted(rates)[len(rates) // 2] if len(rates) % 2 else sum(sorted(rates)[len(rates) // 2 - 1 :][:2]) / 2
    distances = [abs(log(middle / one.flops_per_s)) for one in KNOWN.classes]
    assert abs(log(middle / found[0].flops_per_s)) == pytest.approx(min(distances))
    assert log(found[1]) == pytest.approx(min(distances), abs=1e-9)


@settings(max_examples=200)
@given(rate=RATES, faster=st.floats(1.0, 1e4))
def test_a_faster_device_never_comes_into_a_slower_class(rate: float, faster: float) -> None:
    one, other = nearest([rate], KNOWN.classes), nearest([rate * faster], KNOWN.classes)
    assert one is not None and other is not None
    assert other[0].flops_per_s >= one[0].flops_per_s


@settings(max_examples=100)
@given(factor=st.floats(1e-3, 1e3), rate=RATES)
def test_half_as_fast_is_as_far_as_twice_as_fast(factor: float, rate: float) -> None:
    lone = (DeviceClass("one", "one", 0.6e9 / rate, 8.2e9 / rate, Strategy()),)
    up, down = nearest([rate * factor], lone), nearest([rate / factor], lone)
    assert up is not None and down is not None
    assert up[1] == pytest.approx(down[1], rel=1e-6)


@given(rates=st.lists(st.sampled_from([0.0, -1.0, float("inf"), float("nan")]), max_size=4))
def test_rates_that_cannot_be_are_no_measurement(rates: list[float]) -> None:
    assert nearest(rates, KNOWN.classes) is None
    assert nearest([1e9], ()) is None


def test_the_order_of_names_does_not_matter() -> None:
    names = ("Raspberry Pi 5 Model B", "brcm,bcm2712", "Cortex-A76")
    assert name_of(*names) == name_of(*reversed(names)) == "raspberry-pi-5"


def test_speed_ratios_are_what_the_figures_say() -> None:
    """Geometric mean of both nets over the server's; the laptop's figures and server are of one thread."""
    document = tomllib.loads(resources.files("profiles").joinpath("classes.toml").read_text(encoding="utf-8"))
    server = document["server"]
    for one in KNOWN.classes:
        light, dense = one.mobilenet_v2_s / server["mobilenet_v2_s"], one.resnet50_s / server["resnet50_s"]
        expected = sqrt(light * dense)
        if one.name == "laptop":
            expected = sqrt(one.mobilenet_v2_s / 0.00633 * one.resnet50_s / 0.03906)
        assert one.strategy.speed_ratio == pytest.approx(expected, rel=0.05)
        assert one.figures


def test_devices_twice_as_slow_as_a_server_begin_over_the_link() -> None:
    for one in KNOWN.classes:
        assert (one.strategy.start != ("device",)) == (one.strategy.speed_ratio > 2.0)
        assert set(one.strategy.start) <= set(KINDS)


def test_all_classes_that_were_asked_for_are_there() -> None:
    assert {one.name for one in KNOWN.classes} == {
        "raspberry-pi-3", "raspberry-pi-4", "raspberry-pi-5", "snapdragon-730g", "snapdragon-8-gen-2", "jetson",
        "laptop",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[class.x]\nmobilenet_v2_s = 1\n", "resnet50_s"),
        ("[class.x]\nmobilenet_v2_s = 0\nresnet50_s = 1\n", "more than 0"),
        ("[class.x]\nmobilenet_v2_s = 1\nresnet50_s = 1\nspeed = 2\n", "class.x.speed"),
        ("[class.x]\nmobilenet_v2_s = 1\nresnet50_s = 1\nhedge_ratio = 2\n", "hedge_ratio"),
        ('[class.x]\nmobilenet_v2_s = 1\nresnet50_s = 1\nstart = ["moon"]\n', "start"),
        ('[unknown]\narms = ["cloud"]\n', "the device always answers"),
        ("[class\n", "classes"),
    ],
)
def test_a_wrong_map_is_refused_with_the_field(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_classes(text, "classes.toml")


def test_an_empty_map_knows_nobody() -> None:
    assert parse_classes("", "none") == ClassMap((), UNCLASSED, "unknown device")


def test_a_pi_is_known_from_its_files_before_anything_else_is_collected(tmp_path: Path) -> None:
    root = build(tmp_path, raspberry_pi("Raspberry Pi 4 Model B Rev 1.4", "bcm2711", "0xd08", "fp asimd", 4 << 20, "0"))
    early, whole = named(root), collect(root)
    assert (early.model, early.soc, early.cpu) == (whole.model, whole.soc, whole.cpu)
    assert choose(seen_of(early), KNOWN, trusted=False).name == "raspberry-pi-4"

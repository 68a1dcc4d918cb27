"""The cost table: priors, benchmark figures and what live requests report."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import evolve

from profiles.rates import Slowdowns
from protocol.device import Measured
from split_models.arm_cost import Arm, ArmCost
from split_models.costs import CostTable
from tests.unit.split_models.parts import cut, manifest


def by_arm(table: CostTable, encoded_bytes: int | None = 5000) -> dict[str, ArmCost]:
    return {str(cost.arm): cost for cost in table.arms(encoded_bytes, ["cloud"], lambda *_: True)}


def test_priors_come_from_the_bundle_and_the_declared_ratio() -> None:
    table = CostTable(manifest(cut("003")), speed_ratio=4.0, watts=5.0)
    arms = by_arm(table)
    assert arms["device"].device_s == pytest.approx(0.48)  # whole and what stands around it
    assert arms["device"].joules == pytest.approx(2.4)
    assert arms["cut:003:int8"].device_s == pytest.approx(0.08 + 0.04)
    assert arms["cut:003:int8"].server_s == pytest.approx(0.02)
    assert arms["cloud"].device_s == 0.0
    assert arms["cloud"].up_bytes > 5000


def test_raw_tensors_have_no_cloud_arm_and_no_recipe() -> None:
    arms = by_arm(CostTable(manifest(cut("003"))), encoded_bytes=None)
    assert set(arms) == {"device", "cut:003:int8"}
    assert arms["device"].device_s == pytest.approx(0.1)


def test_raw_tensors_whose_size_is_told_may_go_to_the_whole_model_there() -> None:
    table = CostTable(manifest(cut("003"), whole_s=0.1, cloud_s=0.5))
    arms = {str(cost.arm): cost for cost in table.arms(None, ["cloud"], lambda *_: True, raw_bytes=40_000)}
    assert set(arms) == {"device", "cut:003:int8", "cloud"}
    assert arms["cloud"].up_bytes == 40_400
    assert arms["cloud"].server_s == pytest.approx(0.1), "no recipe runs there"
    assert arms["cloud"].sends_input
    table.observe("server", "input", 0.3)
    assert table.seconds("server", "cloud") == pytest.approx(0.5)


def test_a_far_end_that_takes_zstd_offers_cuts_with_fewer_bytes() -> None:
    small = evolve(cut("003"), wire_bytes=100_000, zstd_bytes=40_000, zstd_down_bytes=60, zstd_s=0.002)
    incompressible = evolve(cut("009"), wire_bytes=100_000, zstd_bytes=99_000, zstd_down_bytes=60, zstd_s=0.002)
    table = CostTable(manifest(small, incompressible, cut("011")), speed_ratio=4.0)
    assert not any(cost.arm.compressed for cost in table.arms(5000, ["cloud"], lambda *_: True))
    arms = {str(c.arm): c for c in table.arms(5000, ["cloud"], lambda *_: True, zstd=lambda link: link == "cloud")}
    assert [name for name in arms if "+zstd" in name] == ["cut:003:int8+zstd"]
    packed, plain = arms["cut:003:int8+zstd"], arms["cut:003:int8"]
    assert packed.up_bytes - plain.up_bytes == -60_000
    assert packed.device_s == pytest.approx(plain.device_s + 0.008)
    assert packed.server_s == pytest.approx(plain.server_s + 0.002)


def test_sizes_of_live_requests_replace_those_of_calibration() -> None:
    table = CostTable(manifest(evolve(cut("003"), wire_bytes=100_000, zstd_bytes=10_000, zstd_down_bytes=60)))
    for _ in range(20):
        table.observe_packed(Arm("cut", "003", "int8+zstd", "cloud"), 50_000, 60)
    arms = {str(c.arm): c for c in table.arms(5000, ["cloud"], lambda *_: True, zstd=lambda _: True)}
    assert arms["cut:003:int8+zstd"].up_bytes == pytest.approx(50_400, rel=0.01)


def test_without_links_there_is_only_the_device() -> None:
    table = CostTable(manifest(cut("003")))
    assert [str(cost.arm) for cost in table.arms(100, [], lambda *_: True)] == ["device"]


def test_benchmark_figures_replace_priors_and_scale_what_was_not_measured() -> None:
    table = CostTable(manifest(cut("003"), cut("009", share=0.5)))
    figure: dict[str, Any] = {"digest": "d" * 64, "engine": "onnx", "threads": 1, "spread_s": 0.0}
    table.learn(
        [Measured(what="whole", median_s=0.3, **figure), Measured(what="head:003:int8", median_s=0.07, **figure)]
    )
    assert table.seconds("device", "whole") == pytest.approx(0.3)
    assert table.seconds("device", "head:003:int8") == pytest.approx(0.07)
    assert table.seconds("device", "head:009:int8") == pytest.approx(0.15)


def test_figures_of_another_model_are_not_taken() -> None:
    table = CostTable(manifest(cut("003")))
    table.learn([Measured(digest="f" * 64, engine="onnx", threads=1, what="whole", median_s=9.0, spread_s=0.0)])
    assert table.seconds("device", "whole") == pytest.approx(0.1)


def test_the_first_whole_run_corrects_unseen_heads() -> None:
    table = CostTable(manifest(cut("003")))
    table.observe("device", "whole", 0.5)
    assert table.seconds("device", "whole") == pytest.approx(0.5)
    assert table.seconds("device", "head:003:int8") == pytest.approx(0.05)


def test_a_hot_device_makes_all_its_parts_dearer_and_the_server_none() -> None:
    table = CostTable(manifest(cut("003")))
    table.observe("device", "whole", 0.1)
    table.observe("device", "head:003:int8", 0.02)
    for _ in range(5):
        table.observe("device", "whole", 0.3)
    assert table.seconds("device", "whole") == pytest.approx(0.3, rel=0.02)
    assert table.seconds("device", "head:003:int8") == pytest.approx(0.06, rel=0.02)
    assert table.seconds("server", "tail:003:int8") == pytest.approx(0.02)


def test_a_wrong_prior_of_one_head_does_not_slow_the_others() -> None:
    table = CostTable(manifest(cut("003"), cut("009", share=0.5)))
    table.observe("device", "whole", 0.1)
    for _ in range(10):
        table.observe("device", "head:003:int8", 0.08)  # the share of flops said 0.01
    assert table.seconds("device", "whole") == pytest.approx(0.1)
    assert table.seconds("device", "head:009:int8") == pytest.approx(0.05)


def test_one_outlier_changes_nothing() -> None:
    table = CostTable(manifest())
    for _ in range(5):
        table.observe("server", "cloud", 0.1)
    table.observe("server", "cloud", 1.1)
    assert table.seconds("server", "cloud") == pytest.approx(0.1)


@pytest.mark.parametrize("factor", [0.5, 3.0])
def test_a_lasting_change_is_seen_within_five_requests(factor: float) -> None:
    table = CostTable(manifest(cut("003")))
    for _ in range(20):
        table.observe("device", "whole", 0.2)
    for _ in range(5):
        table.observe("device", "whole", 0.2 * factor)
    assert table.seconds("device", "whole") == pytest.approx(0.2 * factor)
    assert table.seconds("device", "head:003:int8") == pytest.approx(0.02 * factor)


def test_models_of_one_device_share_a_slow_down() -> None:
    slowdowns = Slowdowns()
    first, second = (CostTable(manifest(cut("003")), slowdowns=slowdowns) for _ in range(2))
    for seconds in (0.1, 0.3, 0.3, 0.3):
        first.observe("device", "whole", seconds)
    assert slowdowns.factor("onnx") == pytest.approx(3.0)
    assert second.seconds("device", "whole") == pytest.approx(0.3), "the second model has not run since"
    assert second.seconds("server", "tail:003:int8") == pytest.approx(0.02)
    elsewhere = CostTable(manifest(), engine="tflite", slowdowns=slowdowns)
    assert elsewhere.seconds("device", "whole") == pytest.approx(0.1)


def test_a_cold_first_run_is_no_measure_of_the_model() -> None:
    slowdowns = Slowdowns()
    table = CostTable(manifest(cut("003")), slowdowns=slowdowns)
    for seconds in (0.9, 0.2, 0.2, 0.2):
        table.observe("device", "whole", seconds)
    assert table.seconds("device", "whole") == pytest.approx(0.2)
    assert table.seconds("device", "head:003:int8") == pytest.approx(0.02)
    assert slowdowns.factor("onnx") == pytest.approx(1.0)


def test_a_benchmarked_part_shows_a_slow_down_from_its_first_runs() -> None:
    table = CostTable(manifest(cut("003")))
    table.learn([Measured(digest="d" * 64, engine="onnx", threads=1, what="whole", median_s=0.2, spread_s=0.0)])
    for _ in range(3):
        table.observe("device", "whole", 0.6)
    assert table.seconds("device", "head:003:int8") == pytest.approx(0.06)


def test_large_pictures_are_not_taken_for_a_slow_engine() -> None:
    table = CostTable(manifest(cut("003")))
    for seconds in (0.01, 0.3, 0.3, 0.3):
        table.observe("device", "before", seconds)
    assert table.seconds("device", "before") == pytest.approx(0.3)
    assert table.seconds("device", "whole") == pytest.approx(0.1)


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -1.0])
def test_nonsense_is_ignored(seconds: float) -> None:
    table = CostTable(manifest())
    table.observe("device", "whole", seconds)
    table.observe("device", "nobody", 1.0)
    assert table.seconds("device", "whole") == pytest.approx(0.1)


def test_unloaded_heads_are_marked_and_server_waits_are_added() -> None:
    table = CostTable(manifest(cut("003"), cut("009")))
    found = table.arms(100, ["cloud"], lambda ident, codec: ident == "009", {"cloud": 1.5})
    loaded = {cost.arm.cut: cost.loaded for cost in found if cost.arm.kind == "cut"}
    assert loaded == {"003": False, "009": True}
    assert all(cost.server_s > 1.5 for cost in found if cost.arm.link)


@pytest.mark.parametrize("factor", [0.5, 3.0])
def test_a_server_that_slows_down_is_seen_within_five_requests(factor: float) -> None:
    table = CostTable(manifest(cut("003"), cut("009")))
    for part in ("tail:003:int8", "tail:009:int8"):
        for _ in range(5):
            table.observe("server", part, 0.03)
    for _ in range(5):
        table.observe("server", "tail:003:int8", 0.03 * factor)
    assert table.seconds("server", "tail:003:int8") == pytest.approx(0.03 * factor)
    assert table.seconds("server", "tail:009:int8") == pytest.approx(0.03 * factor), "the other tail has not run since"
    assert table.seconds("device", "whole") == pytest.approx(0.1)


def test_what_requests_taught_is_recalled_before_benchmarks_and_without_the_heat() -> None:
    table = CostTable(manifest(cut("003"), cut("009", share=0.5)))
    for seconds in (0.2, 0.2, 0.2, 0.2, 0.4, 0.4, 0.4, 0.4, 0.4):
        table.observe("device", "whole", seconds)
    for _ in range(4):
        table.observe("server", "tail:003:int8", 0.07)
    table.observe("device", "head:003:int8", 0.05)
    learnt = table.learnt()
    assert learnt["device"] == {"whole": pytest.approx(0.2)}, "one run of a head is not enough"
    again = CostTable(manifest(cut("003"), cut("009", share=0.5)))
    again.recall(learnt)
    figure: dict[str, Any] = {"digest": "d" * 64, "engine": "onnx", "threads": 1, "spread_s": 0.0}
    again.learn([Measured(what="whole", median_s=0.9, **figure)])
    assert again.seconds("device", "whole") == pytest.approx(0.2)
    assert again.seconds("device", "head:009:int8") == pytest.approx(0.1)
    assert again.seconds("server", "tail:003:int8") == pytest.approx(0.07)
    for _ in range(5):
        again.observe("device", "whole", 0.6)
    assert again.seconds("device", "whole") == pytest.approx(0.6), "what is recalled is corrected as ever"


def test_a_tail_here_costs_what_the_head_leaves_until_it_was_measured() -> None:
    table = CostTable(manifest(cut(share=0.4), whole_s=0.1, cloud_s=0.1), speed_ratio=2.0)

    def rest_s(*, here: bool = True) -> float | None:
        arms = table.arms(100, ("cloud",), lambda *_: True, ends_here=lambda *_: here)
        return next(cost.rest_s for cost in arms if cost.arm.kind == "cut")

    assert rest_s(here=False) is None
    assert rest_s() == pytest.approx(0.6 * 0.2)
    for _ in range(3):
        table.observe("device", "tail:003:int8", 0.15)
    assert rest_s() == pytest.approx(0.15)
    cold = CostTable(manifest(cut(share=0.4), whole_s=0.1, cloud_s=0.1))
    cold.observe("device", "tail:003:int8", 9.0)
    found = cold.arms(100, ("cloud",), lambda *_: True, ends_here=lambda *_: True)
    assert next(cost.goes_on_s for cost in found if cost.arm.kind == "cut") <= 0.1 + 1e-9

"""The class of a device over its life: named, measured, and doubted again when another model comes."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent.cli.run import status_lines
from agent.compose_tensor import bounded
from agent.device_class import DeviceClassing
from profiles.facts import Facts
from profiles.strategy import Strategy
from protocol.policy import SplitPolicy
from tests.unit.agent.houses import RunningHouse, config_for

PI = Facts(model="Raspberry Pi 3 Model B Plus Rev 1.3", arch="aarch64")


def test_a_new_model_version_makes_the_strategy_untrusted_until_it_was_measured() -> None:
    here = {"one"}
    classing = DeviceClassing(lambda: frozenset(here), slowed=False, facts=PI)
    assert (classing.choice.name, classing.strategy().start) == ("raspberry-pi-3", ("device",))
    classing.measured((9e9,), frozenset({"one"}))
    assert classing.choice.trusted
    assert classing.strategy().start == ("cloud", "cut")
    here.add("two")
    assert classing.strategy().start == ("device",)
    classing.measured((9e9, 8e9), frozenset({"one", "two"}))
    assert classing.strategy().start == ("cloud", "cut")
    here.discard("one")
    assert classing.choice.trusted


def test_facts_that_come_later_change_the_class_and_not_the_trust() -> None:
    classing = DeviceClassing(lambda: frozenset(), slowed=False, facts=Facts())
    assert classing.choice.name == "unknown"
    classing.know(PI)
    assert (classing.choice.name, classing.choice.trusted) == ("raspberry-pi-3", False)


def test_the_class_bounds_the_policys_hedges_and_never_raises_them() -> None:
    assert bounded(SplitPolicy(hedge_ratio=1.0), Strategy(hedge_ratio=0.25)).hedge_ratio == 0.25
    assert bounded(SplitPolicy(hedge_ratio=0.1), Strategy(hedge_ratio=0.25)).hedge_ratio == 0.1


@pytest.mark.parametrize("trusted", [True, False])
def test_status_tells_the_class_and_why(trusted: bool) -> None:
    said = {"title": "Raspberry Pi 4 class", "why": "it is a Raspberry Pi 4 Model B", "trusted": trusted}
    line = next(line for line in status_lines({"device_class": said}) if line.startswith("class"))
    assert "Raspberry Pi 4 class: it is a Raspberry Pi 4 Model B" in line
    assert ("until its models are measured" in line) is not trusted


async def test_a_running_agent_tells_its_class(tmp_path: Path) -> None:
    async with RunningHouse(config_for(tmp_path)) as agent:
        told = (await agent.status())["device_class"]
    assert set(told) == {"name", "title", "why", "trusted", "start"}
    assert told["why"]
    assert not told["trusted"]

"""What was measured once, kept in a file: cases with the costs of their arms, so that later runs need not measure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from attrs import asdict, evolve

from benchmarks.split_replay.cases import CLASSES, Case
from profiles.classes import shipped_classes
from split_models.arm_cost import Arm, ArmCost

SCHEMA = "midstream-bench-costs/1"


def save(cases: Sequence[Case], file: Path) -> None:
    """Write the cases; strategies are not kept, they are the classes' own."""
    file.parent.mkdir(parents=True, exist_ok=True)
    rows = [
        {
            "model": case.model,
            "speed": case.speed,
            "stop_s": case.stop_s,
            "costs": [asdict(cost) for cost in case.costs],
        }
        for case in cases
    ]
    file.write_text(json.dumps({"schema": SCHEMA, "cases": rows}, indent=1) + "\n")


def load(file: Path) -> Sequence[Case]:
    """The cases that `save` wrote. Raises ValueError when the file is another one."""
    kept = json.loads(file.read_text())
    if not isinstance(kept, dict) or kept.get("schema") != SCHEMA:
        raise ValueError(f"{file.name} holds no measured costs: delete it, and they are measured again")
    return [_case(row) for row in kept["cases"]]


def _case(row: dict[str, object]) -> Case:
    speed, costs = str(row["speed"]), row["costs"]
    of_class = next(one for one in shipped_classes().classes if one.name == CLASSES[speed])
    assert isinstance(costs, list)
    found = tuple(ArmCost(**{**cost, "arm": Arm(**cost["arm"])}) for cost in costs)
    strategy = evolve(of_class.strategy, hedge_ratio=1.0)
    return Case(str(row["model"]), speed, found, strategy, of_class.title, float(str(row["stop_s"])))

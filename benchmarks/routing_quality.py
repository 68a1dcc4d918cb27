"""Routing quality on an oracle: for each prompt it is known whether the small and the large model are right.

RouteLLM's evaluation files give those flags for Mixtral-8x7B and GPT-4 on GSM8K (with prompts) and MMLU (subject and
length only). A route calibrated on one half, by subject, length and what the gateway's reader sees in a prompt, is
judged on the other half: share of the cost saved against accuracy, beside random routes, each model alone, and the
oracle that asks the large model only where it alone is right. The small model costs nothing; the large one by the words
of the prompt, and by calls. Halves are drawn anew several times. What the same inputs give when they are fitted on the
judged half itself (`fitted_on_itself`, no route that could be had) says how much of a gap is theirs.

    python -m benchmarks.routing_quality --json quality.json [--traces DIR] [--quick]
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from attrs import frozen

from benchmarks.report import arguments, publish, spread
from benchmarks.routing import Shelf
from benchmarks.routing_http import POLICY
from cloud_stub.publishing import compile_policy
from gateway.context import LOCAL
from gateway.intents import default_model
from gateway.ports import Findings
from gateway.prompt_reader import PromptReader
from gateway.routing import PolicyRouter
from protocol.chat import ChatRequest
from protocol.text import Message

Floats = np.ndarray[Any, np.dtype[np.float64]]

SHARES = tuple(step / 10 for step in range(11))
LOSS = 0.01
SAVED = 0.3
RIDGE = 10.0


@frozen
class Case:
    """One prompt of the oracle. text: where it is known."""

    subject: str
    words: int
    small: bool
    large: bool
    text: str = ""


def cases(traces: Path | None, seed: int = 5) -> list[Case]:
    """RouteLLM's files in `traces`/routellm, or made-up ones in which subjects differ in what they gain."""
    if traces is None:
        return _made_up(seed)
    folder = traces / "routellm"
    found = [
        Case(row["subject"], int(row["prompt_words"]), *_flags(row)) for row in _rows(folder / "mmlu_correctness_a.csv")
    ]
    return found + [
        Case("gsm8k", len(row["prompt"].split()), *_flags(row), row["prompt"])
        for row in _rows(folder / "gsm8k_flags_a.csv")
    ]


@frozen
class Table:
    """The flags as arrays. cost: of asking the large model; inputs: what a calibrated route may look at."""

    small: Floats
    large: Floats
    words: Floats
    inputs: Floats

    def part(self, rows: Sequence[int]) -> Table:
        """Some of the rows."""
        at = np.asarray(rows)
        return Table(self.small[at], self.large[at], self.words[at], self.inputs[at])


def table(found: Sequence[Case]) -> Table:
    """Inputs: the subject, the length within it, and the marks and numbers of a text."""
    subjects = sorted({case.subject for case in found})
    reader = PromptReader(default_model())
    rows = []
    for case in found:
        length = 0.5 * (math.log(max(1, case.words)) - 4.0)
        seen = reader.read(case.text).marks if case.text else (0,) * 6
        numbers = math.log1p(sum(word.strip("$%.,?").isdigit() for word in case.text.split()))
        place = subjects.index(case.subject)
        hot, slope = [0.0] * len(subjects), [0.0] * len(subjects)
        hot[place], slope[place] = 1.0, length
        rows.append([*hot, *slope, length, *map(float, seen), numbers])
    flags = np.array([(case.small, case.large, case.words) for case in found], dtype=float)
    return Table(flags[:, 0], flags[:, 1], flags[:, 2], np.array(rows))


def gains(fit: Table, asked: Table) -> Floats:
    """Expected gain of asking the large model, by ridge regression on the difference of the flags."""
    wanted = fit.large - fit.small
    mean = wanted.mean()
    inner = fit.inputs.T @ fit.inputs + RIDGE * np.eye(fit.inputs.shape[1])
    weights = np.linalg.solve(inner, fit.inputs.T @ (wanted - mean))
    result: Floats = asked.inputs @ weights + mean
    return result


@frozen
class Curve:
    """saved: share of the cost; lost: accuracy under that of the large model alone; by how many go to the small one."""

    saved: Floats
    lost: Floats

    def saved_within(self, loss: float) -> float:
        """The most that is saved at no more than `loss`."""
        return float(np.max(self.saved, where=self.lost <= loss, initial=0.0))

    def lost_at(self, saved: float) -> float:
        """Accuracy lost where at least `saved` is saved."""
        return float(self.lost[min(len(self.lost) - 1, int(np.searchsorted(self.saved, saved)))])


def curve(order: Floats, asked: Table, cost: Floats) -> Curve:
    """Prompts go to the small model in ascending `order`."""
    places = np.argsort(order, kind="stable")
    lost = np.cumsum((asked.large - asked.small)[places]) / len(places)
    return Curve(np.concatenate(([0.0], np.cumsum(cost[places]) / cost.sum())), np.concatenate(([0.0], lost)))


def judged(data: Table, rng: np.random.Generator) -> dict[str, Curve]:
    """One draw of halves: calibrated and random routes, the oracle, what the inputs can give; by words and by calls."""
    mixed = rng.permutation(len(data.small))
    half = len(mixed) // 2
    fit, asked = data.part(mixed[:half].tolist()), data.part(mixed[half:].tolist())
    found, true = gains(fit, asked), asked.large - asked.small
    chance = rng.random(len(found))
    calls = np.ones_like(asked.words)
    return {
        # What is gained per unit of cost decides, as it would for any knapsack.
        "route": curve(found / asked.words, asked, asked.words),
        "random": curve(chance, asked, asked.words),
        "oracle": curve(true * 1e6 - asked.words, asked, asked.words),
        "fitted_on_itself": curve(gains(asked, asked) / asked.words, asked, asked.words),
        "route_calls": curve(found, asked, calls),
        "random_calls": curve(chance, asked, calls),
    }


def measure(found: Sequence[Case], draws: int) -> tuple[dict[str, object], list[str]]:
    """All keys, and the curves for people."""
    data = table(found)
    rng = np.random.default_rng(1)
    drawn = [judged(data, rng) for _ in range(draws)]
    keys: dict[str, object] = {
        "prompts": len(found),
        "accuracy_always_device": float(data.small.mean()),
        "accuracy_always_cloud": float(data.large.mean()),
        "accuracy_oracle": float(np.maximum(data.small, data.large).mean()),
        "saved_oracle": float(1.0 - data.words[(data.large > data.small)].sum() / data.words.sum()),
    }
    notes = []
    for name in ("route", "fitted_on_itself", "random", "route_calls", "random_calls"):
        saved = [one[name].saved_within(LOSS) for one in drawn]
        lost = [100 * one[name].lost_at(SAVED) for one in drawn]
        keys[f"saved_at_1_point_{name}"] = float(np.median(saved))
        keys[f"points_lost_at_30_percent_{name}"] = float(np.median(lost))
        notes.append(f"{name}: saved at 1 point {spread(saved)}, points lost at 30 % saved {spread(lost)}")
    for name in ("route", "random", "oracle"):
        points = [float(np.mean([one[name].lost_at(share) for one in drawn])) for share in SHARES]
        keys[f"curve_{name}"] = [round(100 * float(data.large.mean() - lost), 2) for lost in points]
        notes.append(f"accuracy at 0, 10, ... 100 % saved, {name}: {keys[f'curve_{name}']}")
    keys["reached"] = float(np.median([one["route"].saved_within(LOSS) for one in drawn])) >= SAVED
    return keys, notes


def as_shipped(found: Sequence[Case]) -> Mapping[str, float]:
    """The router without any calibration, on the prompts whose text is known: share on the device, accuracy."""
    asked = [case for case in found if case.text]
    if not asked:
        return {}
    policy, router, shelf = compile_policy(POLICY.read_bytes(), "yaml"), PolicyRouter(), Shelf()
    here = [
        router.route(ChatRequest("auto", (Message("user", case.text),)), LOCAL, Findings(), shelf, policy, 0.5).start
        == "device"
        for case in asked
    ]
    right = sum(case.small if local else case.large for case, local in zip(asked, here, strict=True))
    return {"shipped_device_share": sum(here) / len(asked), "shipped_accuracy": right / len(asked)}


def _made_up(seed: int) -> list[Case]:
    rng = np.random.default_rng(seed)
    found = []
    for subject in range(30):
        small, gain = rng.uniform(0.4, 0.9), rng.uniform(-0.03, 0.3)
        for _ in range(250):
            weak, strong = rng.random() < small, rng.random() < min(0.97, small + gain)
            found.append(Case(f"subject {subject}", int(rng.lognormal(4.2, 0.6)) + 5, bool(weak), bool(strong)))
    return found


def _rows(file: Path) -> list[dict[str, str]]:
    with file.open(encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines))


def _flags(row: Mapping[str, str]) -> tuple[bool, bool]:
    return row["mixtral_8x7b_correct"] == "1", row["gpt4_1106_correct"] == "1"


def main() -> None:
    """Command line."""
    parser = arguments("Cost against accuracy of routes, on an oracle of correct answers.")
    parser.add_argument("--traces", type=Path, help="folder with routellm/; made-up flags otherwise")
    options = parser.parse_args()
    found = cases(options.traces)
    keys, notes = measure(found, 5 if options.quick else 40)
    keys |= as_shipped(found)
    notes.append("RouteLLM's flags" if options.traces else "made-up flags: the figures say nothing of real models")
    publish("routing_quality", keys, options.json, notes)


if __name__ == "__main__":
    main()

"""One cell: one case over one trace, by every fixed arm, the oracle, and ours at four hedging budgets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean

from attrs import evolve, frozen

from benchmarks.report import percentile
from benchmarks.split_replay.cases import Case
from benchmarks.split_replay.traces import Scene
from protocol.policy import SplitPolicy
from split_models.arm_cost import DEVICE_ARM
from split_models.replay import Load, Outcome, replay, replay_fixed, replay_informed, replay_oracle

BUDGETS = (0.0, 0.10, 0.25, 1.0)
CHOSEN = 0.25


@frozen
class Figures:
    """Seconds of one run."""

    mean_s: float
    p99_s: float
    spread_s: float

    @classmethod
    def of(cls, outcome: Outcome) -> Figures:
        """Mean, 99th percentile, and the 95th less the 5th."""
        found = outcome.latencies_s
        spread_s = percentile(found, 0.95) - percentile(found, 0.05)
        return cls(mean(found), percentile(found, 0.99), spread_s)


@frozen
class Cell:
    """What became of one case on one scene. `ours` by hedging budget; wifi_arm: the fixed arm that is best on the
    Wi-Fi stretches of a handover scene; informed: who knows the link exactly as it was one request ago; flagship: the
    fast device's best fixed cut, on this slow device.
    """

    kind: str
    scene: str
    model: str
    speed: str
    requests: int
    fixed: Mapping[str, Figures]
    oracle: Figures
    informed: Figures
    oracle_on_device: float
    ours: Mapping[float, Figures]
    switches: int
    hedged_share: float
    late_cut_ratio: float
    wifi_arm: str = ""
    flagship: Figures | None = None

    @property
    def best(self) -> str:
        """The fixed arm with the least mean."""
        return min(self.fixed, key=lambda arm: self.fixed[arm].mean_s)


def cell(scene: Scene, case: Case, fast: Case, policy: SplitPolicy, requests: tuple[int, int]) -> Cell:
    """Run everything. requests: at least and at most so many."""
    load = Load.again(scene.trace, case.every_s, *requests)
    fixed = {str(cost.arm): Figures.of(replay_fixed(scene.trace, cost, load)) for cost in case.costs}
    oracle = replay_oracle(scene.trace, case.costs, load)
    runs = {
        budget: replay(
            scene.trace,
            case.costs,
            evolve(policy, hedge_ratio=budget),
            load,
            strategy=case.strategy,
            stop_s=case.stop_s,
        )
        for budget in BUDGETS
    }
    chosen = runs[CHOSEN]
    return Cell(
        kind=scene.kind,
        scene=scene.trace.name,
        model=case.model,
        speed=case.speed,
        requests=load.count,
        fixed=fixed,
        oracle=Figures.of(oracle),
        informed=Figures.of(replay_informed(scene.trace, case.costs, load, case.every_s)),
        oracle_on_device=oracle.arms.get(str(DEVICE_ARM), 0) / load.count,
        ours={budget: Figures.of(run) for budget, run in runs.items()},
        switches=chosen.switches,
        hedged_share=chosen.hedged_s / (load.count * case.device_s),
        late_cut_ratio=_late_cut_ratio(case, chosen),
        wifi_arm=_best_on_wifi(scene, case),
        flagship=_flagship(scene, case, fast, fixed, load) if case.speed == "slow" else None,
    )


def _late_cut_ratio(case: Case, run: Outcome) -> float:
    """How late, over the device's own answer, a cut that ours used answers at best when its link fails: the hedge can
    only begin after the head, with the tail or with the whole model.
    """
    used = [cost for cost in case.costs if cost.arm.kind == "cut" and run.arms.get(str(cost.arm), 0)]
    late_s = [cost.device_s + min(cost.goes_on_s, case.device_s) for cost in used]
    return max(late_s, default=case.device_s) / case.device_s


def _best_on_wifi(scene: Scene, case: Case) -> str:
    if scene.wifi is None:
        return ""
    load = Load.over(scene.wifi, case.every_s, scene.wifi.seconds)
    means = {str(cost.arm): Figures.of(replay_fixed(scene.wifi, cost, load)).mean_s for cost in case.costs}
    return min(means, key=lambda arm: means[arm])


def _flagship(scene: Scene, case: Case, fast: Case, fixed: Mapping[str, Figures], load: Load) -> Figures | None:
    """The slow device with the cut that is best for the fast one on this trace."""
    own = Load.again(scene.trace, fast.every_s, load.count, load.count)
    cuts = {
        str(cost.arm): Figures.of(replay_fixed(scene.trace, cost, own)).mean_s
        for cost in fast.costs
        if cost.arm.kind == "cut"
    }
    return fixed.get(min(cuts, key=lambda arm: cuts[arm])) if cuts else None


def line_of(found: Cell) -> str:
    """One row for the reader, milliseconds."""
    best, ours, oracle = found.fixed[found.best], found.ours[CHOSEN], found.oracle
    device = found.fixed[str(DEVICE_ARM)]
    cloud = found.fixed.get("cloud")
    cuts = {arm: figures for arm, figures in found.fixed.items() if arm.startswith("cut")}
    cut = min(cuts, key=lambda arm: cuts[arm].mean_s, default="")
    return (
        f"{found.kind:9} {found.scene[:24]:24} {found.model[:12]:12} {found.speed:4} "
        f"device {_pair(device)}  cloud {_pair(cloud)}  cut {_pair(cuts.get(cut))} {cut.removeprefix('cut:')[:15]:15} "
        f"oracle {_pair(oracle)}  ours {_pair(ours)}  "
        f"to oracle {ours.mean_s / oracle.mean_s:5.2f}  to best {ours.mean_s / best.mean_s:5.2f} "
        f"p99 {ours.p99_s / best.p99_s:5.2f}  switches {found.switches:3} hedged {found.hedged_share:4.0%}"
    )


def _pair(figures: Figures | None) -> str:
    return f"{1e3 * figures.mean_s:7.0f}/{1e3 * figures.p99_s:7.0f}" if figures is not None else f"{'-':>15}"


def curve(cells: Sequence[Cell]) -> Mapping[float, tuple[float, float]]:
    """Per budget: mean over the cells of the mean's ratio to the oracle's, and of the P99's to the best fixed arm's."""
    return {
        budget: (
            mean(one.ours[budget].mean_s / one.oracle.mean_s for one in cells),
            mean(one.ours[budget].p99_s / one.fixed[one.best].p99_s for one in cells),
        )
        for budget in BUDGETS
    }

"""The keys of the handoff bench, from its answers as they went.

`nll_ratio` is of the target's part of a stitched answer, given the part before the seam, over the model's own answers
at the same places, over all pairs. What stands before the seam was written before the target was asked, and the law
forbids to change it: between two models it is as likely under the target as their words are alike, whoever moves
answers. `nll_ratio_whole` counts it too. Both stand beside by how answers cross.

`nll_ratio_unmoved_same_prefix` is the same of some of the answers that moved between two models, but of what the target
makes when nobody moves anything: asked to go on from the prompt with the source's text behind it. The law fixes what it
writes there, so that this ratio is one of the two models; `nll_ratio_to_same_prefix`, moved over not moved for the same
answers, is what the handoff itself adds (1: nothing).

`id_bytes_ratio` is of all frames that carry an answer's ids to a target, the header of Prepare included, over the same
frames with the same batches as UTF-8 text behind the same headers, whole or short, as each crossed;
`id_bytes_ratio_whole_frames` counts the request in Prepare too (prompt, sampling), which is the same on both sides and
crosses however the answer does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean

from attrs import define, field

from benchmarks.handoff_again import Heard
from benchmarks.handoff_plan import CROSSINGS, PHASES, VICTIMS, Plan
from benchmarks.handoff_score import Judged, ratio_of_means, text_bytes
from benchmarks.handoff_stage import Batch
from benchmarks.report import percentile
from gateway.pacing import DeliveryMeter
from gateway.stops import Owned
from protocol.text import Token


@define
class Likelihood:
    """Mean nats per token of a stitched answer, and of the model's own answers at the same places."""

    nll: float
    own_nll: float


@define
class Outcome:
    """One answer as it went. `struck`: the kill happened. `whole`, `rest`: of all of it, and behind the last seam.

    heard: what the engine that made its end was given to read meanwhile. alone: what that one makes of the text before
    the last seam as its prompt, if it was asked; alone_rest: of that.
    """

    plan: Plan
    r_c: float
    owned: list[Owned]
    meter: DeliveryMeter
    judged: Judged
    moved: bool = False
    lost_sides: int = 0
    struck: bool = False
    error: str = ""
    seconds: float = 0.0
    batches: list[Batch] = field(factory=list)
    whole: Likelihood | None = None
    rest: Likelihood | None = None
    heard: tuple[Heard, ...] = ()
    alone: list[Token] = field(factory=list)
    alone_rest: Likelihood | None = None

    @property
    def _last_seam(self) -> int:
        sides = [one.side for one in self.owned]
        return max((n for n in range(1, len(sides)) if sides[n] != sides[n - 1]), default=0)

    def at_last_seam(self) -> tuple[list[Token], list[Token]]:
        """The answer before its last change of sides, and behind it; tokens without text apart."""
        at = self._last_seam
        before, after = ([one.token for one in part if one.token.data] for part in (self.owned[:at], self.owned[at:]))
        return before, after

    @property
    def clean(self) -> bool:
        """Asked to move, nothing killed."""
        return self.plan.moves and self.plan.victim is None

    @property
    def done(self) -> bool:
        """What was planned happened: it moved, or somebody was killed in the phase; an answer that stays is done."""
        return self.struck if self.plan.victim else self.moved or not self.plan.moves


def answer_keys(outcomes: Sequence[Outcome]) -> dict[str, object]:
    """Keys about the answers; the first ones are those that the bench is held to."""
    moved = [o for o in outcomes if o.clean and o.moved]
    killed = [o for o in outcomes if o.struck]
    alone = [o for o in outcomes if not o.plan.moves]
    gaps = [gap * o.r_c for o in moved for gap in o.meter.paced_s]
    alone_gaps = [gap * o.r_c for o in alone for gap in o.meter.paced_s]
    id_batches = [b for o in moved for b in o.batches if o.plan.pair.crosses == "ids"]
    return {
        "lost": sum(o.judged.lost for o in outcomes),
        "doubled": sum(o.judged.doubled for o in outcomes),
        "law_violations": sum(len(o.judged.violations) for o in outcomes),
        "delayed_tokens_mean_clean": _mean_delayed(moved),
        "delayed_tokens_mean_kill": _mean_delayed(killed),
        "delayed_tokens_max": max((o.meter.delayed_tokens for o in moved + killed), default=None),
        "delayed_tokens_mean_unmigrated": _mean_delayed(alone),
        "tbt_p99_ratio": percentile(gaps, 0.99) / percentile(alone_gaps, 0.99) if gaps and alone_gaps else None,
        "id_bytes_ratio": _bytes_ratio(id_batches, lambda b: b.request_bytes),
        "id_bytes_ratio_whole_frames": _bytes_ratio(id_batches, lambda _: 0),
        "tokens_per_id_frame": fmean(len(b.tokens) for b in id_batches) if id_batches else None,
        **_nll_ratios(moved),
        **_same_prefix(moved),
        "migrations_clean": len(moved),
        "kills": len(killed),
        **{f"kills_{phase}": sum(o.plan.phase == phase for o in killed) for phase in PHASES},
        **{f"delayed_tokens_mean_kill_{v}": _mean_delayed([o for o in killed if o.plan.victim == v]) for v in VICTIMS},
        "answers_cut": sum(bool(o.error) for o in outcomes),
        "unmigrated": len(alone),
    }


def _nll_ratios(moved: Sequence[Outcome]) -> dict[str, object]:
    """Of all pairs, then by how answers cross."""
    found: dict[str, object] = {}
    rests, wholes = [(o.plan.pair, o.rest) for o in moved], [(o.plan.pair, o.whole) for o in moved]
    for name, parts in (("nll_ratio", rests), ("nll_ratio_whole", wholes)):
        found[name] = _ratio([part for _, part in parts])
        found[f"{name}_by_pair"] = {
            crosses: _ratio([part for pair, part in parts if pair.crosses == crosses]) for crosses in CROSSINGS
        }
    return found


def _same_prefix(moved: Sequence[Outcome]) -> dict[str, object]:
    """What targets make of the same text when nobody moves an answer."""
    both = [(o.rest, o.alone_rest) for o in moved if o.rest is not None and o.alone_rest is not None]
    to_alone = ratio_of_means([rest.nll for rest, _ in both], [alone.nll for _, alone in both])
    return {
        "nll_ratio_unmoved_same_prefix": _ratio([alone for _, alone in both]),
        "nll_ratio_to_same_prefix": None if to_alone is None else round(to_alone, 4),
        "same_prefix_answers": len(both),
    }


def _ratio(parts: Sequence[Likelihood | None]) -> float | None:
    known = [part for part in parts if part is not None]
    ratio = ratio_of_means([part.nll for part in known], [part.own_nll for part in known])
    return None if ratio is None else round(ratio, 4)


def _bytes_ratio(batches: Sequence[Batch], less: Callable[[Batch], int]) -> float | None:
    total = sum(text_bytes(batch) - less(batch) for batch in batches)
    return sum(batch.frame_bytes - less(batch) for batch in batches) / total if total else None


def _mean_delayed(outcomes: Sequence[Outcome]) -> float | None:
    return fmean(o.meter.delayed_tokens for o in outcomes) if outcomes else None

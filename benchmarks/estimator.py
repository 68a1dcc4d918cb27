"""How well the time of the next transfer is predicted from the last ten: ours against the simple estimators.

`python -m benchmarks.estimator --json F [--quick] [--traces DIR]`: replays sessions of real transfers (Lumos: Wi-Fi and
4G, strong and weak signal) through netprobe.probe.LinkProbe, in their own order and with small and large transfers
interleaved, at least 200 jumps of size (3x or more) per class. The error of a prediction is relative to the real time.
Keys: worst_class_ratio_to_plain_mean (our median error over that of the mean of the last ten rates, worst class and
order), median_error_ratio (strong Wi-Fi, the worse order), jump_error_ratio (median over the interleaved jumps of all
classes), each class's own figures, the same estimators on transfers over LTE traces of moving clients, and what is
known there of transfers that are late.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import mean, median

from attrs import define, field

from benchmarks.report import arguments, percentile, publish
from benchmarks.transfers import Session, Transfer, interleaved, lte_rates, moved_bytes, sent_over, sessions
from netprobe.probe import LinkProbe
from netprobe.round_trip import SMALL_BYTES
from netprobe.under_way import projected_s
from netprobe.window import WINDOW, Fit
from protocol.events import TransferSample

JUMP = 3.0
LEAST_JUMPS = 200
LTE_SIZES = (20_000, 60_000, 150_000, 400_000)
LTE_PERIODS_S = (0.2, 1.0, 5.0)
LTE_RTT_S = 0.05
_LEAST_S = 1e-3

Predictor = Callable[[Sequence[Transfer], int], float]


def last_value(past: Sequence[Transfer], size_bytes: int) -> float:
    """As fast as the last transfer."""
    return size_bytes * past[-1].seconds / past[-1].size_bytes


def mean_rate(past: Sequence[Transfer], size_bytes: int) -> float:
    """As fast as the mean of the rates."""
    return size_bytes / mean(t.size_bytes / t.seconds for t in past)


def offset(past: Sequence[Transfer], size_bytes: int) -> float:
    """seconds = a + bytes / rate, a = the least time seen, rate = mean of what is left."""
    floor_s = min(t.seconds for t in past)
    rates = [t.size_bytes / (t.seconds - floor_s) for t in past if t.seconds > floor_s]
    return floor_s + size_bytes / mean(rates) if rates else floor_s


def least_squares(past: Sequence[Transfer], size_bytes: int) -> float:
    """seconds = a + b x bytes by ordinary least squares; never below a millisecond."""
    size, seconds = mean(t.size_bytes for t in past), mean(t.seconds for t in past)
    spread = sum((t.size_bytes - size) ** 2 for t in past)
    slope = sum((t.size_bytes - size) * (t.seconds - seconds) for t in past) / spread if spread else 0.0
    return max(_LEAST_S, seconds + slope * (size_bytes - size))


RIVALS: Mapping[str, Predictor] = {
    "last": last_value, "plain_mean": mean_rate, "offset": offset, "least_squares": least_squares,
}  # fmt: skip


@define
class Errors:
    """Relative errors by estimator, of all transfers and of those after a jump of the size."""

    every: dict[str, list[float]] = field(factory=lambda: {name: [] for name in ("ours", *RIVALS)})
    jumps: dict[str, list[float]] = field(factory=lambda: {name: [] for name in ("ours", *RIVALS)})

    def play(self, session: Session) -> None:
        """Predict each transfer of a session before it is seen."""
        now_s = 0.0
        probe = LinkProbe(lambda: now_s)
        for place, transfer in enumerate(session):
            now_s = transfer.at_s - transfer.seconds
            view = probe.view("cloud")
            if view.samples and transfer.size_bytes >= SMALL_BYTES:
                past = session[max(0, place - WINDOW) : place]
                predicted = {name: rival(past, transfer.size_bytes) for name, rival in RIVALS.items()}
                self._note(predicted | {"ours": view.seconds_for(transfer.size_bytes)}, transfer, past[-1].size_bytes)
            now_s = transfer.at_s
            probe.add(_sample(transfer, transfer.seconds))

    def median_of(self, name: str) -> float:
        """Median error of an estimator."""
        return median(self.every[name])

    def _note(self, predicted: Mapping[str, float], real: Transfer, before_bytes: int) -> None:
        jumped = max(real.size_bytes, before_bytes) >= JUMP * min(real.size_bytes, before_bytes)
        for name, seconds in predicted.items():
            error = abs(seconds - real.seconds) / real.seconds
            self.every[name].append(error)
            if jumped:
                self.jumps[name].append(error)


def in_order(pairs: Sequence[tuple[Session, Session]]) -> Errors:
    """All sessions of a class as they were."""
    errors = Errors()
    for session in (session for pair in pairs for session in pair):
        errors.play(session)
    return errors


def mixed(pairs: Sequence[tuple[Session, Session]]) -> Errors:
    """Small and large transfers in turn, then in drawn orders until there are enough jumps."""
    errors, seed = Errors(), 0
    while not seed or len(errors.jumps["ours"]) < LEAST_JUMPS:
        for number, (small, large) in enumerate(pairs):
            errors.play(interleaved(small, large, random.Random(f"{seed} {number}") if seed else None))
        seed += 1
    return errors


def lte(traces: Path | None, quick: bool) -> dict[str, float]:
    """Median over the traces of each estimator's median error, by seconds between requests."""
    keys: dict[str, float] = {}
    rates = lte_rates(traces)
    for period_s in LTE_PERIODS_S:
        played: list[Errors] = []
        for trace in rates.values():
            errors = Errors()
            errors.play(sent_over(trace[:600] if quick else trace, period_s, LTE_SIZES, LTE_RTT_S))
            played.append(errors)
        for name in ("ours", "last", "plain_mean"):
            keys[f"lte_error_ratio_{period_s:g}s_{name}"] = median(errors.median_of(name) for errors in played)
    return keys


def late(traces: Path | None, quick: bool) -> dict[str, float]:
    """Transfers that are not over when they should be: the median error of the end as predicted at that moment.

    By age alone, as if they ended just then, and with the bytes that have moved so far.
    """
    by_age, by_moved = [], []
    for rates in lte_rates(traces).values():
        probe = LinkProbe(lambda: 0.0)
        for transfer in sent_over(rates[:600] if quick else rates, 1.0, LTE_SIZES, LTE_RTT_S):
            began_s = transfer.at_s - transfer.seconds
            view = probe.view("cloud", now_s=began_s)
            due_s = view.seconds_for(transfer.size_bytes)
            if LTE_RTT_S < due_s < transfer.seconds:
                moved = min(transfer.size_bytes, int(moved_bytes(rates, began_s + LTE_RTT_S, began_s + due_s)))
                running = _sample(transfer, due_s, complete=False, moved=moved)
                ends_s = projected_s(Fit(view.floor_s, view.bytes_per_s, view.samples), running)
                by_age.append(1.0 - due_s / transfer.seconds)
                by_moved.append(abs(ends_s - transfer.seconds) / transfer.seconds)
            probe.add(_sample(transfer, transfer.seconds))
    return {
        "lte_late_error_ratio_age": median(by_age),
        "lte_late_error_ratio_moved": median(by_moved),
        "lte_late_p90_error_ratio_age": percentile(by_age, 0.9),
        "lte_late_p90_error_ratio_moved": percentile(by_moved, 0.9),
    }


def _sample(real: Transfer, seconds: float, complete: bool = True, moved: int | None = None) -> TransferSample:
    return TransferSample(
        at_s=real.at_s, link="cloud", direction="up", size_bytes=real.size_bytes, seconds=seconds,
        complete=complete, moved_bytes=moved,
    )  # fmt: skip


def measure(traces: Path | None, quick: bool) -> tuple[dict[str, object], bool]:
    """All keys; True when they come from real transfers."""
    classes, real = sessions(traces)
    orders = {name: {"": mixed(pairs), "_sessions": in_order(pairs)} for name, pairs in classes.items()}
    strong = orders["wifi-strong"].values()
    keys: dict[str, object] = {
        "worst_class_ratio_to_plain_mean": max(
            errors.median_of("ours") / errors.median_of("plain_mean")
            for by_order in orders.values()
            for errors in by_order.values()
        ),
        "median_error_ratio": max(errors.median_of("ours") for errors in strong),
        "jump_error_ratio": median([e for by_order in orders.values() for e in by_order[""].jumps["ours"]]),
        "jumps": sum(len(by_order[""].jumps["ours"]) for by_order in orders.values()),
        "least_jumps_of_a_class": min(len(by_order[""].jumps["ours"]) for by_order in orders.values()),
    }
    for name, by_order in orders.items():
        for order, errors in by_order.items():
            keys |= _of_class(f"{name.replace('-', '_')}{order}", errors)
    return keys | lte(traces, quick) | late(traces, quick), real


def _of_class(prefix: str, errors: Errors) -> dict[str, float]:
    return {
        f"{prefix}_error_ratio": errors.median_of("ours"),
        f"{prefix}_error_ratio_plain_mean": errors.median_of("plain_mean"),
        f"{prefix}_error_ratio_offset": errors.median_of("offset"),
        f"{prefix}_jump_error_ratio": median(errors.jumps["ours"]),
        f"{prefix}_jump_error_ratio_plain_mean": median(errors.jumps["plain_mean"]),
        f"{prefix}_p90_error_ratio": percentile(errors.every["ours"], 0.9),
        f"{prefix}_p90_error_ratio_least_squares": percentile(errors.every["least_squares"], 0.9),
    }


def main() -> None:
    """The command line."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--traces", type=Path, help="folder with wifi_4g_lumos and lte_nyu_mets")
    options = parser.parse_args()
    keys, real = measure(options.traces, options.quick)
    note = "Lumos sessions" if real else "synthetic transfers: no traces were given"
    publish("estimator", keys, options.json, [note])


if __name__ == "__main__":
    main()

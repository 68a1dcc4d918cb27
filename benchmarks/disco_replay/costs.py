"""What moving the decode to the cheaper side saves, by the product's own rule, and how much it can save at most."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attrs import frozen

from benchmarks.disco_replay.cases import SETTINGS, Service, Workload, recording
from benchmarks.disco_replay.grid import Place
from gateway.dispatch_cost import Workload as Usual
from gateway.dispatch_cost import costs, regime_of
from gateway.dispatch_table import Regime
from gateway.migration import StreamView, buffer_tokens, migrate, move_seconds
from gateway.replay import Speed, learnt
from gateway.targets import AnswerLengths, TargetView
from profiles.energy import EnergyModel, flops_per_token
from protocol.policy import DispatchPolicy, MigrationPolicy

RTT_S = 0.05
SERVER_TOKENS_PER_S = 60.0
"""Of a hosted model; any rate above the reader's gives the same figures."""


@frozen
class Saved:
    """Shares of the whole cost (prefill and decoding of both sides, losers of races included).

    bound: as if every answer had been decoded by the cheaper side from its first token on, for nothing more.
    """

    service: str
    device: str
    regime: Regime
    factor: float
    budget: float
    saving: float
    bound: float
    moved_ratio: float


def views(kind: str, device: str, money_per_joule: float, ttft_s: float) -> tuple[TargetView, TargetView]:
    """Both sides as the decisions see them, with money per token."""
    found, price = SETTINGS["devices"][device], SETTINGS["prices"][kind]
    energy, flops = EnergyModel(), flops_per_token(found["parameters"])
    here = TargetView(
        "device", local=True, prefill_s=1.0 / found["prefill"], tokens_per_s=found["decode"],
        price_in=energy.joules(flops, 1, 0) * money_per_joule, price_out=energy.joules(flops, 0, 1) * money_per_joule,
        parameters=found["parameters"],
    )  # fmt: skip
    there = TargetView(
        "server", local=False, tokens_per_s=SERVER_TOKENS_PER_S, queue_s=ttft_s,
        price_in=price["input"] / 1e6, price_out=price["output"] / 1e6,
    )  # fmt: skip
    return here, there


def dear_side(service: Service, work: Workload, device: str, money_per_joule: float) -> Regime:
    """What the product takes for the dear side at this rate."""
    here, there = views(service.kind, device, 0.0, 0.0)
    count = len(work.lengths)
    usual = Usual(sum(a for a, _ in work.lengths) / count, sum(b for _, b in work.lengths) / count)
    return regime_of(costs(here, there, usual, EnergyModel(), money_per_joule), DispatchPolicy(), None)


def saved(place: Place, factor: float) -> Saved:
    """Replay one place and price it with and without moves. factor: times the fixed worth of a joule."""
    found = SETTINGS["devices"][place.device]
    record = recording(place.service, place.work, Speed(found["prefill"], found["decode"]), place.scale)
    rate = SETTINGS["money_per_joule"][place.regime] * factor
    finite = sorted(record.ttfts_s)
    here, there = views(place.service.kind, place.device, rate, finite[len(finite) // 2])
    draws = [((n * 2654435761) % 2**32) / 2**32 for n in range(len(record.requests))]
    outcome, _ = learnt(record, place.regime, DispatchPolicy(budget_ratio=place.budget), draws)
    lengths, plain, moved, least, moves = AnswerLengths(), 0.0, 0.0, 0.0, 0
    cheapest = min(here.price_out, there.price_out)
    for number, asked in enumerate(record.requests):
        won, other = (here, there) if outcome.device_won[number] else (there, here)
        prefill = asked.prompt_tokens * (
            here.price_in * outcome.device_asked[number] + there.price_in * outcome.server_asked[number]
        )
        stay = asked.answer_tokens * won.price_out
        go = _moved_money(won, other, asked.prompt_tokens, asked.answer_tokens, lengths)
        lengths.add(asked.answer_tokens)
        plain += prefill + stay
        moved += prefill + (stay if go is None else go)
        least += prefill + asked.answer_tokens * cheapest
        moves += go is not None
    share = moves / len(record.requests)
    return Saved(
        place.service.name,
        place.device,
        place.regime,
        factor,
        place.budget,
        1 - moved / plain,
        1 - least / plain,
        share,
    )


def _moved_money(
    source: TargetView, target: TargetView, prompt_tokens: int, answer_tokens: int, lengths: AnswerLengths
) -> float | None:
    """Decoding and the second prefill of an answer that moves; None for one that stays.

    The source stops when what the reader has not taken yet covers the move (B = r_c * t_m).
    """
    policy = MigrationPolicy()
    at = policy.min_tokens
    stream = StreamView(
        generated=at, consumed=1, safe_at=at, source=source.name, prompt_tokens=prompt_tokens,
        remaining_tokens=lengths.remaining_tokens(at, 1 << 20), source_tokens_per_s=source.tokens_per_s,
    )  # fmt: skip
    if migrate(stream, (source, target), {target.name: RTT_S}, policy).act != "prepare":
        return None
    at = max(at, 1 + buffer_tokens(move_seconds(target, prompt_tokens + at, RTT_S), policy))
    if at >= answer_tokens:
        return None
    return (
        at * source.price_out + (prompt_tokens + at) * target.price_in + (answer_tokens - at) * target.price_out
    )  # fmt: skip


def closest(found: Sequence[Service]) -> Sequence[tuple[Service, str]]:
    """Services and devices that the paper names, as near as the traces come."""
    named: dict[str, Any] = SETTINGS["paper"]
    return [(service, device) for service in found for device in named.get(service.kind, {})]

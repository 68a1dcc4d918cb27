"""When a running answer moves, to whom and at which token. Pure.

After DiSCo (arXiv 2502.11417), section on token migration: the source stops when the tokens that the reader has not
taken yet cover the time of the move (B = r_c * t_m), and only if what is saved on the remaining tokens is worth it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil, inf
from typing import Literal

from attrs import frozen

from gateway.targets import TargetView
from protocol.policy import MigrationPolicy

BATCH_TOKENS = (4, 32)
"""Least and most tokens of an answer that are sent ahead at once."""

UNSENT_TOKENS = 1 << 16
"""A server that reads everything again at each change is told nothing before the cut."""

WORTHWHILE_RATE_RATIO = 1.2
"""A target must decode this much faster; less is within the noise of a loaded machine."""

MARGIN_RATIO = 0.1
"""Of the money that staying costs, what the second move of an answer must save at least; each later one twice as much
as the one before. Rates must be better by WORTHWHILE_RATE_RATIO once more for each move: a stream does not bounce."""


@frozen
class StreamView:
    """A running answer as the decision sees it.

    generated: tokens made so far; consumed: tokens a reader at the policy's rate has taken by now.
    safe_at: index at which the answer may be cut now, None inside a character, word (text path) or tool call.
    moves: planned moves so far; moved_at: index of the last one.
    preparing: target that prefills ahead; prepared: the same once it is ready; lag_tokens: made since its last extend.
    read_s: seconds that it took for each token that it read just now.
    """

    generated: int
    consumed: int
    safe_at: int | None
    source: str
    remaining_tokens: float
    moves: int = 0
    moved_at: int = 0
    preparing: str | None = None
    prepared: str | None = None
    lag_tokens: int = 0
    read_s: float = 0.0
    prompt_tokens: int = 0
    source_tokens_per_s: float | None = None

    @property
    def prefix_tokens(self) -> int:
        """What a target has to read."""
        return self.prompt_tokens + self.generated


@frozen
class Move:
    """What to do now. `at` is the index of the first token the target makes.

    keep_source: let the source run on until the target has spoken, as a hedge that costs nothing. Otherwise it stops at
    the cut, and is prepared again if the target fails.
    """

    act: Literal["stay", "prepare", "cut", "drop"]
    target: str | None = None
    at: int | None = None
    reason: str = ""
    keep_source: bool = True


@frozen
class _Offer:
    """A target that is worth a move: money for the rest there, seconds until the rest is made there."""

    view: TargetView
    money: float
    seconds: float
    why: str


def migrate(
    stream: StreamView,
    targets: Sequence[TargetView],
    rtt_s: Mapping[str, float],
    policy: MigrationPolicy,
) -> Move:
    """Stay, let a target prefill ahead, cut over to it, or give the preparation up.

    Args:
        targets: allowed targets with the model, the source among them.
        rtt_s: round trip to each target; absent means none.
    """
    source = next((view for view in targets if view.name == stream.source), None)
    blocked = _blocked(stream, policy) if source else "the source is not among the targets"
    if stream.preparing is None:
        if source is None or blocked:
            return Move("stay", reason=blocked)
        return _choose(stream, source, targets, rtt_s, policy)
    target = next((view for view in targets if view.name == stream.preparing), None)
    if source is None or target is None or blocked:
        return Move("drop", stream.preparing, reason=blocked or "the target is gone")
    return _cut(stream, source, target, rtt_s.get(target.name, 0.0), policy)


def move_seconds(target: TargetView, tokens: int, rtt_s: float) -> float:
    """t_m: round trip, queue and prefill of `tokens` tokens at the target."""
    return rtt_s + target.prefill_seconds(tokens)


def buffer_tokens(seconds: float, policy: MigrationPolicy) -> int:
    """Unread tokens that cover `seconds` for a reader at the policy's rate: ceil(r_c * t_m)."""
    return ceil(policy.consume_tokens_per_s * seconds)


def batch_tokens(target: TargetView, policy: MigrationPolicy) -> int:
    """Tokens that a target which prefills ahead is sent at once: what it reads while its reader takes one."""
    if target.continues != "ids":
        return UNSENT_TOKENS
    reads_s = target.prefill_s * policy.consume_tokens_per_s
    if reads_s <= 0:
        return BATCH_TOKENS[1]
    return min(BATCH_TOKENS[1], max(BATCH_TOKENS[0], ceil(1.0 / reads_s)))


def _blocked(stream: StreamView, policy: MigrationPolicy) -> str:
    """Why no planned move may happen; empty when one may."""
    if not policy.enabled:
        return "policy.migration.enabled = false"
    if stream.moves >= policy.max_moves:
        return f"moved {stream.moves} times already"
    if stream.remaining_tokens < policy.min_remaining_tokens:
        return f"about {stream.remaining_tokens:.0f} tokens are left, not worth a move"
    return ""


def _choose(
    stream: StreamView,
    source: TargetView,
    targets: Sequence[TargetView],
    rtt_s: Mapping[str, float],
    policy: MigrationPolicy,
) -> Move:
    """The cheapest of the targets that are worth a move; of equal ones the one that is through first."""
    if stream.generated - stream.moved_at < policy.min_tokens:
        return Move("stay", reason=f"fewer than {policy.min_tokens} tokens made since the last move")
    offers = [
        offer
        for view in targets
        if view.name != source.name and view.up and view.continues != "no"
        if (offer := _offer(stream, source, view, rtt_s.get(view.name, 0.0), policy)) is not None
    ]
    if not offers:
        return Move("stay", reason="no target is better")
    best = min(offers, key=lambda offer: (offer.money, offer.seconds))
    return Move("prepare", best.view.name, reason=best.why)


def _offer(
    stream: StreamView, source: TargetView, target: TargetView, rtt_s: float, policy: MigrationPolicy
) -> _Offer | None:
    """What moving to `target` would take, or None when it is not worth it."""
    why = _better(stream, source, target, rtt_s, policy)
    if not why:
        return None
    money = target.price_out * stream.remaining_tokens + target.price_in * stream.prefix_tokens
    decode_s = stream.remaining_tokens / target.tokens_per_s if target.tokens_per_s else inf
    return _Offer(target, money, move_seconds(target, stream.prefix_tokens, rtt_s) + decode_s, why)


def _better(stream: StreamView, source: TargetView, target: TargetView, rtt_s: float, policy: MigrationPolicy) -> str:
    """Why `target` should take over; empty when it should not."""
    have = stream.source_tokens_per_s or source.tokens_per_s
    stay = source.price_out * stream.remaining_tokens
    saved = stay - target.price_out * stream.remaining_tokens - target.price_in * stream.prefix_tokens
    margin = stay * MARGIN_RATIO * 2.0 ** (stream.moves - 1) if stream.moves else 0.0
    rate = target.tokens_per_s
    if saved > margin and (rate is None or rate >= policy.consume_tokens_per_s):
        return f"cheaper by {saved:.3g} over the rest"
    if saved < 0 and (have is None or have >= policy.consume_tokens_per_s):
        return ""
    if rate is None:
        # One move measures it; from then on its rate decides.
        return "its rate is not known yet" if source.local and not target.local and not stream.moves else ""
    if have is None or rate < WORTHWHILE_RATE_RATIO ** (1 + stream.moves) * have:
        return ""
    stay_s = stream.remaining_tokens / have
    go_s = move_seconds(target, stream.prefix_tokens, rtt_s)
    # While the target prefills, the source goes on; a source that ends first makes the move pointless.
    return f"faster: {rate:.1f} against {have:.1f} tokens/s" if go_s < stay_s else ""


def _cut(stream: StreamView, source: TargetView, target: TargetView, rtt_s: float, policy: MigrationPolicy) -> Move:
    if stream.prepared is None:
        return Move("stay", target.name, reason="the target still prefills")
    if stream.safe_at is None:
        return Move("stay", target.name, reason="inside a character, word or tool call")
    needed = buffer_tokens(_cut_seconds(stream, target, rtt_s), policy)
    unread = stream.generated - stream.consumed
    rate = stream.source_tokens_per_s
    if unread >= needed:
        reason = f"{unread} unread tokens cover the move of {needed}"
    elif rate is not None and rate <= policy.consume_tokens_per_s:
        reason = "the source cannot get ahead of the reader"
    else:
        return Move("stay", target.name, reason=f"{unread} unread tokens, {needed} needed")
    return Move("cut", target.name, stream.safe_at, reason, keep_source=source.price_out <= 0)


def _cut_seconds(stream: StreamView, target: TargetView, rtt_s: float) -> float:
    """t_m from now on: prefill happened ahead, so one round trip, the tokens made since and a first one are left.

    A server that takes text reads everything again, unless it remembers, which nobody promises.
    """
    anew = target.continues != "ids" and stream.lag_tokens > 0
    unread_there = max(stream.lag_tokens, stream.prefix_tokens if anew else 0)
    first_s = 1.0 / target.tokens_per_s if target.tokens_per_s else 0.0
    return rtt_s + max(target.prefill_s, stream.read_s) * unread_there + first_s

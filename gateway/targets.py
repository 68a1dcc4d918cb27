"""What can answer text: an engine with a name and a place, and what was seen of its health and speed."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from math import inf
from statistics import median

from attrs import define, evolve, field, frozen

from engines.port import RelayingEngine, TextEngine
from gateway.dispatch_prefix import PrefixMemory
from gateway.ttft import SERVER_PRIOR_S, Ecdf, TtftWindow
from profiles.energy import flops_per_token
from profiles.rates import Slowdowns
from protocol.errors import RejectedError
from protocol.policy import DispatchPolicy, TokenPrice
from protocol.text import Prompt, TextCapabilities

WINDOW = 32
"""Recent requests per target that rates are made of; TTFTs have a longer window of their own."""

MAX_WATCHED = 256
"""Targets remembered at once; the least recently used is forgotten first (peers come and go)."""

FIRST_REST_S, LONGEST_REST_S = 0.5, 30.0
"""A failed target is left alone for the first span, doubled with each failure in a row up to the second."""

UNTOLD = TextCapabilities(
    vocabulary=None, template=None, context_tokens=0, continues="text", grammar=False, logprobs=True, embeds=False
)
"""Stands for an engine that will not say what it can do: it gets bytes, and its own refusals are believed."""

TELLING_TOKENS = 16
"""A shorter prefill says more about the round trip and the first token than about the prefill rate."""

PROFILE_TOKENS = 128
"""About what a profile's prefill rate was measured with."""

COMPARABLE_RATIO = 0.5
"""A prefill of fewer tokens than this share of those behind the best rate is dearer per token by its fixed part alone,
so it says nothing of a slow-down."""


@frozen
class Target:
    """One engine that can answer `models`. `local` means that nothing leaves this machine.

    The rates are priors (from a profile or from the peer's own measurements) until requests have shown better.
    Prices are money per token; price_cached_in: of prompt tokens that were cached, None: as any other. parameters: of
    the model, which scales the energy that a local target uses. weaker: those of `models` for which it answers with a
    weaker one; it is chosen for them only where policy.dispatch.weaker_model consents. engine_name: whose slow-down a
    local target shares, its own name when empty; slowdowns: where that is kept, to share it with the tensor way; None:
    with the board. relay: the engine, where its own bytes may be given on. weights: of
    gateway.calibration.weights_of, where confidence curves may be had for it.
    """

    name: str
    local: bool
    engine: TextEngine
    models: frozenset[str]
    tokens_per_s: float | None = None
    prefill_tokens_per_s: float | None = None
    price_in: float = 0.0
    price_out: float = 0.0
    price_cached_in: float | None = None
    parameters: float | None = None
    weaker: frozenset[str] = frozenset()
    engine_name: str = ""
    slowdowns: Slowdowns | None = None
    relay: RelayingEngine | None = None
    weights: str = ""


NOTHING_SEEN = Ecdf()


@frozen
class TargetView:
    """What a decision may know of a target.

    ttft: of recent requests, made of `seen` of them and of a prior (remote targets) while they are few; given as a
    window, its distribution is made when it is asked for, which a plan for one target never does. prefill_s:
    seconds per prompt token now, a local target's slow-down included (0: unknown). tokens_per_s: decode rate, None when
    never seen. cached_ratio: share of prompt tokens that were in its cache. known_ratio: share of the prompt at hand
    that a local target has read before, as far as known. continues: how it takes over an answer.
    """

    name: str
    local: bool
    up: bool = True
    _ttft: Ecdf | TtftWindow = NOTHING_SEEN
    seen: int = 0
    queue_s: float = 0.0
    prefill_s: float = 0.0
    tokens_per_s: float | None = None
    price_in: float = 0.0
    price_out: float = 0.0
    price_cached_in: float | None = None
    cached_ratio: float = 0.0
    known_ratio: float = 0.0
    parameters: float | None = None
    continues: str = "text"

    @property
    def ttft(self) -> Ecdf:
        """The distribution as it stands."""
        return self._ttft if isinstance(self._ttft, Ecdf) else self._ttft.ecdf()

    @property
    def failed_ratio(self) -> float:
        """Share of the requests that never had a first token."""
        return self._ttft.failed_ratio

    def ttft_within_s(self, ratio: float) -> float:
        """The smallest TTFT that `ratio` of the requests kept; infinite where too many failed or nothing is known."""
        return self._ttft.quantile_s(ratio)

    def prefill_seconds(self, tokens: int) -> float:
        """Seconds to the first token of a prompt with `tokens` tokens: queue and prefill of what is not known there."""
        return self.queue_s + self.prefill_s * tokens * (1.0 - self.known_ratio)


@define
class _Watch:
    """best_s: the least seconds per prompt token ever seen, with a prefill of `best_tokens`. queued: the engine had
    others to serve when it was looked at last."""

    ttft: TtftWindow
    prefixes: PrefixMemory = field(factory=PrefixMemory)
    best_s: float = 0.0
    best_tokens: int = 0
    queued: bool = False
    cached: deque[float] = field(factory=lambda: deque(maxlen=WINDOW))
    prefill_s: deque[float] = field(factory=lambda: deque(maxlen=WINDOW))
    rates: deque[float] = field(factory=lambda: deque(maxlen=WINDOW))
    failures: int = 0
    rest_until_s: float = -inf
    capabilities: TextCapabilities | None = None


class TargetBoard:
    """Remembers what happened with each (target, model): TTFT, rates, failures in a row, capabilities.

    A server's prefill rate is the best of its recent ones. A device's is its profile's, or else
    its best ever, times the slow-down of its engine, which all models of that engine share.
    """

    def __init__(self) -> None:
        self.work = LocalWork()
        self._slowdowns = Slowdowns()
        self._watches: OrderedDict[tuple[str, str], _Watch] = OrderedDict()

    def _watch(self, target: Target, model: str) -> _Watch:
        key = (target.name, model)
        watch = self._watches.get(key)
        if watch is None:
            watch = self._watches[key] = _Watch(TtftWindow(prior_s=() if target.local else SERVER_PRIOR_S))
        self._watches.move_to_end(key)
        if len(self._watches) > MAX_WATCHED:
            self._watches.popitem(last=False)
        return watch

    def started(self, target: Target, model: str, ttft_s: float, prefilled_tokens: int, cached_tokens: int = 0) -> None:
        """A first token came after `ttft_s`; of the prompt `prefilled_tokens` were read, `cached_tokens` were there."""
        watch = self._watch(target, model)
        watch.failures, watch.rest_until_s = 0, -inf
        watch.ttft.add(ttft_s)
        if prefilled_tokens + cached_tokens > 0:
            watch.cached.append(cached_tokens / (prefilled_tokens + cached_tokens))
        if target.local:
            self.work.prefilled(target, prefilled_tokens)
        if prefilled_tokens < TELLING_TOKENS:
            return
        watch.prefill_s.append(ttft_s / prefilled_tokens)
        if target.local and not watch.queued:
            self._prefilled(target, watch, ttft_s, prefilled_tokens)

    def _prefilled(self, target: Target, watch: _Watch, ttft_s: float, tokens: int) -> None:
        """A device's prefill with no wait before it."""
        first = not watch.best_s
        if first or ttft_s / tokens < watch.best_s:
            watch.best_s, watch.best_tokens = ttft_s / tokens, tokens
        behind_tokens = PROFILE_TOKENS if target.prefill_tokens_per_s else watch.best_tokens
        if (target.prefill_tokens_per_s or not first) and tokens >= COMPARABLE_RATIO * behind_tokens:
            self._slowdowns_of(target).observe(_engine_of(target), _base_s(target, watch) * tokens, ttft_s)

    def _slowdowns_of(self, target: Target) -> Slowdowns:
        return self._slowdowns if target.slowdowns is None else target.slowdowns

    def answered(self, target: Target, model: str) -> None:
        """A whole answer came, which tells that it is well and nothing of its first token."""
        watch = self._watch(target, model)
        watch.failures, watch.rest_until_s = 0, -inf

    def failed(self, target: Target, model: str, now_s: float, *, spoke: bool = False) -> None:
        """It died, stalled or refused to be reached: leave it alone for a while. spoke: it had given tokens before."""
        watch = self._watch(target, model)
        watch.failures += 1
        rest_s = min(LONGEST_REST_S, FIRST_REST_S * 2.0 ** min(16, watch.failures - 1))
        watch.rest_until_s = now_s + rest_s
        if not spoke:
            watch.ttft.add(inf)

    def outlasted(self, target: Target, model: str, elapsed_s: float) -> None:
        """It was cancelled after `elapsed_s` without a token, because another one spoke or nobody waits any more."""
        self._watch(target, model).ttft.outlasted(elapsed_s)

    def decoded(self, target: Target, model: str, tokens: int, seconds: float) -> None:
        """`tokens` tokens came in `seconds`, waits for the reader taken out."""
        if tokens >= 4 and seconds > 0:
            self._watch(target, model).rates.append(tokens / seconds)

    async def capabilities(self, target: Target, model: str) -> TextCapabilities:
        """Asked once, then remembered. An engine that refuses the question counts as UNTOLD."""
        watch = self._watch(target, model)
        if watch.capabilities is None:
            try:
                watch.capabilities = await target.engine.capabilities()
            except RejectedError:
                return UNTOLD
        return watch.capabilities

    def known(self, target: Target, model: str) -> TextCapabilities | None:
        """Capabilities if they were asked before; nothing is sent."""
        return self._watch(target, model).capabilities

    def read(self, target: Target, model: str, prompt: Prompt) -> None:
        """A local target has this prompt in its cache now."""
        if target.local:
            self._watch(target, model).prefixes.read(prompt)

    def view(self, target: Target, model: str, now_s: float, prompt: Prompt = "") -> TargetView:
        """What decisions may know of `target` now, for `prompt`. Asks the engine for its load only."""
        watch = self._watch(target, model)
        queue_s = target.engine.load().wait_s
        watch.queued = queue_s > 0
        return TargetView(
            name=target.name,
            local=target.local,
            up=now_s >= watch.rest_until_s,
            ttft=watch.ttft,
            seen=watch.ttft.observed,
            queue_s=queue_s,
            prefill_s=self._prefill_s(target, watch),
            tokens_per_s=median(watch.rates) if watch.rates else target.tokens_per_s,
            price_in=target.price_in,
            price_out=target.price_out,
            price_cached_in=target.price_cached_in,
            cached_ratio=sum(watch.cached) / len(watch.cached) if watch.cached else 0.0,
            known_ratio=watch.prefixes.cached_ratio(prompt) if target.local and prompt else 0.0,
            parameters=target.parameters,
            continues=watch.capabilities.continues if watch.capabilities else "text",
        )

    def _prefill_s(self, target: Target, watch: _Watch) -> float:
        if not target.local:
            return min(watch.prefill_s) if watch.prefill_s else _prior_s(target)
        return _base_s(target, watch) * self._slowdowns_of(target).factor(_engine_of(target))


@define
class LocalWork:
    """FLOPs that local targets did since the start, for whoever fits energy to them."""

    prefill_flops: float = 0.0
    decode_flops: float = 0.0

    def prefilled(self, target: Target, tokens: int) -> None:
        """A prompt's tokens were read."""
        self.prefill_flops += tokens * flops_per_token(target.parameters)

    def decoded(self, target: Target, tokens: int) -> None:
        """Tokens were generated."""
        self.decode_flops += tokens * flops_per_token(target.parameters)


def offered(targets: Sequence[Target], policy: DispatchPolicy) -> Sequence[Target]:
    """Targets as a policy sees them: at its prices, and without models they only stand in for unless it consents."""
    if not policy.prices:
        for target in targets:
            if target.weaker:
                break
        else:
            return targets
    return [_priced(target if policy.weaker_model else _own_models(target), policy.prices) for target in targets]


def _own_models(target: Target) -> Target:
    return evolve(target, models=target.models - target.weaker) if target.weaker else target


def _priced(target: Target, prices: Mapping[str, TokenPrice]) -> Target:
    price = prices.get(target.name)
    if price is None:
        return target
    cached = price.per_million_cached_tokens
    return evolve(
        target,
        price_in=price.per_million_prompt_tokens / 1e6,
        price_cached_in=None if cached is None else cached / 1e6,
        price_out=price.per_million_completion_tokens / 1e6,
    )


def _engine_of(target: Target) -> str:
    return target.engine_name or target.name


def _prior_s(target: Target) -> float:
    """Seconds per prompt token as measured before; 0: never."""
    return 1.0 / target.prefill_tokens_per_s if target.prefill_tokens_per_s else 0.0


def _base_s(target: Target, watch: _Watch) -> float:
    """Seconds per prompt token at a slow-down of 1: as measured before, else the best seen; 0: unknown."""
    return _prior_s(target) or watch.best_s


class AnswerLengths:
    """Mean residual length of answers (max_tokens is no estimate): what is left when `generated` came already."""

    def __init__(self, prior_tokens: float = 160.0, prior_weight: int = 4) -> None:
        self._seen: deque[int] = deque(maxlen=200)
        self._prior_tokens = prior_tokens
        self._prior_weight = prior_weight

    def add(self, tokens: int) -> None:
        """An answer ended by itself after `tokens` tokens."""
        self._seen.append(tokens)

    def mean_tokens(self) -> float:
        """Expected length of an answer that has not begun."""
        return self.remaining_tokens(0, 1 << 30)

    def remaining_tokens(self, generated: int, max_tokens: int) -> float:
        """Expected tokens still to come; an answer longer than all before it keeps the prior's (memoryless) rest."""
        rests = [length - generated for length in self._seen if length > generated]
        total = sum(rests) + self._prior_weight * self._prior_tokens
        return min(float(max(0, max_tokens - generated)), total / (len(rests) + self._prior_weight))

"""What follows the last token of an answer: charge what it took, keep it where it may be kept, record it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from attrs import evolve, frozen

from gateway.context import Caller
from gateway.ports import (
    CachedAnswer,
    CacheKey,
    Findings,
    Invocation,
    Redaction,
    Reservation,
    Routed,
    Spent,
)
from gateway.settings import GatewayPorts
from gateway.spending import Spending
from gateway.targets import Target
from protocol.chat import ChatRequest
from protocol.text import FinishReason, Message, Usage, sayable


@frozen
class Made:
    """One answer as it ended. pieces, calls: as targets made it; shown: as the client saw it. finish None: cut.

    losers: targets that were asked for the first token as well and cancelled.
    """

    status: str
    finish: FinishReason | None
    usage: Usage
    sides: tuple[tuple[str, int], ...]
    losers: tuple[str, ...]
    pieces: tuple[str, ...]
    calls: tuple[Mapping[str, Any], ...]
    shown: Message
    ttft_s: float | None
    total_s: float


def sound(made: Made) -> Made:
    """The answer with half surrogate pairs mended: what is kept is read again, and asked with, in UTF-8."""
    text, shown = "".join(made.pieces), made.shown
    if not (made.calls or shown.tool_calls) and text.isascii() and shown.content.isascii():
        return made
    whole, calls = sayable(text), _sound_calls(made.calls)
    said = evolve(shown, content=sayable(shown.content), tool_calls=_sound_calls(shown.tool_calls))
    if whole == text and calls == made.calls and said == shown:
        return made
    return evolve(made, pieces=made.pieces if whole == text else (whole,), calls=calls, shown=said)


def _sound_calls(calls: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
    def mended(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {name: mended(item) for name, item in value.items()}
        return sayable(value) if isinstance(value, str) else value

    return tuple(mended(call) for call in calls)


@frozen
class Ending:
    """The steps after the answer, for one request that was admitted.

    cached: the answer came out of the cache. shadow: told of the answer, where the other path is to be asked too.
    """

    ports: GatewayPorts
    request_id: str
    caller: Caller
    asked: ChatRequest
    routed: Routed
    findings: Findings
    redaction: Redaction | None
    key: CacheKey
    reservation: Reservation
    spending: Spending
    targets: Mapping[str, Target]
    cached: bool
    saved_tokens: int
    shadow: Callable[[Made, Spent], None] | None = None

    async def run(self, made: Made) -> None:
        """Once, whatever became of the answer."""
        made = sound(made)
        spent = self._spent(made)
        await self.reservation.settle(spent)
        self.ports.audit.invocation(self._record(made, spent))
        finish = made.finish if made.status == "ok" else None
        if finish in ("stop", "tool_calls") and not self.cached and not self.key.personal:
            kept = CachedAnswer(made.pieces, finish, made.usage, _maker(made), made.calls)
            await self.ports.cache.store(self.key, kept)
        stays = self.findings.reason if self.findings.local_only else ""
        await self.ports.conversations.closed(self.caller, self.asked, made.shown, finish, _maker(made), stays)
        if self.shadow is not None and not self.cached:
            self.shadow(made, spent)

    def _spent(self, made: Made) -> Spent:
        if self.cached:
            return Spent()
        usage = made.usage
        paid = self.spending
        return Spent(
            usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens, paid.known, made.sides, paid.held
        )

    def _record(self, made: Made, spent: Spent) -> Invocation:
        return Invocation(
            request_id=self.request_id,
            caller=self.caller,
            model=self.routed.model,
            endpoint=self.asked.endpoint,
            status=made.status,
            level=self.routed.level,
            reason=self.routed.reason,
            findings=self.findings,
            redacted=self.redaction is not None and self.redaction.restorer is not None,
            cached=self.cached,
            saved_tokens=self.saved_tokens,
            spent=spent,
            ttft_s=made.ttft_s,
            total_s=made.total_s,
        )


def _maker(made: Made) -> str:
    return made.sides[-1][0] if made.sides else ""

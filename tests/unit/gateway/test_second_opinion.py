"""The second opinion on intents: asked only when the first one abstains, within a deadline, of its own encoder only."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from attrs import define, evolve, field

from gateway.context import Caller
from gateway.intents import default_model
from gateway.routing import PolicyRouter
from gateway.second_opinion import SecondOpinion, SentenceHead, default_head
from protocol.chat import ChatRequest
from protocol.errors import EngineCrashed
from protocol.policy import Policy, RoutingPolicy
from protocol.policy_routing import IntentRouting, RouteFallback, RouteRule, RouteWhen
from protocol.text import Message

HEAD = SentenceHead("encoder-1", ("math", "summarize"), ((1.0, 0.0), (0.0, 1.0)), threshold=0.6)
RULES = (RouteRule("edge", RouteWhen(("summarize",))),)
ARMED = RouteFallback(enable=True)
# The classifier of the path abstains on everything.
UNSURE = Policy(routing=RoutingPolicy(rules=RULES, fallback=ARMED, intent=IntentRouting(1.0, default_model().id)))
ASKED = ChatRequest("auto", (Message("user", "make it brief"),))


@define
class Encoder:
    """Vectors as told; may be late or fail."""

    vector: Sequence[float] = (0.0, 5.0)
    id: str = "encoder-1"
    wait_s: float = 0.0
    error: Exception | None = None
    asked: list[str] = field(factory=list)

    async def embed(self, texts: Sequence[str]) -> Sequence[Sequence[float]]:
        self.asked += texts
        await asyncio.sleep(self.wait_s)
        if self.error is not None:
            raise self.error
        return [self.vector for _ in texts]


async def consulted(encoder: Encoder, chat: ChatRequest = ASKED, policy: Policy = UNSURE, intent: str | None = None):  # type: ignore[no-untyped-def]
    router = PolicyRouter(second=SecondOpinion(encoder, HEAD, deadline_s=0.05))
    return (await router.consulted(chat, Caller(intent=intent), policy)).intent


async def test_it_tells_what_the_classifier_cannot() -> None:
    encoder = Encoder()
    assert await consulted(encoder) == "summarize"
    assert encoder.asked == ["make it brief"]


@pytest.mark.parametrize(
    "encoder",
    [
        Encoder(vector=(1.0, 1.0)),
        Encoder(wait_s=5.0),
        Encoder(error=EngineCrashed("gone")),
    ],
)
async def test_unsure_late_or_broken_it_says_nothing(encoder: Encoder) -> None:
    assert await consulted(encoder) is None and encoder.asked


async def test_it_is_not_asked_without_need() -> None:
    sure = evolve(UNSURE, routing=evolve(UNSURE.routing, intent=IntentRouting()))
    no_rules = evolve(UNSURE, routing=evolve(UNSURE.routing, rules=()))
    encoder = Encoder()
    summarize = ChatRequest("auto", (Message("user", "Summarize this text in one sentence: we met on Monday."),))
    assert await consulted(encoder, summarize, sure) is None
    assert await consulted(encoder, policy=no_rules) is None
    assert await consulted(encoder, evolve(ASKED, model="small")) is None
    assert await consulted(encoder, intent="math") == "math"
    assert encoder.asked == []


async def test_a_head_is_used_with_the_encoder_that_it_was_fitted_on_only() -> None:
    """R1 again: vectors of two encoders do not compare."""
    encoder = Encoder(id="encoder-2")
    assert await consulted(encoder) is None and encoder.asked == []


def test_the_head_of_the_package_fits_the_classifier_and_names_its_encoder() -> None:
    head = default_head()
    assert head.names == default_model().names
    assert {len(row) for row in head.rows} == {384} and head.encoder.startswith("minilm-int8@")

"""The front doors and who calls them: keys, limits, names in a request, and where it would go."""

from __future__ import annotations

import json
from collections.abc import Mapping

import pytest
from attrs import evolve

from engines.fakes_text import FakeTextEngine
from gateway.context import LOCAL, Caller
from gateway.ports import Estimate, Reservation, Spent
from links.port import RejectedStatus
from protocol.errors import BudgetExceeded, RateLimited, Unauthenticated
from tests.route.test_text_front import USER, chat, door, says

# Who asks


class Keys:
    def caller(self, headers: Mapping[str, str], remote_ip: str | None, peer: str | None = None) -> Caller:
        if headers.get("authorization") != "Bearer right":
            raise Unauthenticated("no such key", next_step="send one")
        return evolve(LOCAL, tenant="t", models=frozenset({"m"}))


class Held:
    degrade = False
    headers: Mapping[str, str] = {"x-ratelimit-limit-requests": "5", "x-ratelimit-remaining-requests": "4"}

    def __init__(self, log: list[str]) -> None:
        self._log = log

    async def extend(self, money: float) -> bool:
        return True

    async def settle(self, spent: Spent) -> None:
        self._log.append(f"settled {spent.prompt_tokens > 0} {spent.completion_tokens}")

    async def release(self) -> None:
        self._log.append("released")


class Counting:
    """Limits that count, or refuse with what they are given."""

    def __init__(self, refusal: Exception | None = None) -> None:
        self.log: list[str] = []
        self.seen: list[tuple[Caller, Estimate]] = []
        self._refusal = refusal

    async def reserve(self, caller: Caller, estimate: Estimate) -> Reservation:
        self.seen.append((caller, estimate))
        if self._refusal is not None:
            raise self._refusal
        return Held(self.log)

    def left_ratios(self, caller: Caller) -> dict[str, float]:
        return {}


async def test_a_stranger_gets_401_in_the_form_of_each_api() -> None:
    async with door(says("x"), keys=Keys()) as client:
        for path in ("/v1/chat/completions", "/v1/messages", "/api/chat", "/v1/route", "/v1/embeddings"):
            refused = await client.told(path, {"not": "looked at"}, 401)
            assert "no such key" in json.dumps(refused["error"])
        told = await client.told("/v1/chat/completions", chat(), authorization="Bearer right")
        assert told["choices"][0]["message"]["content"] == "x"


async def test_rate_and_budget_are_told_apart() -> None:
    rate = RateLimited("too many", retry_after_s=2.5, headers={"x-ratelimit-remaining-requests": "0"})
    async with door(says("x"), limits=Counting(rate)) as client:
        reply = await client.ask("/v1/chat/completions", chat())
        theirs = await client.told("/v1/messages", chat(), 429)
    error = json.loads(reply.body)["error"]
    assert (reply.status, error["code"], error["type"]) == (429, "rate_limit_exceeded", "rate_limit_error")
    assert (reply.headers["retry-after"], reply.headers["x-ratelimit-remaining-requests"]) == ("3", "0")
    assert theirs["error"]["type"] == "rate_limit_error"
    async with door(says("x"), limits=Counting(BudgetExceeded("spent"))) as client:
        reply = await client.ask("/v1/chat/completions", chat())
    error = json.loads(reply.body)["error"]
    assert (reply.status, error["code"], error["type"]) == (429, "budget_exceeded", "insufficient_quota")
    assert "retry-after" not in reply.headers


async def test_every_request_is_settled_once_whatever_becomes_of_it() -> None:
    limits = Counting()
    async with door(FakeTextEngine(answer_tokens=4), limits=limits) as client:
        reply = await client.ask("/v1/chat/completions", chat())
        assert reply.headers["x-ratelimit-remaining-requests"] == "4"
        await client.stream("/v1/chat/completions", chat(stream=True))
        with pytest.raises(RejectedStatus):
            await client.stream("/v1/chat/completions", chat(stream=True, model="no"))
        await client.told("/v1/route", chat())
        await client.told("/v1/embeddings", {"model": "m", "input": "a"})
    assert limits.log == ["settled True 4", "settled True 4", "released", "released", "settled True 0"]
    assert limits.seen[0][1].answer_tokens == 64


async def test_headers_and_metadata_name_user_conversation_intent_and_labels() -> None:
    limits = Counting()
    named = {"user": "u1", "metadata": {"conversation_id": "c1", "intent": "summarize", "team": "blue"}}
    async with door(says("x"), limits=limits) as client:
        await client.told("/v1/chat/completions", chat(**named))
        await client.told(
            "/v1/chat/completions", chat(**named), **{"x-midstream-user": "u2", "x-midstream-labels": "a=1"}
        )
        await client.told("/v1/messages", chat(metadata={"user_id": "u3"}, conversation_id="c2"))
        await client.told("/v1/chat/completions", chat(metadata={"intent": 7}), 400)
    first, second, third = (caller for caller, _ in limits.seen)
    assert first == evolve(LOCAL, user="u1", conversation_id="c1", intent="summarize", labels={"team": "blue"})
    assert (second.user, second.labels) == ("u2", {"team": "blue", "a": "1"})
    assert (third.user, third.conversation_id) == ("u3", "c2")


# Ask first, run yourself


async def test_route_tells_where_a_request_would_go_and_asks_no_engine() -> None:
    engine = FakeTextEngine()
    async with door(engine) as client:
        told = await client.told("/v1/route", {"messages": [USER]})
        named = await client.told("/v1/route", {"model": "m", "prompt": "p"})
        await client.told("/v1/route", {"model": "no", "messages": [USER]}, 404)
    assert (told["model"], told["target"], told["local_only"], told["private"]) == ("m", "device", False, [])
    assert told["targets"] == [{"name": "device", "local": True, "after_s": 0.0}]
    assert (named["level"], told["reason"]) == ("named", told["reason"])
    assert engine.prepared == []


async def test_auto_is_answered_by_the_model_that_was_chosen() -> None:
    async with door(says("x")) as client:
        answer = await client.told("/v1/chat/completions", chat(model="auto"))
    assert answer["model"] == "m"

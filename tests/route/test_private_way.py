"""Privacy and routing through the front door: what a remote target sees, what the client gets back, the record."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from attrs import frozen

from engines.fakes_text import FakeTextEngine
from gateway.context import Caller
from gateway.ports import Invocation, NoLimits
from gateway.privacy import PrivacyGuard
from gateway.targets import Target
from links.http import HttpLink
from protocol.chat import ChatRequest
from protocol.policy import Policy, PrivacyPolicy, RoutingPolicy
from protocol.policy_routing import RouteFallback, RouteRule, RouteWhen
from protocol.text import CallDelta, Message
from tests.route.text_house import house

SECRET = b"k" * 32
ASKED = "write to a.b@example.com and call 13812345678, card 4111 1111 1111 1111"
VALUES = ("a.b@example.com", "13812345678", "4111 1111 1111 1111")
Json = dict[str, Any]


class Records:
    """An audit that keeps its records."""

    def __init__(self) -> None:
        self.kept: list[Invocation] = []

    def invocation(self, record: Invocation) -> None:
        self.kept.append(record)


@frozen
class Scene:
    """The device's front door with a small model here and a large one far away."""

    link: HttpLink
    here: FakeTextEngine
    far: FakeTextEngine
    records: Records

    async def ask(self, path: str, body: Json, **headers: str) -> Json:
        reply = await self.link.exchange(path, _sent(headers), json.dumps(body).encode(), 10.0)
        assert reply.status == 200, reply.body
        found: Json = json.loads(reply.body)
        return found

    async def stream(self, body: Json) -> list[Json]:
        data = json.dumps({**body, "stream": True}).encode()
        raw = b"".join([c async for c in self.link.lines("/v1/chat/completions", _sent({}), data, 10.0)]).decode()
        return [json.loads(line[6:]) for line in raw.splitlines() if line.startswith("data: {")]


def _sent(headers: dict[str, str]) -> dict[str, str]:
    return {"content-type": "application/json", **{name.replace("_", "-"): value for name, value in headers.items()}}


@asynccontextmanager
async def scene(policy: Policy | None = None, says: Sequence[bytes | CallDelta] | None = None) -> AsyncIterator[Scene]:
    here, far = FakeTextEngine(name="here"), FakeTextEngine(name="far", says=says, tools=True)
    targets = [Target("device", True, here, frozenset({"small"})), Target("cloud", False, far, frozenset({"large"}))]
    records = Records()
    ports = {"privacy": PrivacyGuard(SECRET), "audit": records}
    async with house(targets, policy=policy, ports=ports) as served:
        link = HttpLink("front", served.base_url)
        try:
            yield Scene(link, here, far, records)
        finally:
            await link.close()


def left_of(text: str) -> str:
    """The text as it leaves with this secret."""
    guard = PrivacyGuard(SECRET)
    chat = ChatRequest("large", (Message("user", text),))
    return guard.redact(chat, guard.inspect(chat, Caller(), Policy())).chat.messages[0].content


@pytest.mark.parametrize("size", [1, 3, 7, 200])
async def test_values_never_leave_and_come_back_in_the_stream(size: int) -> None:
    left = left_of(ASKED)
    assert not any(value in left for value in VALUES)
    pieces = [left.encode()[at : at + size] for at in range(0, len(left), size)]
    async with scene(says=pieces) as here:
        chunks = await here.stream({"model": "large", "messages": [{"role": "user", "content": ASKED}]})
        text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk["choices"])
        assert text == ASKED
        seen = repr(here.far.prepared)
        assert left in seen and not any(value in seen for value in VALUES)
    record = here.records.kept[0]
    assert record.redacted and record.findings.counts == {"email": 1, "phone": 1, "card": 1}
    assert not any(value in repr(record) for value in VALUES)


async def test_arguments_of_tool_calls_come_back_too() -> None:
    name = left_of("a.b@example.com")
    arguments = json.dumps({"to": name})
    says = [CallDelta(0, "c1", "mail"), *(CallDelta(0, arguments=arguments[at : at + 4]) for at in range(0, 99, 4))]
    tool = {"type": "function", "function": {"name": "mail", "parameters": {"type": "object"}}}
    body = {"model": "large", "messages": [{"role": "user", "content": "mail a.b@example.com"}], "tools": [tool]}
    async with scene(says=[piece for piece in says if piece.id or piece.arguments]) as here:
        found = await here.ask("/v1/chat/completions", body)
        call = found["choices"][0]["message"]["tool_calls"][0]["function"]
        assert json.loads(call["arguments"]) == {"to": "a.b@example.com"}
        assert "a.b@example.com" not in repr(here.far.prepared)


async def test_what_stays_here_is_not_redacted() -> None:
    async with scene() as here:
        await here.ask("/v1/chat/completions", {"model": "small", "messages": [{"role": "user", "content": ASKED}]})
        assert ASKED in repr(here.here.prepared)
    assert not here.records.kept[0].redacted


async def test_a_label_and_a_kind_keep_a_request_on_the_device() -> None:
    policy = Policy(
        privacy=PrivacyPolicy(local_only_labels={"data": ("secret",)}, local_only_kinds=("card",)),
        routing=RoutingPolicy(rules=(RouteRule("cloud"),)),
    )
    plain = {"messages": [{"role": "user", "content": "hello"}]}
    async with scene(policy) as here:
        assert (await here.ask("/v1/route", plain))["target"] == "cloud"
        labelled = await here.ask("/v1/route", plain, x_midstream_labels="data=secret")
        assert (labelled["target"], labelled["local_only"]) == ("device", True)
        carded = await here.ask("/v1/route", {"messages": [{"role": "user", "content": ASKED}]})
        assert (carded["target"], carded["private"]) == ("device", ["card", "email", "phone"])
        refused = await here.link.exchange(
            "/v1/chat/completions",
            _sent({"x_midstream_labels": "data=secret"}),
            json.dumps({"model": "large", **plain}).encode(),
            10.0,
        )
        assert refused.status == 403 and not here.far.prepared


async def test_route_tells_level_reason_and_what_it_saw() -> None:
    rules = (RouteRule("edge", RouteWhen(("summarize",), ("low",))), RouteRule("cloud", RouteWhen(("math",))))
    policy = Policy(routing=RoutingPolicy(rules=rules, fallback=RouteFallback(enable=True)))
    async with scene(policy) as here:
        found = await here.ask("/v1/route", {"messages": [{"role": "user", "content": "Summarize this: we met."}]})
        assert (found["target"], found["model"], found["level"], found["intent"]) == (
            "device", "small", "rules", "summarize",
        )  # fmt: skip
        hard = await here.ask("/v1/route", {"messages": [{"role": "user", "content": "时间复杂度是多少？"}]})
        assert (hard["target"], hard["level"], hard["hard"]) == ("cloud", "heuristic", True)
        done = await here.ask(
            "/v1/chat/completions", {"model": "auto", "messages": [{"role": "user", "content": "hi"}]}
        )
        assert done["model"] == "small" and not here.far.prepared


class HalfSpent(NoLimits):
    """Limits whose caller has 40 % of the month's budget left."""

    def left_ratios(self, caller: Caller) -> dict[str, float]:
        return {"month": 0.4}


async def test_a_budget_moves_the_threshold_of_requests() -> None:
    body = {"messages": [{"role": "user", "content": "why compare and design a python function"}]}
    targets = [
        Target("device", True, FakeTextEngine(), frozenset({"small"})),
        Target("cloud", False, FakeTextEngine(), frozenset({"large"})),
    ]
    for limits, target, level in ((NoLimits(), "cloud", "heuristic"), (HalfSpent(), "device", "dynamic")):
        async with house(targets, ports={"limits": limits}) as served:
            link = HttpLink("front", served.base_url)
            reply = await link.exchange("/v1/route", _sent({}), json.dumps(body).encode(), 10.0)
            await link.close()
        found = json.loads(reply.body)
        assert (found["target"], found["level"]) == (target, level)
    assert "40% of the month's budget left" in found["reason"]


async def test_a_model_on_both_sides_begins_where_the_route_says() -> None:
    policy = Policy(routing=RoutingPolicy(rules=(RouteRule("cloud"),)))
    here, far = FakeTextEngine(), FakeTextEngine()
    targets = [Target("device", True, here, frozenset({"m"})), Target("cloud", False, far, frozenset({"m"}))]
    async with house(targets, policy=policy) as served:
        link = HttpLink("front", served.base_url)
        body = {"model": "auto", "messages": [{"role": "user", "content": "hello"}]}
        reply = await link.exchange("/v1/chat/completions", _sent({}), json.dumps(body).encode(), 10.0)
        await link.close()
    assert reply.status == 200 and far.prepared and not here.prepared

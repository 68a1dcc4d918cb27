"""One provider's link against a server that limits, fails, stalls and cuts, with time and chance as arguments."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest

from engines.breaker import Breaker, BreakerRules
from engines.provider_link import Phases, ProviderLink
from engines.retrying import RetryRules
from links.memory import MemoryLink
from links.port import RejectedStatus, Request, Response, Route
from protocol.errors import Full, LinkClosed, LinkError, LinkTimeout, NotAllowed

LIMIT_1S = (429, {"retry-after": "1"})
DOWN = (503, {})


class Server:
    """Answers with the next of `script`; an int or a (status, headers) refuses, a list is a stream, bytes a body."""

    def __init__(self, *script: Any) -> None:
        self.script = list(script)
        self.keys: list[str] = []
        self.closed = 0
        self.slept_s: list[float] = []
        self.now_s = 100.0
        self.plain = MemoryLink("prov", [Route("POST", "/x", self.answer)])

    async def answer(self, request: Request) -> Response:
        self.keys.append(request.headers.get("authorization", ""))
        step = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        if isinstance(step, tuple):
            return Response(step[0], step[1], b"{}")
        if isinstance(step, list):
            return Response(200, {}, self.stream(step))
        return Response(200, {}, step)

    async def stream(self, steps: list[Any]) -> AsyncIterator[bytes]:
        try:
            for step in steps:
                if isinstance(step, float):
                    await asyncio.sleep(step)
                elif isinstance(step, Exception):
                    raise step
                else:
                    yield step
        finally:
            self.closed += 1

    async def sleep(self, seconds: float) -> None:
        self.slept_s.append(seconds)
        self.now_s += seconds

    def link(self, keys: Mapping[str, list[str]] | None = None, **how: Any) -> ProviderLink:
        return ProviderLink(
            self.plain,
            lambda key: {"authorization": key},
            (lambda tenant: keys.get(tenant) or keys.get("", [])) if keys is not None else None,
            clock=lambda: self.now_s,
            draw=lambda: 0.5,
            sleep=self.sleep,
            **how,
        )


async def ask(link: Any) -> int:
    return (await link.exchange("/x", {}, b"{}", 30.0)).status


async def stream(link: Any) -> list[bytes]:
    return [chunk async for chunk in link.lines("/x", {}, b"{}", 30.0)]


@pytest.mark.parametrize("streamed", [False, True])
async def test_what_passes_by_itself_is_tried_again_and_retry_after_is_kept(streamed: bool) -> None:
    answer: Any = [b"a", b"b"] if streamed else b"ok"
    server = Server(LIMIT_1S, DOWN, answer)
    link = server.link()
    if streamed:
        assert await stream(link) == [b"a", b"b"]
    else:
        assert await ask(link) == 200
    assert server.slept_s == [1.05, 0.2]
    assert link.retries == 2


async def test_a_longer_wait_than_is_kept_is_left_to_another_target() -> None:
    server = Server((429, {"retry-after": "30"}))
    assert await ask(server.link()) == 429
    assert server.slept_s == [] and len(server.keys) == 1


@pytest.mark.parametrize("status", [400, 404, 413, 422, 501])
async def test_what_is_wrong_with_the_request_is_never_tried_again(status: int) -> None:
    server = Server((status, {}))
    assert await ask(server.link()) == status
    assert len(server.keys) == 1


async def test_another_key_steps_in_at_once_and_the_limited_one_rests() -> None:
    server = Server((429, {"retry-after": "20"}), b"ok")
    link = server.link({"": ["k1", "k2"]})
    assert await ask(link) == 200
    assert server.keys == ["k1", "k2"] and server.slept_s == [0.0]
    assert await ask(link) == 200 and await ask(link) == 200
    assert server.keys[2:] == ["k2", "k2"], "k1 rests"
    server.now_s += 21.0
    await ask(link)
    assert server.keys[-1] == "k1"


async def test_a_key_that_is_not_accepted_rests_and_without_any_the_error_says_so() -> None:
    server = Server((401, {}))
    link = server.link({"": ["k1", "k2"]})
    assert await ask(link) == 401
    assert server.keys == ["k1", "k2"]
    with pytest.raises(Full) as caught:
        await ask(link)
    assert caught.value.retry_after_s == pytest.approx(300.0)
    with pytest.raises(NotAllowed, match="no key"):
        await ask(server.link({}))


async def test_tenants_have_their_own_keys_and_their_own_cool_downs() -> None:
    server = Server(LIMIT_1S, b"ok")
    link = server.link({"": ["house"], "acme": ["theirs"]}, retrying=RetryRules(attempts=1))
    assert await ask(link.for_tenant("acme")) == 429
    with pytest.raises(Full):
        await ask(link.for_tenant("acme"))
    assert await ask(link.for_tenant("other")) == 200
    assert server.keys == ["theirs", "house"]


async def test_the_budget_ends_retries_of_an_outage() -> None:
    server = Server(DOWN)
    link = server.link(
        retrying=RetryRules(budget_ratio=0.1, budget_most=3.0),
        breaker=Breaker(BreakerRules(in_a_row=10_000, least=10_000)),
    )
    for _ in range(30):
        assert await ask(link) == 503
    assert 30 <= len(server.keys) <= 30 + 3 + 0.1 * 30


async def test_an_open_breaker_refuses_at_once_and_one_trial_opens_the_way() -> None:
    server = Server(DOWN, DOWN, DOWN, b"ok")
    link = server.link(retrying=RetryRules(attempts=1), breaker=Breaker(BreakerRules(in_a_row=3, first_s=2.0)))
    for _ in range(3):
        await ask(link)
    with pytest.raises(Full) as caught:
        await ask(link)
    assert caught.value.retry_after_s == 2.0 and len(server.keys) == 3
    server.now_s += 2.0
    assert await ask(link) == 200 and await ask(link) == 200


@pytest.mark.parametrize(
    ("steps", "got", "error"),
    [
        ([b"a", LinkClosed("cut")], [b"a"], LinkClosed),
        ([b"a", 5.0, b"b"], [b"a"], LinkTimeout),
        ([5.0, b"a"], [], LinkTimeout),
    ],
)
async def test_a_stream_that_spoke_is_never_begun_anew(
    steps: list[Any], got: list[bytes], error: type[LinkError]
) -> None:
    """S1 BerriAI/litellm#40404: cut and stall end the stream with an error for whoever owns the answer."""
    server = Server(steps)
    link = server.link(phases=Phases(first_byte_s=0.1, between_s=0.1), retrying=RetryRules(attempts=1))
    found: list[bytes] = []
    with pytest.raises(error):
        async for chunk in link.lines("/x", {}, b"{}", 30.0):
            found.append(chunk)
    assert found == got and len(server.keys) == 1
    assert server.closed == 1


async def test_the_whole_request_has_a_bound_too() -> None:
    server = Server([b"a"] * 50)
    link = server.link(phases=Phases(total_s=10.0))
    found = []
    with pytest.raises(LinkTimeout, match="longer than the 10 s"):
        async for chunk in link.lines("/x", {}, b"{}", 30.0):
            found.append(chunk)
            server.now_s += 3.0
    assert len(found) == 4


async def test_a_client_that_leaves_closes_the_upstream_and_blames_nobody() -> None:
    server = Server([b"a", 30.0])
    link = server.link(breaker=Breaker(BreakerRules(in_a_row=1)))
    lines = link.lines("/x", {}, b"{}", 30.0)
    await anext(lines)
    await lines.aclose()  # type: ignore[attr-defined]
    assert server.closed == 1
    waiting = asyncio.create_task(ask(Server([30.0]).link()))
    await asyncio.sleep(0.01)
    waiting.cancel()
    assert link.breaker.state(server.now_s) == "closed"


async def test_a_refusal_of_a_stream_keeps_its_status() -> None:
    server = Server((400, {}))
    with pytest.raises(RejectedStatus) as caught:
        await stream(server.link())
    assert caught.value.status == 400

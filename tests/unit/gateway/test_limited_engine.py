"""Engines lent by the handoff wire stand behind their borrower's limits, and every end gives back."""

from __future__ import annotations

import time

import pytest

from cloud_stub.text import TextHouse
from engines.fakes_text import Failure, FakeTextEngine
from engines.peer import PeerEngine
from engines.peer_host import serve_stream
from gateway.context import Caller
from gateway.ledger import MemoryLedger
from gateway.limited_engine import LimitedEngine
from gateway.metering import MeteredLimits
from gateway.quotas import Quota, Tenant
from links.memory import MemoryLink
from links.port import FrameRoute, FrameStream, Request
from protocol.clock import wall_now
from protocol.errors import EngineError, RateLimited
from protocol.text import Sampling, TextRequest

FLEET = Caller(tenant="fleet", key_id="device:pi-1")
REQUEST = TextRequest("tiny", "hello there", Sampling(max_tokens=6))


def limits(**quota: float) -> MeteredLimits:
    tenant = Tenant("fleet", quota=Quota(**quota))  # type: ignore[arg-type]
    return MeteredLimits(
        lambda _: tenant, MemoryLedger(time.monotonic), clock=time.monotonic, wall=wall_now, holder="p"
    )


async def generate(engine: LimitedEngine | PeerEngine, request: TextRequest = REQUEST) -> int:
    continuation = await engine.prepare(request, 5.0)
    made = 0
    try:
        async for token in continuation.start(0, 8):
            continuation.acknowledge(token.index)
            made += bool(token.data)
            if token.finish is not None:
                break
    finally:
        await continuation.close()
    return made


async def test_a_generation_is_reserved_then_charged_by_what_was_made() -> None:
    metered = limits(tokens_per_min=1000, max_concurrent=1)
    engine = LimitedEngine(FakeTextEngine(answer_tokens=4), metered, lambda: FLEET)
    continuation = await engine.prepare(REQUEST, 5.0)
    held = metered.reserved("fleet")
    assert held["places"] == 1 and held["tokens"] >= 6
    with pytest.raises(RateLimited):
        await engine.prepare(REQUEST, 5.0)
    await continuation.close()
    assert set(metered.reserved("fleet").values()) == {0}
    assert await generate(engine) == 4


async def test_an_engine_that_refuses_costs_nothing() -> None:
    metered = limits(tokens_per_min=1000, max_concurrent=1)
    broken = FakeTextEngine(failures=[Failure("prepare", EngineError("no"))])
    engine = LimitedEngine(broken, metered, lambda: FLEET)
    with pytest.raises(EngineError):
        await engine.prepare(REQUEST, 5.0)
    assert set(metered.reserved("fleet").values()) == {0}
    assert len(await engine.embed(["a", "b"])) == 2
    assert set(metered.reserved("fleet").values()) == {0}


async def test_a_device_hears_of_its_limit_over_the_wire_as_what_it_is() -> None:
    metered = limits(requests_per_s=2)
    house = TextHouse({"tiny": FakeTextEngine(answer_tokens=4)})

    async def handle(request: Request, stream: FrameStream) -> None:
        await serve_stream(lambda model: LimitedEngine(house.engine_for(model), metered, lambda: FLEET), stream)

    link = MemoryLink("cloud", frame_routes=[FrameRoute("/handoff", handle)], peer="pi-1")
    peer = PeerEngine(lambda: link.open("/handoff"))
    assert [await generate(peer) for _ in range(2)] == [4, 4]
    with pytest.raises(RateLimited) as refused:
        await generate(peer)
    assert refused.value.retry_after_s > 0
    assert metered.reserved("fleet")["requests"] == 0
    await peer.close()
    await link.close()
    await house.close()

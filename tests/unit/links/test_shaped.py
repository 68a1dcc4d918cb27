"""The shapers keep to their rate, their delay, their stalls and cuts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from links.http import HttpLink
from links.http_server import serve
from links.memory import MemoryLink
from links.port import FrameRoute, FrameStream, Request, Response, Route
from links.shaped import Conditions, Loss, Pace, ShapedLink, ShaperProxy
from netprobe.probe import LinkProbe
from protocol.errors import ConfigError, LinkClosed, LinkError, LinkTimeout
from protocol.events import TransferSample


@pytest.fixture
async def proxy() -> AsyncIterator[ShaperProxy]:
    async def sink(request: Request) -> Response:
        return Response(200, {}, b"ok")

    async def source(request: Request) -> Response:
        return Response(200, {}, bytes(int(request.query["n"])))

    async def frames(request: Request, stream: FrameStream) -> None:
        while (frame := await stream.receive()) is not None:
            await stream.send(frame)

    server = await serve(
        [Route("POST", "/sink", sink), Route("GET", "/source", source)], [FrameRoute("/frames", frames)]
    )
    shaper = ShaperProxy("127.0.0.1", server.port)
    await shaper.start()
    yield shaper
    await shaper.close()
    await server.close()


@pytest.mark.parametrize("rate", [200_000.0, 2_000_000.0])
async def test_the_probe_recovers_the_rate_and_delay_that_were_set(proxy: ShaperProxy, rate: float) -> None:
    """End to end: shaped transfers, samples from the link, floor and rate from the window."""
    probe = LinkProbe(time.monotonic)
    link = HttpLink("cloud", f"http://127.0.0.1:{proxy.port}", sink=probe.add)
    proxy.set_rate(rate)
    proxy.set_delay(0.02)
    await link.exchange("/sink", {}, b"", 5)
    for share in (0.02, 0.1, 0.05, 0.2):
        await link.exchange("/sink", {}, bytes(int(rate * share)), 5)
    view = probe.view("cloud", "up", time.monotonic())
    await link.close()
    assert view.samples == 4
    assert view.bytes_per_s == pytest.approx(rate, rel=0.2)
    assert 0.035 < view.floor_s < 0.1
    assert view.rtt_s is not None and view.rtt_s > 0.035


async def test_both_directions_have_their_own_rate(proxy: ShaperProxy) -> None:
    samples: list[TransferSample] = []
    link = HttpLink("cloud", f"http://127.0.0.1:{proxy.port}", sink=samples.append)
    proxy.set_rate(10_000_000, 500_000)
    await link.exchange("/sink", {}, bytes(100_000), 5)
    await link.exchange("/source?n=100000", {}, b"", 5, method="GET")
    await link.close()
    up, _, down = samples
    assert up.seconds < 0.15
    assert 0.17 < down.seconds < 0.4
    assert proxy.up_bytes > 100_000
    assert proxy.down_bytes > 100_000


async def test_a_stall_holds_and_ends_while_the_transfer_runs(proxy: ShaperProxy) -> None:
    link = HttpLink("cloud", f"http://127.0.0.1:{proxy.port}")
    await link.exchange("/sink", {}, b"", 5)
    proxy.set_rate(0)
    with pytest.raises(LinkTimeout):
        await link.exchange("/sink", {}, bytes(10_000), 0.3)
    waiting = asyncio.ensure_future(link.exchange("/sink", {}, bytes(10_000), 5))
    await asyncio.sleep(0.2)
    assert not waiting.done()
    proxy.set_rate(float("inf"))
    assert (await waiting).status == 200
    await link.close()


async def test_a_cut_breaks_what_runs_and_refuses_until_restored(proxy: ShaperProxy) -> None:
    link = HttpLink("cloud", f"http://127.0.0.1:{proxy.port}")
    stream = await link.open("/frames")
    await stream.send(b"1")
    assert await stream.receive() == b"1"
    proxy.cut()
    with pytest.raises(LinkClosed):
        await stream.receive()
    with pytest.raises(LinkError):
        await link.exchange("/sink", {}, b"", 2)
    proxy.restore()
    assert (await link.exchange("/sink", {}, b"", 2)).status == 200
    await stream.close()
    await link.close()


async def test_a_target_that_is_not_there_breaks_the_connection() -> None:
    proxy = ShaperProxy("127.0.0.1", 1)
    link = HttpLink("cloud", f"http://127.0.0.1:{await proxy.start()}")
    with pytest.raises(LinkError):
        await link.exchange("/sink", {}, b"", 2)
    await link.close()
    await proxy.close()


async def test_a_shaped_link_takes_the_time_of_its_trace() -> None:
    async def echo(request: Request) -> Response:
        return Response(200, {}, request.body)

    samples: list[TransferSample] = []

    def trace(at_s: float) -> Conditions:
        return Conditions(1e6, 2e6, 0.01)

    link = ShapedLink(MemoryLink("cloud", [Route("POST", "/", echo)]), trace, sink=samples.append)
    await link.exchange("/", {}, bytes(20_000), 5)
    await link.close()
    assert [sample.direction for sample in samples] == ["up", "down"]
    assert samples[0].seconds == pytest.approx(0.03, abs=0.02)
    assert samples[1].seconds == pytest.approx(0.02, abs=0.02)


@pytest.mark.parametrize("rate", [-1.0, float("nan")])
def test_a_rate_that_is_none_is_refused(rate: float) -> None:
    with pytest.raises(ConfigError):
        Pace(rate)


async def test_a_lost_segment_comes_later_and_nothing_overtakes_it(proxy: ShaperProxy) -> None:
    """The third frame is lost once on its way up; the fourth waits behind it."""
    link = HttpLink("cloud", f"http://127.0.0.1:{proxy.port}")
    stream = await link.open("/frames")
    draws = iter([0.5, 0.5, 0.5, 0.5, 0.001])
    proxy.set_loss(Loss(ratio=0.01, again_s=0.3, draw=lambda: next(draws, 0.5)))
    took_s = []
    for number in (1, 2):
        began_s = time.monotonic()
        await stream.send(bytes([number]))
        assert await stream.receive() == bytes([number])
        took_s.append(time.monotonic() - began_s)
    began_s = time.monotonic()
    await stream.send(b"lost")
    await asyncio.sleep(0.05)
    await stream.send(b"behind")
    assert [await stream.receive(), await stream.receive()] == [b"lost", b"behind"]
    took_s.append(time.monotonic() - began_s)
    await stream.close()
    await link.close()
    assert max(took_s[:2]) < 0.25
    assert took_s[2] >= 0.3

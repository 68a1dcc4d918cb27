"""The WebRTC adapter with its real library on loopback: who is asked, what is refused, loss, vanishing, closing."""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import AsyncIterator

import pytest
from attrs import evolve

from links.channel_link import ChannelLink
from links.channel_server import ChannelServer, Peer
from links.channel_session import Session, SessionSettings
from links.port import Request, Response, Route
from links.webrtc import HIGH_BYTES, answer, offer
from links.webrtc_settings import WebRtcSettings, check
from protocol.errors import ConfigError, LinkClosed, LinkError, LinkTimeout, ProtocolError
from tests.unit.links.data_channels import LOOPBACK, LossyPath, connected, connected_over

STUN_COOKIE = bytes.fromhex("2112a442")


class Listener(asyncio.DatagramProtocol):
    """A UDP port that keeps what it is sent and answers nothing."""

    def __init__(self) -> None:
        self.heard: list[bytes] = []

    def datagram_received(self, data: bytes, addr: object) -> None:
        self.heard.append(data)


@pytest.fixture
async def server() -> AsyncIterator[tuple[str, Listener]]:
    """host:port of something that may be taken for a STUN or TURN server, and what it heard."""
    transport, listener = await asyncio.get_running_loop().create_datagram_endpoint(
        Listener, local_addr=("127.0.0.1", 0)
    )
    yield f"127.0.0.1:{transport.get_extra_info('sockname')[1]}", listener
    transport.close()


async def test_no_server_is_asked_unless_it_is_named(server: tuple[str, Listener]) -> None:
    address, listener = server
    alone = await offer(LOOPBACK)
    ice = alone._connection._ice()
    assert (ice.stun_server, ice.turn_server) == (None, None)
    assert [line.split()[7] for line in alone.sdp.splitlines() if line.startswith("a=candidate")] == ["host"]
    await alone.close()
    asking = await offer(evolve(LOOPBACK, servers=(f"stun:{address}",), gather_s=0.2))
    assert [datagram[4:8] for datagram in listener.heard][:1] == [STUN_COOKIE]
    await asking.close()


async def test_a_turn_server_that_is_silent_costs_the_gathering_time_and_no_more(
    server: tuple[str, Listener],
) -> None:
    address, listener = server
    named = evolve(LOOPBACK, servers=(f"turn:{address}",), username="u", credential="c", gather_s=0.3)
    async with asyncio.timeout(5):
        tried = await offer(named)
    assert listener.heard[0][4:8] == STUN_COOKIE
    assert "typ host" in tried.sdp
    await tried.close()


async def test_only_the_allowed_addresses_are_told() -> None:
    with pytest.raises(LinkError, match="no address"):
        await offer(evolve(LOOPBACK, addresses=("192.0.2.1",)))
    told = await offer(LOOPBACK)
    assert [line.split()[4] for line in told.sdp.splitlines() if line.startswith("a=candidate")] == ["127.0.0.1"]
    await told.close()


@pytest.mark.parametrize("text", ["", "nonsense", "v=0\r\nm=application 9 UDP/DTLS/SCTP webrtc-datachannel\r\n", "\0"])
async def test_a_description_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ProtocolError):
        await answer(LOOPBACK, text)
    ours = await offer(LOOPBACK)
    with pytest.raises(ProtocolError):
        await ours.accept(text)
    await ours.close()


async def test_no_path_is_a_timeout_that_names_turn() -> None:
    ours = await offer(evolve(LOOPBACK, connect_s=0.3))
    with pytest.raises(LinkTimeout) as missed:
        await ours.connected()
    assert "TURN" in missed.value.next_step
    await ours.close()


async def test_without_the_extra_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aiortc", None)
    with pytest.raises(ConfigError) as missing:
        await offer(LOOPBACK)
    assert "[webrtc]" in missing.value.next_step


async def test_the_buffer_stays_low_however_much_is_sent() -> None:
    ours, theirs = await connected()
    heard: list[int] = []
    theirs.listen(lambda message: heard.append(len(message)), lambda why: None)
    most = 0
    for _ in range(200):
        await ours.room()
        ours.send(bytes(16_000))
        most = max(most, ours.buffered_bytes)
    assert most <= HIGH_BYTES + 16_000
    async with asyncio.timeout(20):
        while sum(heard) < 200 * 16_000:
            await asyncio.sleep(0.01)
    await ours.close()
    await theirs.close()
    with pytest.raises(LinkClosed):
        ours.send(b"late")


async def test_a_lossy_path_delivers_everything() -> None:
    rng = random.Random(7)
    path = LossyPath(lambda data: rng.random() < 0.03)
    await path.start()
    ours, theirs = await connected_over(path)

    async def echo(request: Request) -> Response:
        return Response(body=request.body)

    served = ChannelServer([Route("POST", "/echo", echo)], [], Peer("pi-1"))
    far = Session(theirs, "pi-1", accept=served.accept)
    link = ChannelLink("cloud", Session(ours, "cloud"))
    for size in (10, 40_000, 200_000):
        body = rng.randbytes(size)
        assert (await link.exchange("/echo", {}, body, 30)).body == body
    assert path.dropped > 0
    await link.close()
    await far.close()
    await served.close()
    path.close()


async def test_a_peer_that_vanishes_is_noticed_by_our_own_ping() -> None:
    cut = False
    path = LossyPath(lambda data: cut)
    await path.start()
    ours, theirs = await connected_over(path)
    near = Session(ours, "cloud", settings=SessionSettings(ping_s=0.1, silent_s=0.5, bye_s=0.1))
    far = Session(theirs, "pi-1", settings=SessionSettings(ping_s=0.1, silent_s=0.5, bye_s=0.1))
    assert not near.why
    cut = True
    assert "said nothing" in await near.closed()
    assert "said nothing" in await far.closed()
    path.close()


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        (WebRtcSettings(servers=("http://x",)), "webrtc_servers"),
        (WebRtcSettings(servers=("stun:a", "stun:b")), "webrtc_servers"),
        (WebRtcSettings(servers=("turn:a",)), "webrtc_credential"),
        (WebRtcSettings(addresses=("eth0",)), "webrtc_addresses"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(settings: WebRtcSettings, field: str) -> None:
    with pytest.raises(ConfigError) as wrong:
        check(settings)
    assert wrong.value.field == field


def test_the_credential_is_in_no_text() -> None:
    settings = WebRtcSettings(servers=("turn:a", "turn:b"), username="u", credential="s3cret")
    assert "s3cret" not in repr(settings)
    with pytest.raises(ConfigError) as wrong:
        check(settings)
    assert "s3cret" not in str(wrong.value)

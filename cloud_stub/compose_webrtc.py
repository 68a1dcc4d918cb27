"""Composition of the coordinator's WebRTC side: the library, the signatures, and a server for each visit."""

from __future__ import annotations

from collections.abc import Callable

from cloud_stub.access import error_response
from cloud_stub.authority import OWN_NAME, Authority
from cloud_stub.certificates import read_pair
from cloud_stub.config import CoordinatorConfig
from cloud_stub.http import Served
from cloud_stub.rendezvous import Rendezvous, RendezvousPorts
from links.channel_server import ChannelServer, Peer
from links.channel_session import Session
from links.port import ControlChannel, MessageChannel
from links.webrtc import answer
from links.webrtc_settings import installed
from protocol.clock import WallClock
from protocol.errors import ConfigError
from protocol.signalling import LIFE_S, Signal, Signed, decode_signal, encode_signal
from protocol.topics import Topics, fleet_pattern

IsDevice = Callable[[str, bytes | None], bool]


class DeviceVisit:
    """One device, served over its channel."""

    def __init__(self, channel: MessageChannel, served: Served, peer: Peer) -> None:
        self._server = ChannelServer(served.routes, served.frame_routes, peer, on_error=error_response)
        self._session = Session(channel, peer.name, accept=self._server.accept)

    async def closed(self) -> str:
        return await self._session.closed()

    async def close(self) -> None:
        await self._session.close()
        await self._server.close()


def offers_webrtc(config: CoordinatorConfig) -> bool:
    """Whether this coordinator answers offers: it is told to (or not told otherwise), and the extra is here."""
    return config.webrtc and installed()


async def open_rendezvous(
    config: CoordinatorConfig,
    authority: Authority,
    control: ControlChannel,
    served: Served,
    is_device: IsDevice,
    wall: WallClock,
) -> Rendezvous:
    """Answer offers from now on; `stop` the result before the control channel is closed."""
    settings = config.webrtc_settings

    def read(payload: bytes, device_id: str) -> Signed:
        return decode_signal(payload, device_id, device_id, authority.ca_pem, wall().unix_s)

    def sign(signal: Signal) -> bytes:
        try:
            own = read_pair(authority.own_file.read_bytes())
        except (OSError, ValueError) as err:
            raise ConfigError(f"cannot use {authority.own_file}", next_step="restart the coordinator") from err
        return encode_signal(signal, own.key_pem, own.cert_pem.decode("ascii"))

    async def publish(device_id: str, document: bytes) -> None:
        await control.publish(Topics(config.fleet, device_id).signal_answer, document, expires_in_s=LIFE_S)

    def may_enter(name: str, certificate_der: bytes | None) -> bool:
        return name != OWN_NAME and is_device(name, certificate_der)

    rendezvous = Rendezvous(
        RendezvousPorts(
            read=read,
            sign=sign,
            publish=publish,
            answer=lambda sdp: answer(settings, sdp),
            may_enter=may_enter,
            serve=lambda channel, name, der: DeviceVisit(channel, served, Peer(name, der)),
            wall=wall,
        )
    )
    await control.subscribe(fleet_pattern(config.fleet, "signal/offer"), rendezvous.on_offer)
    return rendezvous

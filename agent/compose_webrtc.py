"""Composition of the second way to the coordinator: WebRTC, agreed on over the control session."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from agent.cloud_link import CloudLink
from agent.compose_control import ControlSide
from agent.config import AgentConfig
from agent.health import Health
from agent.rendezvous import Negotiation, PeerLink, Rendezvous, RendezvousPorts
from links.port import Delivery, MessageChannel
from links.transfer_log import Sink
from netprobe.probe import UnderWay
from protocol.clock import Clock, WallClock
from protocol.errors import ConfigError, LinkClosed, LinkError
from protocol.events import Emit, LinkStateChanged, TransferSample
from protocol.signalling import Signal, Signed, decode_signal, encode_signal

NAME = "webrtc"
COORDINATOR_NAME = "coordinator"
"""Common name of the coordinator's own certificate."""

ANY_PORT = 9
"""Stands for the peer's port, which is another one for each connection and says nothing of the way to it."""

PING_BYTES = 16


class WebRtcSide:
    """`link` is the way, while it is there; `run` is its track."""

    def __init__(
        self,
        config: AgentConfig,
        direct: CloudLink,
        health: Health,
        emit: Emit,
        sink: Sink,
        on_link: Callable[[str, str, int, UnderWay], None],
        on_up: Callable[[], None],
        clock: Clock,
        wall: WallClock,
    ) -> None:
        self._config = config
        self._emit = emit
        self._sink = sink
        self._on_link = on_link
        self._on_up = on_up
        self._clock = clock
        self._wall = wall
        self._control: ControlSide | None = None
        self._path = ""
        self.link = CloudLink(self._on_trouble, NAME)
        self._rendezvous: Rendezvous | None = None
        self._direct = direct
        self._health = health

    def attach(self, control: ControlSide, device_id: str) -> None:
        """The control side over which both sides agree."""
        self._control = control
        self._rendezvous = Rendezvous(self._config.webrtc, device_id, self._ports(device_id))

    async def run(self) -> None:
        """The track."""
        assert self._rendezvous is not None
        await self._rendezvous.run()

    def poke(self) -> None:
        """The control session or the direct way changed."""
        if self._rendezvous is not None:
            self._rendezvous.poke()

    def on_signal(self, delivery: Delivery) -> None:
        """An answer of the coordinator."""
        if self._rendezvous is not None:
            self._rendezvous.on_answer(delivery)

    def status(self) -> Mapping[str, Any]:
        """state: off, idle, offering or up. path: kinds of addresses of the two ends. trouble: why not."""
        rendezvous = self._rendezvous
        if rendezvous is None:
            return {"state": "off", "path": "", "trouble": ""}
        return {"state": rendezvous.state, "path": self._path, "trouble": rendezvous.trouble}

    async def close(self) -> None:
        await self.link.close()

    def _ports(self, device_id: str) -> RendezvousPorts:
        return RendezvousPorts(
            possible=self._possible,
            needed=lambda: not self._direct.available,
            offer=self._offer,
            send=self._send,
            sign=self._sign,
            read=lambda data: self._read(data, device_id),
            use=self._use,
            unused=self._unused,
            health=self._health,
            clock=self._clock,
            wall=self._wall,
        )

    def _possible(self) -> bool:
        side = self._control
        return side is not None and side.told_webrtc and side.control is not None and side.control.state == "up"

    async def _offer(self) -> Negotiation:
        # The library and what it needs are not on the way to READY.
        from links.webrtc import offer

        return await offer(self._config.webrtc_settings)

    async def _send(self, document: bytes) -> None:
        control = self._control.control if self._control is not None else None
        if control is None:
            raise LinkClosed("the control session has ended")
        await control.offer(document)

    def _sign(self, signal: Signal) -> bytes:
        assert self._control is not None and self._control.enrolment is not None
        key_pem = self._control.store.key.read()
        if key_pem is None:
            raise ConfigError("this device has no key", next_step="join again")
        return encode_signal(signal, key_pem, self._control.enrolment.cert_pem)

    def _read(self, data: bytes, device_id: str) -> Signed:
        assert self._control is not None and self._control.enrolment is not None
        ca_pem = self._control.enrolment.ca_pem
        return decode_signal(data, COORDINATOR_NAME, device_id, ca_pem, self._wall().unix_s)

    async def _use(self, channel: MessageChannel) -> PeerLink:
        from links.channel_link import ChannelLink
        from links.channel_session import Session

        session = Session(channel, NAME, clock=self._clock, on_round_trip=self._round_trip)
        made = ChannelLink(NAME, session, sink=self._sink, clock=self._clock)
        await self.link.point_to(made)
        self._path = str(getattr(channel, "path", ""))
        host = str(getattr(channel, "peer_host", "")) or "0.0.0.0"
        self._on_link(NAME, host, ANY_PORT, made.under_way)
        self._emit(LinkStateChanged(at_s=self._clock(), link=NAME, state="up", reason=self._path))
        self._on_up()
        return made

    async def _unused(self) -> None:
        self._path = ""
        await self.link.close()
        self._emit(LinkStateChanged(at_s=self._clock(), link=NAME, state="down"))

    def _round_trip(self, seconds: float) -> None:
        """Our own ping is a sample like any other small frame."""
        self._sink(
            TransferSample(at_s=self._clock(), link=NAME, direction="up", size_bytes=PING_BYTES, seconds=seconds)
        )

    def _on_trouble(self, error: LinkError) -> None:
        if self._rendezvous is not None:
            self._rendezvous.on_trouble(error)

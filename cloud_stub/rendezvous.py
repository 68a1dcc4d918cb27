"""Answers the WebRTC offers that devices make over MQTT, and keeps what came of them: one visit per device.

A device offers under its own topic and signs with its certificate, so a visit has the rights that the same certificate
has over TLS, and ends when they end. Everything a device can make us hold is bounded.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Protocol

from attrs import frozen

from links.port import Delivery, MessageChannel
from protocol.clock import WallClock
from protocol.errors import Full, MidstreamError, NotAllowed
from protocol.signalling import Signal, Signed
from protocol.topics import parse

log = logging.getLogger("midstream.coordinator.rendezvous")


REPLACE_PAUSE_S = 0.2
"""Before an offer that replaces another is answered: offering without end costs us a timer, not a negotiation."""


@frozen
class RendezvousLimits:
    """negotiations: at once. visits: devices served at once. ids: of offers seen before. retry_after_s: asked of a
    device that finds no room.
    """

    negotiations: int = 32
    visits: int = 256
    ids: int = 1024
    retry_after_s: float = 30.0


class Negotiation(Protocol):
    """An answered offer; see links.webrtc.Negotiation."""

    @property
    def sdp(self) -> str: ...
    async def connected(self) -> MessageChannel: ...
    async def close(self) -> None: ...


class Visit(Protocol):
    """A device that is served over a channel."""

    async def closed(self) -> str:
        """Returns when it has left, with the reason."""
        ...

    async def close(self) -> None: ...


@frozen(kw_only=True)
class RendezvousPorts:
    """What answering goes through.

    read: a signed signal of that device; raises MidstreamError. sign: our document. publish: to that device.
    answer: the library's answer to a description. may_enter: whether a device by that name and certificate is a member
    now. serve: begins to serve a device, recognised by its certificate (DER), over a channel.
    """

    read: Callable[[bytes, str], Signed]
    sign: Callable[[Signal], bytes]
    publish: Callable[[str, bytes], Awaitable[None]]
    answer: Callable[[str], Awaitable[Negotiation]]
    may_enter: Callable[[str, bytes | None], bool]
    serve: Callable[[MessageChannel, str, bytes], Visit]
    wall: WallClock


class Rendezvous:
    """`on_offer` takes what arrives on signal/offer; `stop` ends everything."""

    def __init__(self, ports: RendezvousPorts, limits: RendezvousLimits = RendezvousLimits()) -> None:
        self._ports = ports
        self._limits = limits
        self._seen: OrderedDict[str, None] = OrderedDict()
        self._making: dict[str, asyncio.Task[None]] = {}
        self._visits: dict[str, Visit] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopped = False
        self.dropped = 0
        """Offers that were not a device's own, not valid, or too old."""

    @property
    def visits(self) -> int:
        """Devices that are served over WebRTC now."""
        return len(self._visits)

    def on_offer(self, delivery: Delivery) -> None:
        """Handler of the topic; never waits, never raises."""
        if delivery.retained or not delivery.payload or self._stopped:
            return  # nobody waits for the answer to an offer that was kept
        try:
            device_id = parse(delivery.topic).device_id
            signed = self._ports.read(delivery.payload, device_id)
        except MidstreamError as err:
            self.dropped += 1
            log.warning("dropped an offer on %s: %s", delivery.topic[:128], err)
            return
        if signed.signal.kind != "offer" or not self._is_new(signed.signal.id):
            return
        before = self._making.get(device_id)
        if before is not None:
            before.cancel()  # it has made another: nobody waits for the old one
        pause_s = REPLACE_PAUSE_S if before is not None else 0.0
        work = self._negotiate(device_id, signed, pause_s)
        task = asyncio.get_running_loop().create_task(work, name=f"webrtc {device_id}")
        self._making[device_id] = task
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def end(self, device_id: str) -> None:
        """The device is no member any more."""
        making = self._making.pop(device_id, None)
        if making is not None:
            making.cancel()
        visit = self._visits.pop(device_id, None)
        if visit is not None:
            await visit.close()

    async def stop(self) -> None:
        """End all visits in order; bounded."""
        self._stopped = True
        visits = list(self._visits.values())
        await asyncio.gather(*(visit.close() for visit in visits), return_exceptions=True)
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _is_new(self, offer_id: str) -> bool:
        """MQTT delivers at least once."""
        if offer_id in self._seen:
            return False
        self._seen[offer_id] = None
        while len(self._seen) > self._limits.ids:
            self._seen.popitem(last=False)
        return True

    async def _negotiate(self, device_id: str, signed: Signed, pause_s: float) -> None:
        negotiation: Negotiation | None = None
        channel: MessageChannel | None = None
        try:
            await asyncio.sleep(pause_s)
            self._admit(device_id, signed)
            negotiation = await self._ports.answer(signed.signal.sdp)
            await self._say(device_id, signed.signal.id, "answer", sdp=negotiation.sdp)
            channel = await negotiation.connected()
        except MidstreamError as err:
            log.info("%s is not connected by WebRTC: %s", device_id, err)
            if negotiation is None:
                await self._refuse(device_id, signed.signal.id, err)
        finally:
            if self._making.get(device_id) is asyncio.current_task():
                del self._making[device_id]
            if negotiation is not None and channel is None:
                await negotiation.close()
        if channel is not None:
            await self._host(device_id, signed, channel)

    async def _host(self, device_id: str, signed: Signed, channel: MessageChannel) -> None:
        if not self._ports.may_enter(device_id, signed.certificate_der):
            await channel.close()
            return
        try:
            visit = self._ports.serve(channel, device_id, signed.certificate_der)
        except Exception:
            log.exception("%s cannot be served by WebRTC", device_id)
            await channel.close()
            return
        before, self._visits[device_id] = self._visits.get(device_id), visit
        try:
            if before is not None:
                await before.close()
            log.info("%s is connected by WebRTC", device_id)
            why = await visit.closed()
            log.info("%s has left WebRTC: %s", device_id, why)
        finally:
            if self._visits.get(device_id) is visit:
                del self._visits[device_id]
            await visit.close()

    def _admit(self, device_id: str, signed: Signed) -> None:
        if not self._ports.may_enter(device_id, signed.certificate_der):
            raise NotAllowed("this device is no member of the fleet", next_step="join again")
        crowded = len(self._making) > self._limits.negotiations
        if crowded or (len(self._visits) >= self._limits.visits and device_id not in self._visits):
            raise Full("too many devices at once", retry_after_s=self._limits.retry_after_s)

    async def _refuse(self, device_id: str, offer_id: str, err: MidstreamError) -> None:
        retry_after_s = err.retry_after_s if isinstance(err, Full) else 0.0
        try:
            await self._say(device_id, offer_id, "refusal", reason=err.message[:200], retry_after_s=retry_after_s)
        except MidstreamError as failed:
            log.info("%s is not told: %s", device_id, failed)

    async def _say(
        self, device_id: str, offer_id: str, kind: str, *, sdp: str = "", reason: str = "", retry_after_s: float = 0.0
    ) -> None:
        now = self._ports.wall()
        signal = Signal(
            kind="answer" if kind == "answer" else "refusal", id=offer_id, device_id=device_id,
            at=now.unix_s if now.trusted else 0.0, sdp=sdp, reason=reason, retry_after_s=retry_after_s,
        )  # fmt: skip
        await self._ports.publish(device_id, self._ports.sign(signal))

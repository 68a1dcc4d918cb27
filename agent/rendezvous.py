"""The second way to the coordinator: offers it a WebRTC connection over MQTT when its address cannot be reached.

Runs beside the connected track and needs nothing of it but the control session. A connection that breaks is offered
anew, with pauses that grow; one that nobody needs any more is closed.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
from collections.abc import Awaitable, Callable
from typing import Literal, Protocol

from attrs import frozen

from agent.health import Health
from links.port import Delivery, MessageChannel
from protocol.clock import Clock, WallClock
from protocol.errors import ConfigError, Full, LinkError, LinkTimeout, MidstreamError, NotAllowed
from protocol.signalling import LIFE_S, Signal, Signed

log = logging.getLogger("midstream.agent.rendezvous")

Mode = Literal["auto", "always", "off"]
State = Literal["off", "idle", "offering", "up"]


@frozen
class Waits:
    """first_s, longest_s: between attempts, growing. good_after_s: a connection that lived so long begins them anew.

    grace_s: head start of the direct way, for searching it usually succeeds. linger_s: how long a connection is kept
    that the direct way has made needless, in case that way does not last. look_s: between looks at both.
    """

    first_s: float = 1.0
    longest_s: float = 120.0
    good_after_s: float = 30.0
    grace_s: float = 3.0
    linger_s: float = 60.0
    look_s: float = 5.0


class Negotiation(Protocol):
    """An offer that is waiting for its answer; see links.webrtc.Negotiation."""

    @property
    def sdp(self) -> str: ...
    async def accept(self, answer: str) -> None: ...
    async def connected(self) -> MessageChannel: ...
    async def close(self) -> None: ...


class PeerLink(Protocol):
    """The link that was made over a channel."""

    def idle_s(self) -> float:
        """Seconds since it carried anything."""
        ...

    async def closed(self) -> str: ...
    async def close(self) -> None: ...


@frozen(kw_only=True)
class RendezvousPorts:
    """What the way is made through.

    possible: the control session is up and the coordinator answers offers. needed: the direct way is not there. offer:
    the library's. send: our document to the coordinator. sign, read: documents; `read` raises MidstreamError for any
    that the coordinator did not sign for this device. use: makes the link over a channel the way of both planes.
    unused: that link is no longer.
    """

    possible: Callable[[], bool]
    needed: Callable[[], bool]
    offer: Callable[[], Awaitable[Negotiation]]
    send: Callable[[bytes], Awaitable[None]]
    sign: Callable[[Signal], bytes]
    read: Callable[[bytes], Signed]
    use: Callable[[MessageChannel], Awaitable[PeerLink]]
    unused: Callable[[], Awaitable[None]]
    health: Health
    clock: Clock
    wall: WallClock


class Rendezvous:
    """`run` ends only by cancellation; `on_answer` takes what arrives on signal/answer."""

    def __init__(self, mode: Mode, device_id: str, ports: RendezvousPorts, waits: Waits = Waits()) -> None:
        self._mode = mode
        self._waits = waits
        self._device_id = device_id
        self._ports = ports
        self._wake = asyncio.Event()
        self._pending: tuple[str, asyncio.Future[Signal]] | None = None
        self._tries = 0
        self._broken = asyncio.Event()
        self.state: State = "off" if mode == "off" else "idle"
        self.trouble = ""
        """Why the last attempt failed or the last connection ended; empty before that."""

    async def run(self) -> None:
        """Keep the way for as long as it is wanted."""
        if self._mode == "off":
            return
        while True:
            await self._until_wanted()
            try:
                await self._meet()
            except MidstreamError as err:
                await self._after(err)

    def poke(self) -> None:
        """Something changed: look again whether the way is wanted."""
        self._wake.set()

    def on_trouble(self, error: LinkError) -> None:
        """The link broke in use; its own ping may not have noticed yet."""
        self.trouble = error.message
        self._broken.set()

    def on_answer(self, delivery: Delivery) -> None:
        """Handler of the topic: only the answer that is being waited for is of any use."""
        if self._pending is None or delivery.retained or not delivery.payload:
            return
        offer_id, waiting = self._pending
        try:
            signal = self._ports.read(delivery.payload).signal
        except MidstreamError as err:
            log.warning("dropped an answer: %s", err)
            return
        if signal.id == offer_id and signal.kind != "offer" and not waiting.done():
            waiting.set_result(signal)

    def _wanted(self) -> bool:
        return self._ports.possible() and (self._mode == "always" or self._ports.needed())

    async def _until_wanted(self) -> None:
        self.state = "idle"
        while True:
            while not self._wanted():
                self._ports.health.clear("webrtc")
                await self._woken(self._waits.look_s)
            if self._mode == "always":
                return
            await asyncio.sleep(self._waits.grace_s)
            if self._wanted():
                return

    async def _woken(self, seconds: float) -> None:
        self._wake.clear()
        try:
            async with asyncio.timeout(seconds):
                await self._wake.wait()
        except TimeoutError:
            return

    async def _meet(self) -> None:
        """One negotiation, and the connection for as long as it lives. Raises MidstreamError."""
        self.state = "offering"
        channel = await self._negotiate()
        self._broken.clear()
        link = await self._use(channel)
        self.state, self.trouble = "up", ""
        self._ports.health.clear("webrtc")
        log.info("connected to the coordinator by WebRTC")
        began_s = self._ports.clock()
        try:
            await self._while_useful(link)
        finally:
            self.state = "idle"
            if self._ports.clock() - began_s >= self._waits.good_after_s:
                self._tries = 0
            await self._ports.unused()
            await link.close()

    async def _use(self, channel: MessageChannel) -> PeerLink:
        try:
            return await self._ports.use(channel)
        except BaseException:
            await channel.close()  # nobody else has it
            raise

    async def _while_useful(self, link: PeerLink) -> None:
        """Returns in order when the direct way has been there for long; raises LinkError when the link ended."""
        ended = asyncio.ensure_future(link.closed())
        broken = asyncio.ensure_future(self._broken.wait())
        needless_s, look_s = 0.0, self._waits.look_s
        try:
            while not (ended.done() or broken.done()):
                await asyncio.wait([ended, broken], timeout=look_s, return_when=asyncio.FIRST_COMPLETED)
                needless_s = 0.0 if self._mode == "always" or self._ports.needed() else needless_s + look_s
                if needless_s >= self._waits.linger_s and link.idle_s() >= look_s:
                    log.info("the direct way is there: WebRTC is closed")
                    return
            why = self.trouble if broken.done() else ended.result()
        finally:
            for waiter in (ended, broken):
                waiter.cancel()
            await asyncio.gather(ended, broken, return_exceptions=True)
        raise LinkError(f"the WebRTC connection ended: {why}")

    async def _negotiate(self) -> MessageChannel:
        negotiation = await self._ports.offer()
        channel: MessageChannel | None = None
        try:
            answer = await self._ask(negotiation.sdp)
            if answer.kind == "refusal":
                raise _refusal(answer)
            await negotiation.accept(answer.sdp)
            channel = await negotiation.connected()
            return channel
        finally:
            if channel is None:
                await negotiation.close()

    async def _ask(self, sdp: str) -> Signal:
        now = self._ports.wall()
        offer = Signal(
            kind="offer", id=secrets.token_hex(16), device_id=self._device_id,
            at=now.unix_s if now.trusted else 0.0, sdp=sdp,
        )  # fmt: skip
        waiting: asyncio.Future[Signal] = asyncio.get_running_loop().create_future()
        self._pending = (offer.id, waiting)
        try:
            await self._ports.send(self._ports.sign(offer))
            async with asyncio.timeout(LIFE_S):
                return await waiting
        except TimeoutError as err:
            raise LinkTimeout(f"the coordinator did not answer the offer in {LIFE_S:.0f} s") from err
        finally:
            self._pending = None

    async def _after(self, error: MidstreamError) -> None:
        """Say once what is wrong, then wait: longer each time, and as long as the coordinator asks."""
        self.state, self.trouble = "idle", error.message
        log.info("no WebRTC: %s", error)
        self._ports.health.warn("webrtc", error.message, error.next_step)
        waits = self._waits
        span_s: float = min(waits.longest_s, waits.first_s * 2.0**self._tries)
        self._tries = min(self._tries + 1, 10)
        if isinstance(error, ConfigError | NotAllowed):
            span_s = waits.longest_s
        asked_s = min(error.retry_after_s, waits.longest_s) if isinstance(error, Full) else 0.0
        await asyncio.sleep(max(asked_s, random.uniform(0.5, 1.0) * span_s))


def _refusal(answer: Signal) -> MidstreamError:
    message = f"the coordinator refuses WebRTC: {answer.reason[:200]}"
    if answer.retry_after_s > 0:
        return Full(message, retry_after_s=answer.retry_after_s)
    return LinkError(message)

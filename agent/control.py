"""The control way: topics to handlers, birth with the will's epoch, registration, policy in and reported out, canary.

A session counts as up only when a canary came back through the broker: after a reconnect everything may look connected
while nothing arrives any more.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from attrs import frozen

from agent.policy import PolicyHolder
from agent.registration import Registrar
from links.port import ControlChannel, ControlState, Delivery, Unsubscribe
from protocol.clock import WallClock
from protocol.decode import check_schema, decode, encode
from protocol.documents import COORDINATOR_SCHEMA, CoordinatorState, Presence, Reported, Telemetry
from protocol.errors import MidstreamError
from protocol.signalling import LIFE_S
from protocol.topics import Topics, coord_state

log = logging.getLogger("midstream.agent.control")

CANARY_KIND = "canary"
CANARY_TIMEOUT_S = 15.0
# Rare enough to cost nothing, often enough that a dead session is found the same quarter of an hour.
CANARY_EVERY_S = 600.0
TELEMETRY_EXPIRES_S = 600.0
# A channel is down before its first attempt, too; a broker that answers does so long before this.
FIRST_UP_S = 10.0


def _no_signal(delivery: Delivery) -> None:
    """For sessions that negotiate nothing."""


def _not_told() -> None:
    """For whom a goodbye changes nothing."""


@frozen(kw_only=True)
class ControlPorts:
    """What the control way tells the rest of the agent; all are called on the event loop and do not block."""

    on_state: Callable[[ControlState], None]
    on_coordinator: Callable[[CoordinatorState], None]
    on_deaf: Callable[[], None]
    wall: WallClock
    on_signal: Callable[[Delivery], None] = _no_signal
    on_coordinator_gone: Callable[[], None] = _not_told


def presence(state: str, epoch: int, boot: str, unix_s: float) -> bytes:
    """The document on the state topic."""
    return encode(Presence(s=state, epoch=epoch, boot=boot, at=unix_s))  # type: ignore[arg-type]


def will(topics: Topics, epoch: int, boot: str) -> Delivery:
    """What the broker says when we vanish; the epoch ties it to its birth, so that a late one can be told."""
    return Delivery(topics.state, presence("offline", epoch, boot, 0.0), retained=True)


class Control:
    """One control session to one broker; `start` and `stop` are symmetric."""

    def __init__(
        self,
        channel: ControlChannel,
        topics: Topics,
        *,
        epoch: int,
        boot: str,
        holder: PolicyHolder,
        registrar: Registrar,
        ports: ControlPorts,
        canary_timeout_s: float = CANARY_TIMEOUT_S,
        canary_every_s: float = CANARY_EVERY_S,
        first_up_s: float = FIRST_UP_S,
    ) -> None:
        self._channel = channel
        self._topics = topics
        self._epoch = epoch
        self._boot = boot
        self._holder = holder
        self._registrar = registrar
        self._ports = ports
        self._canary_timeout_s = canary_timeout_s
        self._canary_every_s = canary_every_s
        self._first_up_s = first_up_s
        self._canary_sent = 0
        self._canary_back = asyncio.Event()
        self._undo: list[Unsubscribe] = []
        self._unwatch: Callable[[], None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._session: asyncio.Task[None] | None = None
        self._judging = asyncio.Lock()
        self._registering = asyncio.Lock()
        self._coordinator_epoch: int | None = None
        self.state: ControlState = "down"

    async def start(self) -> None:
        """Subscribe, then watch: what is published before the session is up waits in the channel."""
        for pattern, handler in (
            (self._topics.policy_desired, self._on_policy),
            (coord_state(self._topics.fleet), self._on_coordinator),
            (self._topics.tele(CANARY_KIND), self._on_canary),
            (self._topics.signal_answer, self._ports.on_signal),
        ):
            self._undo.append(await self._channel.subscribe(pattern, handler))
        self._unwatch = self._channel.watch(self._on_state)
        self._spawn(self._tell_first_down())

    def dial_now(self) -> None:
        """The network has just come back."""
        self._channel.dial_now()

    async def stop(self, goodbye: str = "offline") -> None:
        """Say goodbye and disconnect in order."""
        if self._unwatch is not None:
            self._unwatch()
        tasks = [task for task in (*self._tasks, self._session) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        last = Delivery(self._topics.state, self._presence(goodbye), retained=True)
        await self._channel.close(last)

    async def say(self, state: str) -> None:
        """Publish presence (draining, sleeping)."""
        await self._channel.publish(self._topics.state, self._presence(state), retain=True)

    async def tell(self, telemetry: Telemetry) -> None:
        """Publish telemetry; it expires at the broker."""
        topic = self._topics.tele(telemetry.kind)
        await self._channel.publish(topic, encode(telemetry), expires_in_s=TELEMETRY_EXPIRES_S)

    async def offer(self, document: bytes) -> None:
        """Publish an offer of a connection; the broker drops it when nobody can be waiting for its answer any more."""
        await self._channel.publish(self._topics.signal_offer, document, expires_in_s=LIFE_S)

    async def register(self, *, anew: bool = False) -> None:
        """Publish the registration if it differs from what this broker has, or `anew`: it may have lost it.

        Without a session nothing is published: each session begins with a registration.
        """
        async with self._registering:
            if self.state != "up":
                return
            if anew:
                self._registrar.forget()
            news = self._registrar.news(self._epoch, self._holder.current().version)
            if news is None:
                return
            await self._channel.publish(self._topics.profile, news.document, retain=True)
            self._registrar.told(news)

    async def report(self) -> None:
        """Publish the last judgement, which has changed with the local bounds; each session begins with it anyway."""
        async with self._judging:
            if self.state == "up":
                await self._report(self._holder.reported())

    def _presence(self, state: str) -> bytes:
        return presence(state, self._epoch, self._boot, self._ports.wall().unix_s)

    def _on_state(self, state: ControlState) -> None:
        if state == self.state and state != "up":
            return
        self.state = state
        if self._session is not None:
            self._session.cancel()
            self._session = None
        if state == "up":
            self._session = self._spawn(self._run_session())
        else:
            self._ports.on_state(state)

    async def _tell_first_down(self) -> None:
        """A broker that never answered changes no state, so nobody would hear of it."""
        await asyncio.sleep(self._first_up_s)
        if self.state == "down":
            self._ports.on_state("down")

    async def _run_session(self) -> None:
        await self.say("online")
        # A broker without a store begins empty, and which ones have one cannot be known.
        await self._guarded(self.register(anew=True))
        await self._report(self._holder.reported())
        while True:
            if not await self._canary():
                log.warning("the broker takes what we send and nothing comes back; connecting again")
                self._ports.on_deaf()
                return
            self._ports.on_state("up")
            await asyncio.sleep(self._canary_every_s)

    async def _canary(self) -> bool:
        """True when a message made the round through the broker in time."""
        self._canary_sent += 1
        self._canary_back.clear()
        payload = self._canary_payload()
        await self._channel.publish(self._topics.tele(CANARY_KIND), payload, expires_in_s=self._canary_timeout_s)
        try:
            async with asyncio.timeout(self._canary_timeout_s):
                await self._canary_back.wait()
        except TimeoutError:
            return False
        return True

    def _on_canary(self, delivery: Delivery) -> None:
        if delivery.payload == self._canary_payload():
            self._canary_back.set()

    def _canary_payload(self) -> bytes:
        return encode(Telemetry(kind=CANARY_KIND, at=0.0, boot=self._boot, values={"number": self._canary_sent}))

    def _on_coordinator(self, delivery: Delivery) -> None:
        if not delivery.payload:
            self._ports.on_coordinator_gone()  # where it was may still be where it comes back
            return
        try:
            found = decode(CoordinatorState, delivery.payload, what="the coordinator's state")
            check_schema(found.schema, COORDINATOR_SCHEMA)
        except MidstreamError as err:
            log.warning("ignored: %s", err)
            return
        if self._coordinator_epoch not in (None, found.epoch):
            # A coordinator that started anew may have a broker that forgot us.
            self._spawn(self.register(anew=True))
        self._coordinator_epoch = found.epoch
        self._ports.on_coordinator(found)

    def _on_policy(self, delivery: Delivery) -> None:
        if delivery.payload:
            self._spawn(self._judge(delivery.payload))

    async def _judge(self, payload: bytes) -> None:
        async with self._judging:
            reported = await self._holder.consider(payload)
            if reported is not None:
                await self._report(reported)
                await self.register()

    async def _report(self, reported: Reported | None) -> None:
        if reported is not None:
            await self._channel.publish(self._topics.policy_reported, encode(reported), retain=True)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(self._guarded(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _guarded(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except MidstreamError as err:
            log.warning("control: %s", err)

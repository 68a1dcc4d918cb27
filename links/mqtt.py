"""A ControlChannel over MQTT 5, stepping down to 3.1.1 where the broker knows no better.

Each connection gets a fresh client, so the client library's queues and backoff are never used: what must not be lost
is in our outbox, and links.session decides when to dial. Delivery is at least once, in order while connected.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from attrs import evolve

from links.mqtt_connection import Connection
from links.mqtt_settings import MqttPace, MqttSettings
from links.outbox import Outbox, Queued
from links.port import ControlState, Delivery, Handler, Unsubscribe
from links.session import Connected, Failed, Lost, Session, SessionEvent, step
from links.topic_filter import check_pattern, check_topic, matches
from protocol.clock import Clock
from protocol.errors import LinkClosed, TooLarge
from protocol.events import Emit, LinkStateChanged, ignore
from protocol.pulse import Pulse

log = logging.getLogger("midstream.links.mqtt")

_IN_FLIGHT = 16
_NO_NETWORK_S = 60.0
"""A pace that forbids dialling is asked again after this long, or when told to dial."""
_ACK_S = 2.0
"""A message that the broker has not acknowledged by then is written to disk."""
_TICK_PATIENCE_S = 30.0
_DISK_PATIENCE_S = 120.0
"""A worn SD card can hold a write for many seconds."""


class MqttChannel:
    """A ControlChannel. Make and use it on one event loop; it dials as soon as it is first used or `start`ed.

    Args:
        rng: where the jitter comes from.
        emit: told of each change of state as LinkStateChanged.
    """

    def __init__(
        self,
        settings: MqttSettings,
        clock: Clock = time.monotonic,
        rng: random.Random | None = None,
        emit: Emit = ignore,
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._rng = rng or random.Random()
        self._emit = emit
        # One thread, begun with the first write: the disk must not hold up the event loop, nor writes overtake others.
        self._writer = ThreadPoolExecutor(1, "mqtt outbox") if settings.outbox_path is not None else None
        self._outbox = Outbox(
            settings.outbox_path, max_count=settings.outbox_count, max_bytes=settings.outbox_bytes, clock=clock,
            worker=self._writer,
        )  # fmt: skip
        self._session = Session(version=settings.version, proven=settings.version == 4)
        self._handlers: dict[str, list[Handler]] = {}
        self._unwanted: set[str] = set()
        self._watchers: list[Callable[[ControlState], None]] = []
        self._waiters: dict[int, asyncio.Future[None]] = {}
        self._connection: Connection | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._hurry = asyncio.Event()
        self._closed = False
        self.refused_messages = 0
        """Inbound messages over max_payload_bytes that were dropped."""

    @property
    def state(self) -> ControlState:
        return self._session.state

    @property
    def version(self) -> int:
        """MQTT version in use or tried next: 5, or 4 for 3.1.1."""
        return self._session.version

    @property
    def alive(self) -> bool:
        """False when the supervisor died, which only a bug can do: for watchdogs."""
        return self._supervisor is None or not self._supervisor.done() or self._closed

    def pulses(self) -> tuple[Pulse, ...]:
        """Signs of life for a watchdog, from any thread. Dialling, waiting and silence of a broker are no hang."""
        connection = self._connection
        busy = not self.alive or (self.state == "up" and connection is not None)
        return (
            Pulse("mqtt", connection.beats if connection is not None else 0, busy, _TICK_PATIENCE_S),
            Pulse("mqtt outbox", self._outbox.written, self._outbox.writing, _DISK_PATIENCE_S),
        )

    def start(self) -> None:
        """Begin to dial; harmless when already begun."""
        if self._closed:
            raise LinkClosed("the control channel has been closed")
        if self._supervisor is None:
            self._supervisor = asyncio.get_running_loop().create_task(self._run(), name="mqtt supervisor")

    def dial_now(self) -> None:
        """Do not wait any longer: the network has just come back."""
        self._hurry.set()

    async def publish(
        self, topic: str, payload: bytes, retain: bool = False, expires_in_s: float | None = None
    ) -> None:
        """Returns when the broker has the message or the outbox has it on disk.

        Raises TooLarge, Full, BadRequest (topic), LinkClosed after close.
        """
        check_topic(topic)
        if len(payload) > self._settings.max_payload_bytes:
            raise TooLarge(f"a message has {len(payload)} bytes, at most {self._settings.max_payload_bytes} are sent")
        self.start()
        message = self._outbox.add(topic, payload, retain, expires_in_s)
        durable = expires_in_s is None or expires_in_s >= self._settings.durable_over_s
        if self._session.state == "up" and self._connection is not None:
            waiter = self._waiters[message.number] = asyncio.get_running_loop().create_future()
            try:
                self._pump()
                async with asyncio.timeout(_ACK_S):
                    await waiter
                return
            except TimeoutError:
                pass
            finally:
                self._waiters.pop(message.number, None)
        written = self._outbox.keep(message.number) if durable else None
        if written is not None:
            await asyncio.shield(asyncio.wrap_future(written))

    async def subscribe(self, pattern: str, handler: Handler) -> Unsubscribe:
        """Handle messages on `pattern`; retained ones come at once, and again after each reconnect.

        When the channel is up it returns after the broker's acknowledgement. Raises BadRequest, LinkClosed.
        """
        check_pattern(pattern)
        self.start()
        self._handlers.setdefault(pattern, []).append(handler)
        self._unwanted.discard(pattern)
        if self._connection is not None and self._session.state == "up":
            await self._connection.subscribe([pattern])

        async def unsubscribe() -> None:
            handlers = self._handlers.get(pattern, [])
            if handler in handlers:
                handlers.remove(handler)
            if handlers or pattern not in self._handlers:
                return
            del self._handlers[pattern]
            self._unwanted.add(pattern)
            if self._connection is not None and self._session.state == "up":
                self._connection.unsubscribe([pattern])
                self._unwanted.discard(pattern)

        return unsubscribe

    def watch(self, on_state: Callable[[ControlState], None]) -> Callable[[], None]:
        self._watchers.append(on_state)
        self._tell(on_state)

        def unwatch() -> None:
            with contextlib.suppress(ValueError):
                self._watchers.remove(on_state)

        return unwatch

    async def close(self, last: Delivery | None = None) -> None:
        """Send `last` if connected, wait up to two seconds for acknowledgements, say goodbye; unsent messages stay."""
        if self._closed:
            return
        self._closed = True
        connection = self._connection
        if connection is not None and self._session.state == "up":
            if last is not None:
                with contextlib.suppress(TooLarge):
                    connection.publish(Queued(0, last.topic, last.payload, last.retained, None), None)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_ACK_S):
                    await connection.all_acknowledged()
            connection.disconnect()
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.gather(self._supervisor, return_exceptions=True)
        if connection is not None:
            connection.drop()
        self._connection = None
        await asyncio.to_thread(self._close_outbox)
        self._move(Session(version=self._session.version), "closed")

    def _close_outbox(self) -> None:
        self._outbox.close()
        if self._writer is not None:
            self._writer.shutdown()

    async def _run(self) -> None:
        """Dial, serve, wait, again; ends by cancellation alone."""
        wait_s = 0.0
        while True:
            await self._pause(wait_s)
            while not self._settings.paced().may_dial:
                await self._pause(_NO_NETWORK_S)
            try:
                event = await self._attempt()
            except Exception:
                log.exception("the control channel failed unexpectedly")
                event = Failed("network", self._rng.random())
            finally:
                if self._connection is not None:
                    self._connection.drop()
                    self._connection = None
            session, wait_s = step(self._session, event, self._settings.paced().rules)
            self._move(session, f"{type(event).__name__.lower()}: {getattr(event, 'cause', '')}")

    async def _pause(self, seconds: float) -> None:
        self._hurry.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._hurry.wait()

    async def _attempt(self) -> SessionEvent:
        """One connection from dialling to its end."""
        settings = evolve(self._settings, keepalive_s=self._settings.paced().keepalive_s)
        connection = Connection(settings, self._session, self._on_message, self._on_acknowledged)
        self._connection = connection
        cause = await connection.dial()
        if cause is not None:
            return Failed(cause, self._rng.random())
        if self._handlers:
            await connection.subscribe(list(self._handlers))
        if self._unwanted:
            connection.unsubscribe(sorted(self._unwanted))
            self._unwanted.clear()
        if connection.over.done():
            return Lost(connection.over.result(), self._clock(), self._rng.random())
        session, _ = step(self._session, Connected(self._clock()), self._settings.paced().rules)
        self._move(session, f"connected with MQTT {'5' if session.version == 5 else '3.1.1'}")
        self._pump()
        return Lost(await asyncio.shield(connection.over), self._clock(), self._rng.random())

    def _pump(self) -> None:
        """Send what waits, as far as the window of unacknowledged messages allows."""
        connection = self._connection
        if connection is None or self._session.state != "up":
            return
        for message in self._outbox.pending():
            if connection.in_flight >= _IN_FLIGHT:
                return
            if not connection.has_sent(message.number):
                left_s = None if message.expires_at_s is None else message.expires_at_s - self._clock()
                connection.publish(message, left_s)

    def _on_acknowledged(self, number: int) -> None:
        self._outbox.done(number)
        waiter = self._waiters.get(number)
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
        self._pump()

    def _on_message(self, delivery: Delivery) -> None:
        if len(delivery.payload) > self._settings.max_payload_bytes:
            self.refused_messages += 1
            log.warning("a message of %d bytes on %s was dropped", len(delivery.payload), delivery.topic)
            return
        for pattern, handlers in list(self._handlers.items()):
            if matches(pattern, delivery.topic):
                for handler in list(handlers):
                    try:
                        handler(delivery)
                    except Exception:
                        log.exception("the handler of %s failed", pattern)

    def _move(self, session: Session, reason: str) -> None:
        before, self._session = self._session, session
        if before.state != session.state:
            log.info("control channel %s: %s", session.state, reason)
            self._emit(LinkStateChanged(at_s=self._clock(), link="control", state=session.state, reason=reason))
            for on_state in list(self._watchers):
                self._tell(on_state)

    def _tell(self, on_state: Callable[[ControlState], None]) -> None:
        try:
            on_state(self._session.state)
        except Exception:
            log.exception("a watcher of the control channel failed")


__all__ = ["MqttChannel", "MqttPace", "MqttSettings"]

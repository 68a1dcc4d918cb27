"""An in-memory MQTT broker and its ControlChannel: retained messages, wills, wildcards, sessions that stay."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable

from attrs import define, field, frozen

from links.port import ControlState, Delivery, Handler, Unsubscribe
from links.topic_filter import check_pattern, check_topic, matches
from protocol.clock import Clock
from protocol.errors import Full, LinkClosed, TooLarge

log = logging.getLogger("midstream.links.memory_control")

MAX_QUEUED = 1000


@frozen
class _Expiring:
    delivery: Delivery
    expires_at_s: float | None

    def fresh(self, now_s: float) -> bool:
        return self.expires_at_s is None or now_s < self.expires_at_s


@define(eq=False)
class _Client:
    """What the broker remembers of one client id."""

    channel: MemoryControlChannel | None = None
    patterns: set[str] = field(factory=set)
    queued: deque[_Expiring] = field(factory=lambda: deque(maxlen=MAX_QUEUED))


class MemoryBroker:
    """Delivers at once, within the call that publishes.

    Args:
        clock: for expiry; monotonic seconds.
    """

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._clients: dict[str, _Client] = {}
        self._retained: dict[str, _Expiring] = {}
        self._channels: list[MemoryControlChannel] = []
        self._running = True

    def stop(self) -> None:
        """Vanish: channels go down; retained messages and sessions are kept, as a broker with persistence does."""
        self._running = False
        for client in self._clients.values():
            channel, client.channel = client.channel, None
            if channel is not None:
                channel._went("down")

    def restart(self) -> None:
        """Come back: channels reconnect."""
        self._running = True
        for channel in list(self._channels):
            channel._dial()

    def sever(self, client_id: str) -> None:
        """Lose one client's connection without a goodbye: its will is published. It comes back with `restart`."""
        client = self._clients[client_id]
        channel, client.channel = client.channel, None
        if channel is not None:
            channel._went("down")
            self._publish_will(channel)

    def _attach(self, channel: MemoryControlChannel) -> bool:
        if channel not in self._channels:
            self._channels.append(channel)
        if not self._running:
            return False
        client = self._clients.setdefault(channel.client_id, _Client())
        former, client.channel = client.channel, channel
        if former is not None and former is not channel:
            self._publish_will(former)
            former._went("duplicate")
        return True

    def _detach(self, channel: MemoryControlChannel) -> None:
        with contextlib.suppress(ValueError):
            self._channels.remove(channel)
        client = self._clients.get(channel.client_id)
        if client is not None and client.channel is channel:
            client.channel = None

    def _resume(self, channel: MemoryControlChannel) -> None:
        """Subscribe again, then hand over what came meanwhile."""
        client = self._clients[channel.client_id]
        for pattern in channel._patterns():
            self._subscribe(channel, pattern)
        while client.queued:
            waiting = client.queued.popleft()
            if waiting.fresh(self._clock()):
                channel._receive(waiting.delivery)

    def _subscribe(self, channel: MemoryControlChannel, pattern: str) -> None:
        self._clients[channel.client_id].patterns.add(pattern)
        now_s = self._clock()
        for topic, kept in list(self._retained.items()):
            if matches(pattern, topic) and kept.fresh(now_s):
                channel._receive(Delivery(topic, kept.delivery.payload, retained=True))

    def _unsubscribe(self, client_id: str, pattern: str) -> None:
        client = self._clients.get(client_id)
        if client is not None:
            client.patterns.discard(pattern)

    def _publish(self, topic: str, payload: bytes, retain: bool, expires_at_s: float | None) -> None:
        if retain and payload:
            self._retained[topic] = _Expiring(Delivery(topic, payload, True), expires_at_s)
        elif retain:
            self._retained.pop(topic, None)
        message = _Expiring(Delivery(topic, payload, False), expires_at_s)
        for client in list(self._clients.values()):
            if any(matches(pattern, topic) for pattern in client.patterns):
                if client.channel is not None:
                    client.channel._receive(message.delivery)
                else:
                    client.queued.append(message)

    def _publish_will(self, channel: MemoryControlChannel) -> None:
        if channel.will is not None:
            self._publish(channel.will.topic, channel.will.payload, channel.will.retained, None)


class MemoryControlChannel:
    """A ControlChannel on a MemoryBroker."""

    def __init__(
        self,
        broker: MemoryBroker,
        client_id: str,
        *,
        will: Delivery | None = None,
        clock: Clock = time.monotonic,
        max_payload_bytes: int = 8 << 10,
    ) -> None:
        self.client_id = client_id
        self.will = will
        self._broker = broker
        self._clock = clock
        self._max_payload_bytes = max_payload_bytes
        self._handlers: dict[str, list[Handler]] = {}
        self._watchers: list[Callable[[ControlState], None]] = []
        self._outbox: deque[tuple[str, bytes, bool, float | None]] = deque()
        self._state: ControlState = "down"
        self._started = False
        self._closed = False

    @property
    def state(self) -> ControlState:
        return self._state

    def start(self) -> None:
        """Connect; harmless when already begun."""
        if self._closed:
            raise LinkClosed("the control channel has been closed")
        if not self._started:
            self._started = True
            self._dial()

    async def publish(
        self, topic: str, payload: bytes, retain: bool = False, expires_in_s: float | None = None
    ) -> None:
        check_topic(topic)
        if len(payload) > self._max_payload_bytes:
            raise TooLarge(f"a message has {len(payload)} bytes, at most {self._max_payload_bytes} are sent")
        self.start()
        expires_at_s = None if expires_in_s is None else self._clock() + expires_in_s
        if self._state == "up":
            self._broker._publish(topic, payload, retain, expires_at_s)
        elif len(self._outbox) >= MAX_QUEUED:
            raise Full("the outbox is full", retry_after_s=30.0)
        else:
            self._outbox.append((topic, payload, retain, expires_at_s))

    async def subscribe(self, pattern: str, handler: Handler) -> Unsubscribe:
        check_pattern(pattern)
        self.start()
        self._handlers.setdefault(pattern, []).append(handler)
        if self._state == "up":
            self._broker._subscribe(self, pattern)

        async def unsubscribe() -> None:
            handlers = self._handlers.get(pattern, [])
            if handler in handlers:
                handlers.remove(handler)
            if not handlers:
                self._handlers.pop(pattern, None)
                self._broker._unsubscribe(self.client_id, pattern)

        return unsubscribe

    def dial_now(self) -> None:
        """Nothing to hurry: it is up whenever its broker is."""

    def watch(self, on_state: Callable[[ControlState], None]) -> Callable[[], None]:
        self._watchers.append(on_state)
        on_state(self._state)

        def unwatch() -> None:
            with contextlib.suppress(ValueError):
                self._watchers.remove(on_state)

        return unwatch

    async def close(self, last: Delivery | None = None) -> None:
        if self._closed:
            return
        if last is not None and self._state == "up":
            self._broker._publish(last.topic, last.payload, last.retained, None)
        self._closed = True
        self._broker._detach(self)
        self._went("down")

    def _dial(self) -> None:
        if self._closed or not self._broker._attach(self):
            return
        self._broker._resume(self)
        self._went("up")
        while self._outbox and self._state == "up":
            topic, payload, retain, expires_at_s = self._outbox.popleft()
            if expires_at_s is None or self._clock() < expires_at_s:
                self._broker._publish(topic, payload, retain, expires_at_s)

    def _patterns(self) -> list[str]:
        return list(self._handlers)

    def _receive(self, delivery: Delivery) -> None:
        if len(delivery.payload) > self._max_payload_bytes:
            return
        for pattern, handlers in list(self._handlers.items()):
            if matches(pattern, delivery.topic):
                for handler in list(handlers):
                    try:
                        handler(delivery)
                    except Exception:  # as on the real channel: one handler's bug costs nobody else
                        log.exception("the handler of %s failed", pattern)

    def _went(self, state: ControlState) -> None:
        if state != self._state:
            self._state = state
            for on_state in list(self._watchers):
                on_state(state)

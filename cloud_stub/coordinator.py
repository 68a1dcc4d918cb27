"""The control plane over MQTT: consumes what devices say of themselves, keeps each one's desired policy published.

Nothing a device sends can end a handler: documents are bounded, decoded strictly, and dropped with one log line when
wrong. All publishing runs in one task, so handlers never wait.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TypeVar

from attrs import frozen

from cloud_stub.publishing import Published, Publisher
from cloud_stub.registry import Device, DeviceRegistry
from links.port import ControlChannel, ControlState, Delivery, Unsubscribe
from protocol.clock import Clock, WallClock
from protocol.decode import check_schema, decode, encode
from protocol.documents import (
    PRESENCE_SCHEMA,
    REGISTRATION_SCHEMA,
    REPORTED_SCHEMA,
    CoordinatorState,
    Presence,
    Registration,
    Reported,
)
from protocol.errors import MidstreamError, ProtocolError
from protocol.events import Emit, LinkStateChanged, PolicyJudged
from protocol.topics import MAX_PAYLOAD_BYTES, ParsedTopic, Topics, coord_state, fleet_pattern, parse

log = logging.getLogger("midstream.coordinator")

T = TypeVar("T")

RESEND_AFTER_S = 10.0
"""A device that keeps reporting an older policy gets the desired one again, but not more often than this."""

SWEEP_S = 30.0
"""How often devices that have not judged their desired policy are looked at again."""

MAX_WAITING = 10_000


@frozen
class Sent:
    """What was last published to a device in this broker session."""

    epoch: int
    version: int
    at_s: float


def must_send(desired: Published | None, reported: Reported | None, sent: Sent | None, now_s: float) -> bool:
    """Whether the desired policy has to be published (again); `now_s` is monotonic.

    A retained document may have been lost with the broker, so a new session sends once; a device that reports an older
    document than the desired one is sent it again. One that judged the desired document, either way, is left alone.
    """
    if desired is None:
        return False
    wanted = (desired.policy.epoch, desired.policy.version)
    if sent is None or (sent.epoch, sent.version) != wanted:
        return True
    return is_behind(desired, reported) and now_s - sent.at_s >= RESEND_AFTER_S


def is_behind(desired: Published, reported: Reported | None) -> bool:
    """Whether the device has not judged the desired document yet."""
    wanted = (desired.policy.epoch, desired.policy.version)
    return reported is None or (reported.epoch, reported.version) < wanted


class Coordinator:
    """Control handlers of one fleet on one channel. `state` names where this process is reached, now."""

    def __init__(
        self,
        channel: ControlChannel,
        registry: DeviceRegistry,
        publisher: Publisher,
        state: Callable[[], CoordinatorState],
        fleet: str,
        *,
        clock: Clock,
        wall: WallClock,
        emit: Emit,
    ) -> None:
        self._channel = channel
        self._registry = registry
        self._publisher = publisher
        self._state = state
        self._fleet = fleet
        self._clock = clock
        self._wall = wall
        self._emit = emit
        self._sent: dict[str, Sent] = {}
        self._waiting: dict[str, None] = {}
        self._behind: set[str] = set()
        self._announce = True
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._undo: list[Unsubscribe] = []
        self._unwatch: Callable[[], None] | None = None
        self.broker_state: ControlState = "down"
        self.dropped = 0

    async def start(self) -> None:
        """Subscribe and begin publishing; returns at once when the broker is away."""
        handlers = {"state": self._presence, "profile": self._registration, "policy/reported": self._reported}
        for kind, handler in handlers.items():
            pattern = fleet_pattern(self._fleet, kind)  # type: ignore[arg-type]
            self._undo.append(await self._channel.subscribe(pattern, self._guarded(handler)))
        self._task = asyncio.create_task(self._publish_loop(), name="coordinator-publish")
        self._unwatch = self._channel.watch(self._on_state)

    async def stop(self) -> None:
        """Take the addresses back, so that nobody is sent to a coordinator that is gone, and leave."""
        if self._unwatch is not None:
            self._unwatch()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        for undo in self._undo:
            await undo()
        self._undo.clear()
        await self._channel.close(goodbye(self._fleet))

    def refresh(self, device_id: str | None = None) -> None:
        """Look again whether a device (None: every one) needs its policy."""
        names = [device_id] if device_id else self._registry.ids()
        for name in names[:MAX_WAITING]:
            self._waiting[name] = None
        self._wake.set()

    async def forget(self, device_id: str) -> None:
        """Clear what the broker retains of a device."""
        topics = Topics(self._fleet, device_id)
        for topic in (topics.state, topics.profile, topics.policy_desired, topics.policy_reported):
            await self._channel.publish(topic, b"", retain=True)
        self._sent.pop(device_id, None)
        self._behind.discard(device_id)

    def _on_state(self, state: ControlState) -> None:
        before, self.broker_state = self.broker_state, state
        if state != before:
            self._emit(LinkStateChanged(at_s=self._clock(), link="broker", state=state))
            (log.info if state == "up" else log.warning)("broker: %s", state)
        if state == "up":
            self._sent.clear()
            self._announce = True
            self.refresh()

    def _guarded(self, handle: Callable[[str, bytes], None]) -> Callable[[Delivery], None]:
        def take(delivery: Delivery) -> None:
            if not delivery.payload:
                return  # a cleared retained document
            try:
                handle(self._device(delivery), delivery.payload)
            except MidstreamError as err:
                self.dropped += 1
                log.warning("dropped a document on %s: %s", delivery.topic[:128], err)

        return take

    def _device(self, delivery: Delivery) -> str:
        if len(delivery.payload) > MAX_PAYLOAD_BYTES:
            raise ProtocolError(f"it has {len(delivery.payload)} bytes, at most {MAX_PAYLOAD_BYTES} are read")
        topic: ParsedTopic = parse(delivery.topic)
        if topic.fleet != self._fleet:
            raise ProtocolError(f"it belongs to fleet {topic.fleet!r}", field="fleet")
        return topic.device_id

    def _presence(self, device_id: str, payload: bytes) -> None:
        if device_id.startswith("_"):
            return  # our own retained addresses also match the pattern
        presence = _document(Presence, payload, PRESENCE_SCHEMA)
        if not self._registry.note_presence(device_id, presence, self._wall().unix_s):
            log.info("%s: a stale presence of epoch %d was dropped", device_id, presence.epoch)
        elif presence.s == "online":
            self.refresh(device_id)

    def _registration(self, device_id: str, payload: bytes) -> None:
        registration = _document(Registration, payload, REGISTRATION_SCHEMA)
        if registration.profile.device_id != device_id:
            raise ProtocolError("the profile is another device's", field="profile.device_id")
        if self._registry.note_registration(device_id, registration, self._wall().unix_s):
            log.info("%s registered (%s)", device_id, registration.version or "no version")
            self.refresh(device_id)

    def _reported(self, device_id: str, payload: bytes) -> None:
        reported = _document(Reported, payload, REPORTED_SCHEMA)
        self._registry.note_reported(device_id, reported, self._wall().unix_s)
        self._emit(
            PolicyJudged(at_s=self._clock(), version=reported.version, accepted=reported.accepted, code=reported.code)
        )
        self.refresh(device_id)

    async def _publish_loop(self) -> None:
        while True:
            try:
                async with asyncio.timeout(SWEEP_S):
                    await self._wake.wait()
            except TimeoutError:
                self._waiting |= dict.fromkeys(self._behind)
            self._wake.clear()
            if self.broker_state != "up":
                continue  # all of it is looked at again when the broker is back
            try:
                await self._publish_waiting()
            except MidstreamError as err:
                log.warning("cannot publish: %s", err)

    async def _publish_waiting(self) -> None:
        if self._announce:
            await self._channel.publish(coord_state(self._fleet), encode(self._state()), retain=True)
            self._announce = False
        while self._waiting:
            name = next(iter(self._waiting))
            del self._waiting[name]
            device = self._registry.device(name)
            if device is not None and not device.revoked:
                await self._send_desired(device)

    async def _send_desired(self, device: Device) -> None:
        desired = self._publisher.desired(device.labels)
        now_s = self._clock()
        if desired is None or not is_behind(desired, device.reported):
            self._behind.discard(device.device_id)
        else:
            self._behind.add(device.device_id)
        if desired is None or not must_send(desired, device.reported, self._sent.get(device.device_id), now_s):
            return
        topic = Topics(self._fleet, device.device_id).policy_desired
        await self._channel.publish(topic, desired.record.envelope, retain=True)
        self._sent[device.device_id] = Sent(desired.policy.epoch, desired.policy.version, now_s)
        log.info("policy version %d sent to %s", desired.policy.version, device.device_id)


def goodbye(fleet: str) -> Delivery:
    """Clears the retained addresses; also the will, for a coordinator that dies."""
    return Delivery(topic=coord_state(fleet), payload=b"", retained=True)


def _document(cls: type[T], payload: bytes, schema: str) -> T:
    found = decode(cls, payload, what=schema.partition("/")[0], max_bytes=MAX_PAYLOAD_BYTES)
    check_schema(getattr(found, "schema", ""), schema)
    return found

"""The only paho: one MQTT connection from dialling to its end, driven by the running event loop.

paho's reads, writes and callbacks run inside the loop; only the blocking connect (name, TCP, TLS) has a thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import ssl as ssl_module
import threading
from collections.abc import Callable
from typing import Any

from links.mqtt_settings import MqttSettings
from links.outbox import Queued
from links.port import ClockNotSet, Delivery
from links.session import Cause, Session
from links.spared_import import without
from links.tls import tls_error

with without("dns"):  # 6 MB, for brokers found by SRV records
    import paho.mqtt.client as paho
    from paho.mqtt.enums import CallbackAPIVersion
    from paho.mqtt.packettypes import PacketTypes
    from paho.mqtt.properties import Properties

log = logging.getLogger("midstream.links.mqtt")

_SETTLE_S = 5.0
"""Longest wait for a SUBACK before the channel is called up all the same."""
_TICK_S = 1.0

_PROTOCOL_REASONS = frozenset({"Unsupported protocol version"})
_REFUSED_REASONS = frozenset(
    {
        "Not authorized",
        "Bad user name or password",
        "Client identifier not valid",
        "Banned",
        "Bad authentication method",
    }
)
_TAKEN_OVER_REASONS = frozenset({"Session taken over"})


def _properties(packet: int) -> Properties:
    return Properties(packet)  # type: ignore[no-untyped-call]


class _Client(paho.Client):
    """paho's client, which would leave the socket of a failed TLS handshake open and look for a host name."""

    def _ssl_wrap_socket(self, tcp_sock: Any) -> ssl_module.SSLSocket:
        context = self._ssl_context
        assert context is not None
        wrapped = context.wrap_socket(tcp_sock, server_hostname=self._host, do_handshake_on_connect=False)
        try:
            wrapped.settimeout(self._connect_timeout)
            wrapped.do_handshake()
        except BaseException:
            wrapped.close()
            raise
        return wrapped


class Connection:
    """One paho client from dialling to its end, driven by the running event loop."""

    def __init__(
        self,
        settings: MqttSettings,
        session: Session,
        on_message: Callable[[Delivery], None],
        on_acknowledged: Callable[[int], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._settings = settings
        self._version = session.version
        self._welcome_s = settings.connect_s if session.proven else settings.welcome_s
        self._on_message = on_message
        self._on_acknowledged = on_acknowledged
        self.over: asyncio.Future[Cause] = self._loop.create_future()
        """Done when the connection has ended."""
        self._welcome: asyncio.Future[str | None] = self._loop.create_future()
        self._subscribing: dict[int, asyncio.Future[None]] = {}
        self._numbers: dict[int, int] = {}
        self._sent: set[int] = set()
        self._socket: Any = None
        self._descriptor = -1
        self._writing = False
        self._timer: asyncio.TimerHandle | None = None
        self.beats = 0
        """Moves every second while this connection is being looked after."""
        self._client = self._make_client()

    @property
    def in_flight(self) -> int:
        return len(self._numbers)

    def has_sent(self, number: int) -> bool:
        return number in self._sent

    async def dial(self) -> Cause | None:
        """None once the broker has said welcome, else why not."""
        try:
            await self._connect()
            self._attach()
        except (ssl_module.SSLError, ssl_module.CertificateError) as err:
            error = tls_error(f"{self._settings.host}:{self._settings.port}", err)
            log.warning("%s", error)
            return "clock" if isinstance(error, ClockNotSet) else "identity"
        except OSError as err:
            log.debug("cannot reach the broker: %s", err)
            return "network"
        try:
            async with asyncio.timeout(self._welcome_s):
                refusal = await self._welcome
        except TimeoutError:
            return "silent"
        return None if refusal is None else self._cause_of(refusal)

    async def subscribe(self, patterns: list[str]) -> None:
        """Waits for the SUBACK, not longer than five seconds and not after the connection's end."""
        result, mid = self._client.subscribe([(pattern, 1) for pattern in patterns])
        if result != paho.MQTT_ERR_SUCCESS or mid is None:
            return
        acknowledged = self._subscribing[mid] = self._loop.create_future()
        self._flush()
        waits: set[asyncio.Future[Any]] = {acknowledged, self.over}
        await asyncio.wait(waits, timeout=_SETTLE_S, return_when=asyncio.FIRST_COMPLETED)
        self._subscribing.pop(mid, None)

    def unsubscribe(self, patterns: list[str]) -> None:
        self._client.unsubscribe(patterns)
        self._flush()

    def publish(self, message: Queued, expires_in_s: float | None) -> None:
        """Hand one message to paho (QoS 1)."""
        properties = None
        if self._version == 5 and expires_in_s is not None:
            properties = _properties(PacketTypes.PUBLISH)
            properties.MessageExpiryInterval = max(1, math.ceil(expires_in_s))
        info = self._client.publish(message.topic, message.payload, 1, message.retain, properties)
        if info.rc == paho.MQTT_ERR_SUCCESS:
            self._numbers[info.mid] = message.number
            self._sent.add(message.number)
        self._flush()

    async def all_acknowledged(self) -> None:
        """Waits until nothing is in flight or the connection has ended."""
        while self._numbers and not self.over.done():
            await asyncio.sleep(0.01)

    def disconnect(self) -> None:
        """Say goodbye: the broker then drops the will."""
        self._client.disconnect()
        self._flush()

    def drop(self) -> None:
        """Close the socket without a word and stop listening to it."""
        self._detach()
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.close()
            self._socket = None
        self._end("network")

    def _make_client(self) -> paho.Client:
        settings, five = self._settings, self._version == 5
        client = _Client(
            CallbackAPIVersion.VERSION2,
            client_id=settings.client_id,
            clean_session=None if five else False,
            protocol=paho.MQTTv5 if five else paho.MQTTv311,
            reconnect_on_failure=False,
        )
        client.connect_timeout = settings.connect_s
        client.max_inflight_messages_set(20)
        if settings.username is not None:
            client.username_pw_set(settings.username, settings.password)
        if settings.ssl is not None:
            client.tls_set_context(settings.ssl)
            # paho would look for a host name that our fleet's certificates do not carry.
            client.tls_insecure_set(not settings.ssl.check_hostname)
        if settings.will is not None:
            properties = None
            if five and settings.will_delay_s > 0:
                properties = _properties(PacketTypes.WILLMESSAGE)
                properties.WillDelayInterval = round(settings.will_delay_s)
            will = settings.will
            client.will_set(will.topic, will.payload, 1, will.retained, properties)
        client.on_connect = self._guarded(self._paho_connect)
        client.on_disconnect = self._guarded(self._paho_disconnect)
        client.on_message = self._guarded(self._paho_message)
        client.on_publish = self._guarded(self._paho_publish)
        client.on_subscribe = self._guarded(self._paho_subscribe)
        client.on_socket_close = self._guarded(self._paho_socket_close)
        return client

    async def _connect(self) -> None:
        """TCP, TLS and the CONNECT packet, in a daemon thread; its socket is closed if nobody waits for it any more."""
        settings, client, loop = self._settings, self._client, self._loop
        done: asyncio.Future[None] = loop.create_future()
        given_up, finished = threading.Event(), threading.Event()

        def close_if_unwanted() -> None:
            """Both sides call it after setting their event, so that whoever comes second closes the socket."""
            socket = client.socket()
            if given_up.is_set() and finished.is_set() and socket is not None:
                socket.close()

        def settle(error: BaseException | None) -> None:
            if done.cancelled():
                return
            if error is None:
                done.set_result(None)
            else:
                done.set_exception(error)

        def work() -> None:
            error: BaseException | None = None
            try:
                client.connect(
                    settings.host,
                    settings.port,
                    settings.keepalive_s,
                    clean_start=False if self._version == 5 else paho.MQTT_CLEAN_START_FIRST_ONLY,
                    properties=self._connect_properties(),
                )
            except Exception as err:  # noqa: BLE001 - carried over to the waiting coroutine, which sorts it
                error = err
            finished.set()
            close_if_unwanted()
            with contextlib.suppress(RuntimeError):  # the loop is gone: nobody is left to tell
                loop.call_soon_threadsafe(settle, error)

        threading.Thread(target=work, name="mqtt connect", daemon=True).start()
        try:
            await done
        except asyncio.CancelledError:
            given_up.set()
            close_if_unwanted()
            raise

    def _connect_properties(self) -> Properties | None:
        if self._version != 5:
            return None
        properties = _properties(PacketTypes.CONNECT)
        properties.SessionExpiryInterval = self._settings.session_expiry_s
        # Topic and headers come on top of the payload.
        properties.MaximumPacketSize = self._settings.max_payload_bytes + 2048
        return properties

    def _attach(self) -> None:
        self._socket = self._client.socket()
        if self._socket is None:
            raise ConnectionError("the broker closed the connection at once")
        self._descriptor = self._socket.fileno()
        self._loop.add_reader(self._descriptor, self._readable)
        self._flush()
        self._tick()

    def _detach(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._descriptor >= 0:
            self._loop.remove_reader(self._descriptor)
            self._loop.remove_writer(self._descriptor)
            self._descriptor = -1
            self._writing = False

    def _readable(self) -> None:
        def read() -> None:
            self._client.loop_read()
            # TLS may have decrypted more than select can see.
            while self._descriptor >= 0 and getattr(self._socket, "pending", int)() > 0:
                self._client.loop_read()

        self._drive(read)

    def _writable(self) -> None:
        self._drive(lambda: self._client.loop_write())

    def _tick(self) -> None:
        self._timer = self._loop.call_later(_TICK_S, self._tick)
        self.beats += 1
        self._drive(lambda: self._client.loop_misc())

    def _drive(self, work: Callable[[], object]) -> None:
        try:
            work()
        except Exception as err:  # noqa: BLE001 - whatever paho raises, the connection is over and is dialled again
            log.warning("the MQTT connection failed: %s", err)
            self._end("network")
            return
        self._flush()

    def _flush(self) -> None:
        """Watch for room to write exactly while paho has something to write."""
        if self._descriptor < 0:
            return
        wanted = self._client.want_write()
        if wanted and not self._writing:
            self._loop.add_writer(self._descriptor, self._writable)
        elif not wanted and self._writing:
            self._loop.remove_writer(self._descriptor)
        self._writing = wanted

    def _end(self, cause: Cause) -> None:
        if not self.over.done():
            self.over.set_result(cause)
        if not self._welcome.done():
            self._welcome.set_result("Unspecified error")

    def _guarded(self, callback: Callable[..., None]) -> Callable[..., None]:
        def call(*args: Any) -> None:
            try:
                callback(*args)
            except Exception:
                log.exception("an MQTT callback failed")

        return call

    def _paho_connect(self, client: Any, data: Any, flags: Any, reason: Any, properties: Any) -> None:
        if not self._welcome.done():
            self._welcome.set_result(reason.getName() if reason.is_failure else None)

    def _paho_disconnect(self, client: Any, data: Any, flags: Any, reason: Any, properties: Any) -> None:
        # During dialling this runs in the connecting thread.
        cause: Cause = "taken_over" if reason.getName() in _TAKEN_OVER_REASONS else "network"
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._end, cause)

    def _paho_message(self, client: Any, data: Any, message: Any) -> None:
        self._on_message(Delivery(message.topic, bytes(message.payload), bool(message.retain)))

    def _paho_publish(self, client: Any, data: Any, mid: int, reason: Any, properties: Any) -> None:
        number = self._numbers.pop(mid, None)
        if number is None:
            return
        if reason is not None and reason.is_failure:
            log.warning("the broker refused message %d: %s", number, reason.getName())
        self._on_acknowledged(number)

    def _paho_subscribe(self, client: Any, data: Any, mid: int, reasons: Any, properties: Any) -> None:
        refused = [reason.getName() for reason in reasons if reason.is_failure]
        if refused:
            log.warning("the broker refused a subscription: %s", ", ".join(refused))
        waiting = self._subscribing.get(mid)
        if waiting is not None and not waiting.done():
            waiting.set_result(None)

    def _paho_socket_close(self, client: Any, data: Any, socket: Any) -> None:
        if socket is self._socket:
            self._detach()
            self._socket = None

    def _cause_of(self, refusal: str) -> Cause:
        if refusal in _PROTOCOL_REASONS:
            return "protocol"
        log.warning("the broker at %s:%d refuses us: %s", self._settings.host, self._settings.port, refusal)
        return "refused" if refusal in _REFUSED_REASONS else "network"

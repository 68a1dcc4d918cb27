"""The embedded MQTT broker (amqtt, 3.1.1) behind a gate of our own: TLS with a client certificate of the fleet.

Made for one machine, demos and tests: retained messages and sessions live in memory and its queues are not bounded.
A fleet uses mosquitto or a cluster (cloud_stub.mosquitto). This is the room's only use of amqtt.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cloud_stub.broker_gate import (
    CONNECT_BYTE,
    MAX_CONNECT_BYTES,
    MAX_PACKET_BYTES,
    NOT_AUTHORISED_V4,
    Connect,
    Refused,
    device_of,
    judge,
    may_publish,
    may_read,
    parse_connect,
    publish_topic,
    remaining_length,
    without_keepalive,
)
from protocol.errors import ConfigError, ProtocolError
from protocol.extras import install_step

log = logging.getLogger("midstream.coordinator.broker")

MAX_CONNECTIONS = 1_000
CONNECT_WAIT_S = 10.0
HANDSHAKE_WAIT_S = 10.0
CLOSE_WAIT_S = 2.0
HANDSHAKE_GRACE_S = 0.05
SESSION_KEPT_S = 86_400
SILENCE_CHECK_S = 1.0
_LISTENER = "default"


@dataclass
class _AccessSettings:
    """amqtt fills this from the plug-in's section; it wants a dataclass."""

    fleet: str = "default"


def __getattr__(name: str) -> Any:
    """AccessPlugin is loaded by amqtt under its dotted name and needs amqtt's base classes, so it is made on demand."""
    if name == "AccessPlugin":
        return _access_plugin()
    raise AttributeError(name)


def _access_plugin() -> type[Any]:
    from amqtt.contexts import Action
    from amqtt.plugins.base import BaseAuthPlugin, BaseTopicPlugin

    class AccessPlugin(BaseAuthPlugin, BaseTopicPlugin):  # type: ignore[misc]
        """Topic rules per device. Identity was settled by the gate, so every session here is authentic."""

        Config = _AccessSettings

        async def authenticate(self, *, session: Any) -> bool:
            return True

        async def topic_filtering(self, *, session: Any = None, topic: Any = None, action: Any = None) -> bool:
            name, fleet = device_of(session.client_id or ""), self.config.fleet
            if action == Action.PUBLISH:
                return may_publish(name, fleet, topic or "")
            return may_read(name, fleet, topic or "")

    return AccessPlugin


class EmbeddedBroker:
    """A running broker. `port` is the real one when 0 was asked for."""

    def __init__(self, fleet: str, allowed: Callable[[str, bytes | None], bool]) -> None:
        self._fleet = fleet
        self._allowed = allowed
        self._broker: Any = None
        self._server: asyncio.Server | None = None
        self._open: dict[asyncio.StreamWriter, asyncio.Task[None] | None] = {}
        self._names: dict[asyncio.StreamWriter, str] = {}
        self._closing = False
        self.port = 0

    @property
    def connections(self) -> int:
        return len(self._open)

    async def start(self, host: str, port: int, server_file: Path, roots_file: Path) -> None:
        """Listen with TLS. Raises ConfigError: port taken, amqtt missing."""
        self._broker = _new_broker(self._fleet)
        await self._broker.start()
        try:
            self._server = await asyncio.start_server(
                self._accept, host, port, ssl=_context(server_file, roots_file), ssl_handshake_timeout=HANDSHAKE_WAIT_S
            )
        except OSError as err:
            await self._broker.shutdown()
            raise _cannot_listen(host, port, err) from err
        self.port = self._server.sockets[0].getsockname()[1]

    def end_sessions(self, name: str) -> None:
        """Break what a device has open; it is judged anew when it comes back."""
        for writer in [writer for writer, found in self._names.items() if found == name]:
            writer.transport.abort()

    async def close(self) -> None:
        """End every session (their wills are not sent: the broker itself goes)."""
        if self._server is None:
            return
        self._closing = True
        self._server.close()
        tasks = [task for task in self._open.values() if task is not None]
        for writer in list(self._open):
            writer.transport.abort()
        if tasks:
            await asyncio.wait(tasks, timeout=CLOSE_WAIT_S)
        await self._broker.shutdown()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        # Handshakes under way have no protocol yet that could be told; they see their client go, or time out.
        await asyncio.sleep(HANDSHAKE_GRACE_S)
        self._server = None

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._closing or len(self._open) >= MAX_CONNECTIONS:
            writer.transport.abort()
            return
        self._open[writer] = asyncio.current_task()
        try:
            await self._admit(reader, writer)
        except (ProtocolError, OSError, EOFError, TimeoutError) as err:
            log.info("a connection ended: %s", err or type(err).__name__)
        finally:
            self._open.pop(writer, None)
            self._names.pop(writer, None)
            writer.transport.abort()

    async def _admit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        name = self._names[writer] = _certificate_name(writer)
        async with asyncio.timeout(CONNECT_WAIT_S):
            packet = await _read_connect(reader)
        connect = parse_connect(packet)
        refused = judge(connect, name, self._fleet)
        if refused is None and not self._allowed(name, _certificate_der(writer)):
            refused = Refused(NOT_AUTHORISED_V4, "it was revoked or forgotten, or the id has another key now")
        if refused is not None:
            # Every MQTT 5 client begins like this and then steps down: no news.
            log.log(logging.DEBUG if connect.level == 5 else logging.INFO, "%s refused: %s", name, refused.reason)
            writer.write(refused.answer)
            await writer.drain()
            return
        await self._serve(name, connect, packet, reader, writer)

    async def _serve(
        self, name: str, connect: Connect, packet: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        gate_reader = _reader_class()(without_keepalive(packet, connect), reader, writer.transport.abort)
        gate_writer = _writer_class()(writer, name, self._fleet)
        watch = asyncio.create_task(_end_silence(gate_reader, writer, connect.keepalive_s))
        try:
            await self._broker.external_connected(gate_reader, gate_writer, _LISTENER)
        finally:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)


def tame_logs() -> None:
    """amqtt and its state machine narrate every packet; only what an operator can act on is kept."""
    logging.getLogger("amqtt").setLevel(logging.CRITICAL)
    logging.getLogger("transitions").setLevel(logging.ERROR)


def _new_broker(fleet: str) -> Any:
    try:
        from amqtt.broker import Broker
    except ImportError as err:
        raise ConfigError(
            "the embedded broker needs amqtt",
            next_step=f"{install_step('coordinator')}, or name a broker with --broker mqtts://HOST:PORT",
            field="broker",
        ) from err
    tame_logs()
    settings = {
        "listeners": {_LISTENER: {"type": "external"}},
        "session_expiry_interval": SESSION_KEPT_S,
        "plugins": {"cloud_stub.broker.AccessPlugin": {"fleet": fleet}},
    }
    return Broker(settings)


def _context(server_file: Path, roots_file: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(str(server_file))
    context.load_verify_locations(cafile=str(roots_file))
    return context


def _cannot_listen(host: str, port: int, err: OSError) -> ConfigError:
    if err.errno == errno.EADDRINUSE:
        return ConfigError(
            f"port {port} on {host} is already in use, the broker cannot listen",
            next_step="stop the other broker, choose --broker-port, or use it with --broker mqtts://HOST:PORT",
            field="broker_port",
        )
    return ConfigError(
        f"the broker cannot listen on {host} port {port}: {err.strerror or err}",
        next_step="choose an address of this machine and a port that you may use",
        field="broker_port",
    )


def _certificate_name(writer: asyncio.StreamWriter) -> str:
    certificate = writer.get_extra_info("peercert") or {}
    for rdn in certificate.get("subject", ()):
        for key, value in rdn:
            if key == "commonName":
                return str(value)
    raise ProtocolError("the client certificate has no name", field="certificate")


def _certificate_der(writer: asyncio.StreamWriter) -> bytes | None:
    tls = writer.get_extra_info("ssl_object")
    return tls.getpeercert(binary_form=True) if tls is not None else None


async def _read_connect(reader: asyncio.StreamReader) -> bytes:
    """The bytes of the first packet, bounded."""
    head = bytearray(await reader.readexactly(2))
    if head[0] != CONNECT_BYTE:
        raise ProtocolError("the first packet is not a CONNECT", field="packet")
    while (length := remaining_length(bytes(head[1:]))) is None:
        head += await reader.readexactly(1)
    if length[0] > MAX_CONNECT_BYTES:
        raise ProtocolError(f"a CONNECT of {length[0]} bytes; at most {MAX_CONNECT_BYTES} are taken", field="packet")
    return bytes(head) + await reader.readexactly(length[0])


async def _end_silence(reader: Any, writer: asyncio.StreamWriter, keepalive_s: int) -> None:
    """Break a connection that said nothing for one and a half keep-alives, so that its will is sent."""
    if keepalive_s <= 0:
        return
    while time.monotonic() - reader.heard_s <= 1.5 * keepalive_s:
        await asyncio.sleep(min(SILENCE_CHECK_S, keepalive_s / 4))
    log.info("a client was silent for %.0f s", 1.5 * keepalive_s)
    writer.transport.abort()


def _reader_class() -> type[Any]:
    from amqtt.adapters import ReaderAdapter

    class GateReader(ReaderAdapter):  # type: ignore[misc]
        """Gives the CONNECT again, then the stream; breaks the connection of a packet over the bound."""

        def __init__(self, first: bytes, stream: asyncio.StreamReader, abort: Callable[[], None]) -> None:
            self._first = first
            self._stream = stream
            self._abort = abort
            self.heard_s = time.monotonic()

        async def read(self, n: int = -1) -> bytes:
            if n > MAX_PACKET_BYTES:
                self._abort()
                raise asyncio.IncompleteReadError(b"", n)
            if self._first:
                taken, self._first = self._first[:n], self._first[n:]
                return taken
            data = await self._stream.readexactly(n)
            self.heard_s = time.monotonic()
            return data

        def feed_eof(self) -> None:
            with contextlib.suppress(AssertionError):  # already closed by the transport
                self._stream.feed_eof()

    return GateReader


def _writer_class() -> type[Any]:
    from amqtt.adapters import StreamWriterAdapter

    class GateWriter(StreamWriterAdapter):  # type: ignore[misc]
        """Drops QoS 0 messages that the device may not read: the broker re-sends all retained ones to a session."""

        def __init__(self, writer: asyncio.StreamWriter, name: str, fleet: str) -> None:
            super().__init__(writer)
            self._name = name
            self._fleet = fleet

        def write(self, data: bytes) -> None:
            found = publish_topic(bytes(data))
            if found is not None and found[1] == 0 and not may_read(self._name, self._fleet, found[0]):
                return
            super().write(data)

    return GateWriter

"""Composition of the control side: identity, discovery, control sessions, policy. No logic beyond wiring."""

from __future__ import annotations

import asyncio
import logging
import random
import ssl
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Literal

from attrs import define, evolve, field

from agent.cloud_link import CloudLink
from agent.config import AgentConfig
from agent.connecting import REFUSED_STEP, Connector, ConnectorPorts, Pauses
from agent.control import Control, ControlPorts, will
from agent.device_key import certificate_end_s
from agent.discovery import ATTEMPT_TIMEOUT_S, Candidate, Source
from agent.doctor import Checker, Finding
from agent.enrolment import Joined, enrolled_by, join, join_or_renew, other_fleet, used
from agent.epoch import next_epoch
from agent.health import Health
from agent.host import Host
from agent.identity import Enrolment, IdentityStore
from agent.last_good import LastGood
from agent.policy import PolicyHolder
from agent.registration import Registrar
from agent.supervisor import LifeKeeper
from links.http import HttpLink
from links.mqtt_settings import MqttPace, MqttSettings
from links.port import Delivery, Found, Reply
from links.tls import client_context, fingerprint
from links.transfer_log import Sink
from netprobe.probe import UnderWay
from protocol.clock import Clock, WallClock
from protocol.decode import check_schema, decode
from protocol.documents import INFO_SCHEMA, CoordinatorInfo, CoordinatorState
from protocol.errors import LinkError, MidstreamError, NotAllowed
from protocol.events import Emit
from protocol.pulse import Pulse
from protocol.topics import MAX_PAYLOAD_BYTES, Topics
from protocol.trust import JoinToken, decode_join

if TYPE_CHECKING:
    from links.mqtt import MqttChannel

log = logging.getLogger("midstream.agent")

SERVICE_TYPE = "_midstream._tcp"
# Answers come within a second or two from an idle host; a Pi that is loading a model takes longer.
BROWSE_S = 4.0
# By convention; for a broker that this device's own configuration names. Others are told by the coordinator.
PLAIN_MQTT_PORT = 1883
SESSION_EXPIRY_S = 86_400
RENEW_DAYS = 60
JOIN_LOOK_S = 2.0
INFO_PATH = "/midstream/v1/info"
MAX_INFO_BYTES = 16 << 10


async def join_fleet(config: AgentConfig, token_text: str, *, replace: bool = False) -> Joined:
    """Use a join token: enrol, renew, or with `replace` move to another coordinator's fleet."""
    import socket

    token = decode_join(token_text)
    store = IdentityStore(config.identity_dir)
    device_id = store.device_id(config.device_id, socket.gethostname())
    return await join_or_renew(store, device_id, token, replace=replace)


def identity_context(store: IdentityStore, enrolment: Enrolment) -> ssl.SSLContext:
    """TLS as this device: trusts the fleet's CA alone, shows the device's certificate."""
    with store.key.file() as key_path:
        return client_context(enrolment.ca_pem, store.cert_path, key_path)


def url_of(host: str, port: int) -> str:
    """https URL of an address; IPv6 gets its brackets."""
    return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"


@define(kw_only=True, eq=False)
class ControlSide:
    """Everything the connected track needs, and the track itself (`run`)."""

    config: AgentConfig
    store: IdentityStore
    device_id: str
    boot: str
    cloud: CloudLink
    sink: Sink
    emit: Emit
    on_link: Callable[[str, str, int, UnderWay], None]
    keys: dict[str, bytes]
    labels: dict[str, str]
    holder: PolicyHolder
    registrar: Registrar
    life: LifeKeeper
    health: Health
    clock: Clock
    wall: WallClock
    on_signal: Callable[[Delivery], None]
    host: Host | None = None
    connector: Connector | None = field(default=None, init=False)
    enrolment: Enrolment | None = field(default=None, init=False)
    context: ssl.SSLContext | None = field(default=None, init=False)
    told_version: Literal[4, 5] | None = field(default=None, init=False)
    channel: MqttChannel | None = field(default=None, init=False)
    told_webrtc: bool = field(default=False, init=False)
    """Whether the coordinator says that it answers offers."""

    def open_identity(self) -> None:
        """Take up an enrolment that is on disk: trust its policy keys and the policy kept under them."""
        self._take(self.store.enrolment())

    async def run(self) -> None:
        """Join if there is a token, then stay connected; a device that has not joined serves alone until it has."""
        if self.config.join_token:
            await self._join(decode_join(self.config.join_token))
        elif self.enrolment is None:
            self.health.warn(
                "fleet", "this device has not joined a fleet", "`midstream join TOKEN` to use a coordinator"
            )
        enrolment = self.enrolment or await self._joined_by_another()
        self.context = identity_context(self.store, enrolment)
        self.connector = Connector(enrolment, self._ports(enrolment))
        await self.connector.run()

    async def _joined_by_another(self) -> Enrolment:
        """Wait until another process (`midstream join`) has left an enrolment; the disk is only looked at till then."""
        while True:
            await asyncio.sleep(JOIN_LOOK_S)
            if not self.store.has_enrolment:
                continue
            await asyncio.sleep(JOIN_LOOK_S)  # that process writes its certificate after the enrolment
            try:
                found = self.store.enrolment()
            except (MidstreamError, OSError) as err:
                self.health.warn("fleet", f"the enrolment cannot be used: {err}", "`midstream join` as this user")
                continue
            if found is not None and found.device_id == self.device_id:
                self._take(found)
                self.health.clear("fleet")
                return found
            if found is not None:
                joined_as = f"this device joined as {found.device_id!r} and runs as {self.device_id!r}"
                self.health.warn("fleet", joined_as, "restart the agent")

    @property
    def control(self) -> Control | None:
        """The control session in use."""
        session = self.connector.session if self.connector else None
        return session if isinstance(session, Control) else None

    def pulses(self) -> tuple[Pulse, ...]:
        """Signs of life of the control channel in use; from any thread."""
        channel = self.channel
        return () if channel is None else channel.pulses()

    def sleep(self) -> None:
        """Let the end of the present session tell the fleet that this device sleeps."""
        if self.connector is not None:
            self.connector.goodbye = "sleeping"

    async def _join(self, token: JoinToken) -> None:
        if self.enrolment is not None:
            await self._renew(self.enrolment, token)
            return
        pauses = Pauses()
        pause_s = pauses.first_s
        while not enrolled_by(self.enrolment, token):
            try:
                self._take(await join(self.store, self.device_id, token))
                self.health.clear("fleet")
            except LinkError as err:
                self.health.warn("fleet", f"cannot join yet: {err.message}", err.next_step)
                await asyncio.sleep(random.uniform(0.5, 1.0) * pause_s)
                pause_s = min(pauses.longest_s, pause_s * 2)
            except MidstreamError as err:
                self.health.warn("fleet", f"cannot join: {err.message}", err.next_step)
                return

    async def _renew(self, present: Enrolment, token: JoinToken) -> None:
        """A token that stays in the configuration is used once; the present enrolment outlives one that is refused."""
        try:
            if not enrolled_by(present, token):
                raise other_fleet(present)
            if present.joined_with and not used(present, token):
                self._take(await join(self.store, self.device_id, token))
                log.info("the device's certificate was renewed")
        except MidstreamError as err:
            self.health.warn("join", f"the join string was not used: {err.message}", err.next_step)

    def _take(self, enrolment: Enrolment | None) -> None:
        self.enrolment = enrolment
        if enrolment is not None:
            self.keys.clear()
            self.keys.update(enrolment.policy_keys)
            self.labels["fleet"] = enrolment.fleet
            self.holder.load()

    def _ports(self, enrolment: Enrolment) -> ConnectorPorts:
        config = self.config
        static = Candidate(*config.coordinator, "static") if config.coordinator else None
        return ConnectorPorts(
            check=self._check,
            sources=self._sources(enrolment),
            open_session=self._open_session,
            point_data=self._point_data,
            data=self.cloud,
            step=lambda event: self.life.step("connected", event),
            health=self.health,
            clock=self.clock,
            last_good=LastGood(config.state_dir / "last_good.json"),
            static=static,
            fixed_broker=config.broker,
            ask=self._ask,
            keep=self._keep,
            may_search=lambda: self.host is None or self.host.pace.may_dial,
        )

    def _sources(self, enrolment: Enrolment) -> Sequence[Source]:
        if not self.config.mdns:
            return ()
        if self.host is not None:
            host = self.host
            return (lambda: ours(host.browse(SERVICE_TYPE, BROWSE_S), enrolment),)
        return (lambda: browse(self.config.mdns_interfaces, enrolment),)

    async def _check(self, candidate: Candidate) -> None:
        reply = await self._get(candidate, "/healthz")
        if reply.status != 200:
            raise LinkError(f"it answered its health check with {reply.status}")

    async def _ask(self, found: Candidate) -> CoordinatorInfo | None:
        reply = await self._get(found, INFO_PATH)
        return told_by(reply)

    async def _get(self, candidate: Candidate, path: str) -> Reply:
        link = HttpLink(
            "coordinator", url_of(candidate.host, candidate.port), ssl=self.context, connect_s=ATTEMPT_TIMEOUT_S,
            max_reply_bytes=MAX_INFO_BYTES,
        )  # fmt: skip
        try:
            return await link.exchange(path, {}, b"", ATTEMPT_TIMEOUT_S, method="GET")
        finally:
            await link.close()

    def _keep(self, enrolment: Enrolment) -> None:
        """On disk only the broker changes: `midstream join` may have renewed the certificate meanwhile."""
        self.enrolment, self.told_version = enrolment, None
        try:
            stored = self.store.enrolment()
            if stored is not None and stored.ca_pem == enrolment.ca_pem:
                self.store.keep(
                    evolve(
                        stored, broker_host=enrolment.broker_host, broker_port=enrolment.broker_port,
                        broker_tls=enrolment.broker_tls, broker_version=enrolment.broker_version,
                    )
                )  # fmt: skip
        except MidstreamError as err:
            log.warning("where the broker is was not kept: %s", err)

    async def _point_data(self, found: Candidate) -> None:
        host, port = self.config.data_proxy or (found.host, found.port)
        link = HttpLink("cloud", url_of(host, port), ssl=self.context, sink=self.sink, clock=self.clock)
        await self.cloud.point_to(link)
        # Only now: transfers that the old link had to end are not the new one's.
        self.on_link(link.name, host, port, link.under_way)

    def _broker_tls(self, enrolment: Enrolment, port: int) -> bool:
        if self.config.broker_tls is not None:
            return self.config.broker_tls
        return port != PLAIN_MQTT_PORT if self.config.broker else enrolment.broker_tls

    def _broker_version(self, enrolment: Enrolment) -> Literal[4, 5]:
        """What to try first: the coordinator knows of its own broker only."""
        if self.config.broker:
            return 5
        return self.told_version or enrolment.broker_version

    def _on_coordinator(self, state: CoordinatorState) -> None:
        self.told_version = state.broker_version
        self.told_webrtc = state.webrtc
        if self.connector is not None:
            self.connector.on_coordinator(state)

    def _on_coordinator_gone(self) -> None:
        self.told_webrtc = False

    def _open_session(self, host: str, port: int) -> Control:
        # The MQTT library is not on the way to READY.
        from links.mqtt import MqttChannel

        assert self.enrolment is not None and self.connector is not None
        enrolment = self.enrolment
        topics = Topics(enrolment.fleet, self.device_id)
        epoch = next_epoch(self.config.state_dir / "epoch")
        settings = self._mqtt_settings(enrolment, host, port, will(topics, epoch, self.boot))
        self.channel = MqttChannel(settings, self.clock, random.Random(), self.emit)
        return Control(
            self.channel,
            topics,
            epoch=epoch,
            boot=self.boot,
            holder=self.holder,
            registrar=self.registrar,
            ports=ControlPorts(
                on_state=self.connector.on_state,
                on_coordinator=self._on_coordinator,
                on_deaf=self.connector.on_deaf,
                wall=self.wall,
                on_signal=self.on_signal,
                on_coordinator_gone=self._on_coordinator_gone,
            ),
        )

    def _mqtt_settings(self, enrolment: Enrolment, host: str, port: int, last_words: Delivery) -> MqttSettings:
        return MqttSettings(
            host=host,
            port=port,
            client_id=self.device_id,
            username=enrolment.mqtt_username,
            password=enrolment.mqtt_password,
            ssl=self.context if self._broker_tls(enrolment, port) else None,
            will=last_words,
            session_expiry_s=SESSION_EXPIRY_S,
            max_payload_bytes=MAX_PAYLOAD_BYTES,
            # What waits for one fleet must not be told to another.
            outbox_path=self.config.state_dir / f"outbox-{enrolment.fleet}.sqlite",
            version=self._broker_version(enrolment),
            pace=None if self.host is None else partial(_mqtt_pace, self.host),
        )


def _mqtt_pace(host: Host) -> MqttPace:
    """The host's pace in the channel's terms."""
    return MqttPace(host.pace.keepalive_s, host.pace.rules, host.pace.may_dial)


def told_by(reply: Reply) -> CoordinatorInfo | None:
    """What a coordinator says of its broker; None when it is of a release that says nothing, or not understood.

    Raises NotAllowed when it does not take us for a member.
    """
    if reply.status in (401, 403):
        raise NotAllowed("the coordinator refuses this device", next_step=REFUSED_STEP)
    if reply.status != 200:
        return None
    try:
        told = decode(CoordinatorInfo, reply.body, what="the coordinator's info")
        check_schema(told.schema, INFO_SCHEMA)
    except MidstreamError as err:
        log.warning("ignored: %s", err)
        return None
    return told if 0 < told.broker_port < 65536 else None


async def browse(interfaces: Sequence[str], enrolment: Enrolment) -> Sequence[Candidate]:
    """Coordinators of our fleet that answer by mDNS; all addresses of each. mDNS that cannot start finds nothing."""
    from links.mdns import ZeroconfBrowser

    browser = ZeroconfBrowser(interfaces)
    try:
        return await ours(browser.browse(SERVICE_TYPE, BROWSE_S), enrolment)
    finally:
        await browser.close()


async def ours(search: Awaitable[Sequence[Found]], enrolment: Enrolment) -> Sequence[Candidate]:
    """All addresses of what a search found of our fleet."""
    kept = [f for f in await search if _may_be_ours(f, enrolment.fleet, fingerprint(enrolment.ca_pem))]
    return [Candidate(address, f.port, "mdns", _broker_port(f.txt.get("bp"))) for f in kept for address in f.addresses]


def _may_be_ours(found: Found, fleet: str, ca_fingerprint: str) -> bool:
    """False for records that say they are another fleet's: trying them would be a waste, not a danger."""
    return found.txt.get("fl", fleet) == fleet and ca_fingerprint.startswith(found.txt.get("fp", "").lower())


def _broker_port(text: str | None) -> int | None:
    return int(text) if text and text.isdecimal() and 0 < int(text) < 65536 else None


def coordinator_checks(config: AgentConfig) -> list[tuple[str, Checker]]:
    """The doctor's checks of fleet membership and of the way to the coordinator."""
    return [("coordinator", lambda: _check_coordinator(config))]


def _check_coordinator(config: AgentConfig) -> Iterable[Finding]:
    store = IdentityStore(config.identity_dir)
    enrolment = store.enrolment()
    if enrolment is None:
        yield Finding("coordinator", "warning", "this device has not joined a fleet", "`midstream join TOKEN`")
        return
    left_days = (certificate_end_s(enrolment.cert_pem) - time.time()) / 86_400
    if left_days < RENEW_DAYS:
        text = (
            f"this device's certificate ends in {left_days:.0f} days" if left_days > 0 else "its certificate has ended"
        )
        yield Finding("coordinator", "warning", text, "`midstream join` with a new join string renews it")
    host, port = config.coordinator or (enrolment.coordinator_host, enrolment.coordinator_port)
    began_s = time.monotonic()
    try:
        asyncio.run(_reach(identity_context(store, enrolment), host, port))
    except MidstreamError as err:
        yield Finding("coordinator", "warning", err.message, err.next_step or "check that the coordinator runs")
        return
    took_ms = (time.monotonic() - began_s) * 1000
    yield Finding("coordinator", "ok", f"{host}:{port} answers with the fleet's identity in {took_ms:.0f} ms")


async def _reach(context: ssl.SSLContext, host: str, port: int) -> None:
    link = HttpLink("coordinator", url_of(host, port), ssl=context, connect_s=ATTEMPT_TIMEOUT_S)
    try:
        reply = await link.exchange("/healthz", {}, b"", ATTEMPT_TIMEOUT_S, method="GET")
    finally:
        await link.close()
    if reply.status != 200:
        raise LinkError(f"it answered its health check with {reply.status}", next_step="see the coordinator's log")

"""The whole coordinator from its configuration: builds the parts, starts them in order, stops them in reverse."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import ssl
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from cloud_stub.access import Check, OpenFrames, admin, error_response, fleet_member, observer, recorded
from cloud_stub.addresses import advertised, local_url_host
from cloud_stub.admin import ADMIN, AdminApi
from cloud_stub.advert import advertise, instance_name, txt_record
from cloud_stub.apps_admin import AppsApi
from cloud_stub.authority import OWN_NAME, Authority, ensure_certificates, open_authority, take_back_client_key
from cloud_stub.broker import EmbeddedBroker
from cloud_stub.certificates import DAY_S, key_of, read_roots
from cloud_stub.compose_providers import open_providers
from cloud_stub.compose_tails import tail_server
from cloud_stub.compose_webrtc import offers_webrtc, open_rendezvous
from cloud_stub.config import CoordinatorConfig
from cloud_stub.coordinator import Coordinator, goodbye
from cloud_stub.enrolment import EMBEDDED_BROKER_VERSION, BrokerAddress, Enrolment
from cloud_stub.http import Checks, assemble, most_connections, observer_routes, open_routes
from cloud_stub.join_secrets import JoinSecrets
from cloud_stub.publishing import Publisher
from cloud_stub.queue_watch import QueueWatch
from cloud_stub.registry import DeviceRegistry, OpenedRegistry, open_registry
from cloud_stub.rendezvous import Rendezvous
from cloud_stub.tails import ServedStore, TailHouse
from cloud_stub.tenants import TenantHouse
from cloud_stub.tenants_admin import TenantsApi
from cloud_stub.text import TextHouse, open_engines
from engines.catalogue import load_catalogue
from gateway.control_channel import ControlChannel
from gateway.memory import TextMemory
from gateway.request_log import RequestLog
from links.http_front import ServerLimits
from links.http_server import RunningServer, serve
from links.mdns import ZeroconfBrowser
from links.mqtt import MqttChannel
from links.mqtt_settings import MqttSettings
from links.otlp import open_spans
from links.port import Route
from links.tls import client_context, server_context
from profiles.idle import CpuIdle
from protocol.clock import WallClock, wall_now
from protocol.documents import CoordinatorInfo, CoordinatorState
from protocol.durable import remove_durable, write_durable
from protocol.errors import ConfigError
from protocol.exposition import Exposition
from protocol.fanout import Fanout
from protocol.policy_routing import ShadowRouting
from protocol.spans import SpanFold
from protocol.topics import MAX_PAYLOAD_BYTES
from protocol.trust import JoinToken, encode_join

log = logging.getLogger("midstream.coordinator")

RUN_FILE = "run.json"
CHECKPOINT_S = 60.0

Tell = Callable[[Mapping[str, Any]], None]
"""Takes one machine-readable record; never blocks."""


class CoordinatorHouse:
    """One coordinator. `start` and `stop` are symmetric; a start that fails leaves nothing running."""

    def __init__(self, config: CoordinatorConfig, tell: Tell = lambda _: None, wall: WallClock = wall_now) -> None:
        self.config = config
        self.metrics = Exposition()
        self.queues = QueueWatch(self.metrics, CpuIdle().ratio, time.monotonic)
        self._answered = Fanout([self.metrics])
        self.addresses: tuple[str, ...] = ()
        self.broker_port = 0
        self.port = 0
        self.notes: list[str] = []
        self._broker: EmbeddedBroker | None = None
        self._frames = OpenFrames()
        self._rendezvous: Rendezvous | None = None
        self._tell = tell
        self._wall = wall
        self._clock = time.monotonic
        self._stack = contextlib.AsyncExitStack()
        self._serving = False
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Raises ConfigError with the next step: a taken port, damaged roots, a missing package."""
        async with contextlib.AsyncExitStack() as stack:
            await self._open_state(stack)
            await self._open_broker(stack)
            await self._open_control(stack)
            self._open_ways(stack)
            await self._open_server(stack)
            stack.callback(self._forget_run)
            self._note_run()
            self._stack = stack.pop_all()
        self._serving = True
        self._start_background()

    async def stop(self) -> None:
        """Stop taking requests, let running ones end, say goodbye, close."""
        self._serving = False
        await self._stack.aclose()

    def join_string(self, life_s: float | None = None) -> str:
        """A fresh join string; its secret works once."""
        secret = self._secrets.mint(life_s or self.config.join_ttl_s, self._wall().unix_s)
        return encode_join(
            JoinToken(
                host=self.addresses[0],
                port=self.port,
                ca_fingerprint=self.authority.ca_fingerprint,
                policy_key=next(iter(self.authority.policy_keys.values())),
                secret=secret,
            )
        )

    async def _open_state(self, stack: contextlib.AsyncExitStack) -> None:
        config, now_s = self.config, self._wall().unix_s
        self.addresses = await asyncio.to_thread(advertised, config)
        self.authority: Authority = await asyncio.to_thread(open_authority, config.state_dir, config.fleet, now_s)
        stack.push(self._after_start)
        await asyncio.to_thread(ensure_certificates, self.authority, self.addresses, now_s)
        opened: OpenedRegistry = open_registry(config.state_dir / "registry.sqlite")
        stack.callback(opened.registry.close)
        self.registry: DeviceRegistry = opened.registry
        if opened.fresh and not self.authority.first_start:
            self.authority = self.authority.with_new_history(now_s)
            self.notes.append("the policy history begins anew")
        if opened.moved_to is not None:
            self.notes.append(f"the registry was damaged and moved to {opened.moved_to}; devices will register again")
        self.tenants = await asyncio.to_thread(TenantHouse, config, self.authority, self._wall, self.metrics)
        stack.push_async_callback(self.tenants.close)
        self._secrets = JoinSecrets(config.state_dir / "join.json", self._clock)
        self.publisher = Publisher(self.authority, self.registry, self._wall)

    def _after_start(self, failure: type[BaseException] | None, *_: object) -> None:
        """A start that failed showed nobody the client key that it made; `stop` comes here without a failure."""
        if failure is not None:
            take_back_client_key(self.authority)

    async def _open_broker(self, stack: contextlib.AsyncExitStack) -> None:
        url = self.config.broker_url
        if url is not None:
            self.broker_port = url.port
            return
        broker = self._broker = EmbeddedBroker(self.config.fleet, self._is_device)
        await broker.start(
            self.config.host, self.config.broker_port, self.authority.server_file, self.authority.roots_file
        )
        stack.push_async_callback(broker.close)
        self.broker_port = broker.port

    async def _open_control(self, stack: contextlib.AsyncExitStack) -> None:
        channel = MqttChannel(self._mqtt_settings(), self._clock, emit=self.metrics)
        self.coordinator = Coordinator(
            channel, self.registry, self.publisher, self.state, self.config.fleet,
            clock=self._clock, wall=self._wall, emit=self.metrics,
        )  # fmt: skip
        stack.push_async_callback(self.coordinator.stop)
        self._channel = channel

    def _mqtt_settings(self) -> MqttSettings:
        url, own = self.config.broker_url, self.authority.own_file
        ca_pem = self.authority.ca_pem
        if self.config.broker_ca is not None:
            ca_pem = read_roots(
                self.config.broker_ca, next_step="let it name a PEM file with the broker's CA", field="broker_ca"
            )
        return MqttSettings(
            host=url.host if url else local_url_host(self.config.host).strip("[]"),
            port=self.broker_port,
            client_id=OWN_NAME,
            ssl=client_context(ca_pem, own, own) if url is None or url.tls else None,
            will=goodbye(self.config.fleet),
            max_payload_bytes=MAX_PAYLOAD_BYTES,
            outbox_path=self.config.state_dir / "outbox.sqlite",
            version=5 if url else EMBEDDED_BROKER_VERSION,
        )

    def _open_ways(self, stack: contextlib.AsyncExitStack) -> None:
        config = self.config
        requests = RequestLog()
        stack.push_async_callback(asyncio.to_thread, requests.close)
        self._answered.add(requests)
        spans = open_spans(config.otel_endpoint, "midstream-coordinator", config.fleet, self._clock, self._wall)
        if spans is not None:
            stack.push_async_callback(asyncio.to_thread, spans.close)
            self._answered.add(SpanFold(spans, os.urandom))
        self.store = ServedStore(config.models_dir, load_catalogue(), self._wanted)
        engines, why = open_engines(config, self.store, self.queues)
        if why:
            self.notes.append(f"text is not served: {why}")
        self._memory = TextMemory(config.memory, config.state_dir / "text", self.store)
        if self._memory.why:
            self.notes.append(self._memory.why)
        shadow = ShadowRouting(share=config.shadow_share, usd_per_day=config.shadow_usd_per_day)
        self.text = TextHouse(engines, open_providers(config), shadow)
        stack.push_async_callback(self.text.close)
        self.tails = TailHouse(config, self.store, self.queues, self._on_bundle, tail_server(config))
        stack.push_async_callback(self.tails.close)
        self.notes += self._missing()

    async def _open_server(self, stack: contextlib.AsyncExitStack) -> None:
        tenants, tails = self.tenants, self.tails.mount
        channel = self.text.channel(tenants.keys, self._memory.results)
        text = self.text.front(self._answered, tenants, self._memory, channel)
        checks = Checks(
            fleet_member(self._is_device, tenants.keys), observer(self._is_device, tenants.keys), admin(tenants.keys)
        )
        served = assemble(
            open_routes(self._enrolment(), lambda: self._serving),
            observer_routes(self.status, self._render, self.info),
            self.tails.shelf.routes(),
            self._operators(channel, checks.operator),
            [text, tails],
            [self.text.handoff(checks.member, tenants, self._answered)],
            checks,
            self._frames,
        )
        await tenants.start()
        for way in (text, tails):
            await way.start()
            stack.push_async_callback(way.stop)
        files = self.authority.server_file, self.authority.server_file, self.authority.roots_file
        self._tls: ssl.SSLContext = server_context(*files, require_client=False)
        server: RunningServer = await serve(
            served.routes, served.frame_routes, host=self.config.host, port=self.config.port, ssl=self._tls,
            on_error=error_response, limits=ServerLimits(connections=most_connections()),
        )  # fmt: skip
        stack.push_async_callback(server.close)
        self.port = server.port
        await self.coordinator.start()
        stack.push_async_callback(self._end_tasks)
        if offers_webrtc(self.config):
            self._rendezvous = await open_rendezvous(
                self.config, self.authority, self._channel, served, self._is_device, self._wall
            )
            stack.push_async_callback(self._rendezvous.stop)

    def _enrolment(self) -> Enrolment:
        return Enrolment(self.authority, self._secrets, self.registry, self._broker_address, self._wall)

    def _operators(self, channel: ControlChannel, check: Check) -> list[Route]:
        """What an operator may call. What changes something is recorded; TenantsApi does it by itself."""
        tenants = self.tenants
        devices = AdminApi(
            self.registry, self.publisher, self.coordinator, self.join_string, self._end_sessions, self._wall
        )
        return [
            *recorded(devices.routes(), check, tenants.record),
            *TenantsApi(tenants.tenancy, tenants.ledger, self._wall, ADMIN).routes(),
            *recorded(AppsApi(channel, self._memory.results, ADMIN).routes(), check, tenants.record),
        ]

    def _start_background(self) -> None:
        """Nothing here is waited for by READY."""
        self._spawn(self.tails.prepare())
        if self.config.models or len(self.text.models) == 1:
            self._spawn(self.text.warm())
        self._spawn(self._keep_certificates())
        self._spawn(self._keep_registry())
        self._spawn(self.queues.run())
        if self.config.mdns:
            self._spawn(self._announce())

    async def _announce(self) -> None:
        browser = ZeroconfBrowser(self.config.interfaces)
        name = f"{self.authority.ca_fingerprint[:6]}-{self.port}"
        txt = txt_record(OWN_NAME, self.config.fleet, self.authority.ca_fingerprint, self.broker_port)
        try:
            await advertise(browser, instance_name(name, self.config.fleet), self.port, txt, self._on_announced)
            await asyncio.Event().wait()
        finally:
            await browser.close()

    async def _keep_certificates(self) -> None:
        """Renew in time, without a restart; new connections use the new certificate."""
        while True:
            await asyncio.sleep(DAY_S)
            try:
                changed = await asyncio.to_thread(
                    ensure_certificates, self.authority, self.addresses, self._wall().unix_s
                )
                if changed:
                    self._tls.load_cert_chain(str(self.authority.server_file))
                    log.info("the server certificate was renewed")
            except ConfigError as err:
                log.warning("cannot renew the certificates: %s", err)

    async def _keep_registry(self) -> None:
        """Bring what was written into the database's main file, where waiting for the disk holds nobody up."""
        while True:
            await asyncio.sleep(CHECKPOINT_S)
            try:
                await asyncio.to_thread(self.registry.checkpoint)
            except ConfigError as err:
                log.warning("%s", err)

    def state(self) -> CoordinatorState:
        """What the broker retains of us."""
        return CoordinatorState(
            addresses=self.addresses, port=self.port, broker_port=self.broker_port,
            fingerprint=self.authority.ca_fingerprint, epoch=self.authority.record.run,
            webrtc=offers_webrtc(self.config),
            broker_version=5 if self.config.broker_url else EMBEDDED_BROKER_VERSION,
        )  # fmt: skip

    def info(self) -> CoordinatorInfo:
        """For devices that joined when the broker was elsewhere."""
        broker = self._broker_address()
        return CoordinatorInfo(
            fleet=self.config.fleet, broker_host=broker.host, broker_port=broker.port, broker_tls=broker.tls,
            broker_version=broker.version,
        )  # fmt: skip

    def status(self) -> Mapping[str, Any]:
        """For members of the fleet: what is served and how it goes."""
        counts = self.registry.counts()
        return {
            "fleet": self.config.fleet,
            "serving": self._serving,
            "broker": self.coordinator.broker_state,
            "devices": counts.devices,
            "online": counts.online,
            "webrtc": self._rendezvous.visits if self._rendezvous is not None else None,
            "text_models": list(self.text.models),
            "bundles": dict(self.tails.cutter.state),
            "notes": [*self.notes, *self.queues.notes],
        }

    def _render(self) -> str:
        counts = self.registry.counts()
        self.metrics.set_gauge("midstream_devices", counts.devices, help="Devices in the registry.")
        self.metrics.set_gauge("midstream_devices_online", counts.online, help="Devices that are not offline.")
        dropped = self.coordinator.dropped + (self._rendezvous.dropped if self._rendezvous is not None else 0)
        self.metrics.set_gauge("midstream_documents_dropped", dropped, help="Documents of devices that were not valid.")
        return self.metrics.render()

    def _is_device(self, name: str, certificate_der: bytes | None) -> bool:
        """A certificate of the fleet's CA proves the name; whether it still holds is the registry's."""
        key_sha256 = key_of(certificate_der) if certificate_der is not None else None
        return name == OWN_NAME or self.registry.may_enter(name, key_sha256)

    async def _end_sessions(self, name: str) -> None:
        """Of a device that is no member any more."""
        if self._broker is not None:
            self._broker.end_sessions(name)
        await self.text.end(name)
        await self._frames.end(name)
        if self._rendezvous is not None:
            await self._rendezvous.end(name)

    def _wanted(self, name: str) -> bool:
        return not self.config.models or name in (*self.config.models, *self.config.bundles)

    def _missing(self) -> list[str]:
        here = {stored.entry.name for stored in self.store.list() if stored.path is not None}
        named = dict.fromkeys((*self.config.models, *self.config.bundles))
        return [f"model {name} is not here: midstream models pull {name}" for name in named if name not in here]

    def _broker_address(self) -> BrokerAddress:
        url = self.config.broker_url
        if url is None:
            return BrokerAddress(None, self.broker_port, version=EMBEDDED_BROKER_VERSION)
        return BrokerAddress(url.host, self.broker_port, tls=url.tls)

    def _on_bundle(self, model: str) -> None:
        self._tell({"event": "bundle", "model": model})

    def _on_announced(self, instance: str) -> None:
        self._tell({"event": "announced", "instance": instance})

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("a background task failed", exc_info=task.exception())

    async def _end_tasks(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _note_run(self) -> None:
        record = {"host": local_url_host(self.config.host), "port": self.port, "pid": os.getpid()}
        write_durable(self.config.state_dir / RUN_FILE, json.dumps(record).encode())

    def _forget_run(self) -> None:
        remove_durable(self.config.state_dir / RUN_FILE)

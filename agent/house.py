"""The whole agent, made from its configuration: every part is made and joined here, and nothing is decided."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import time
from collections.abc import Coroutine, Mapping, Sequence
from functools import partial
from typing import Any

from agent.apply import Queueing, set_log_level, set_wait_target
from agent.benchmark import Benchmark
from agent.cloud_link import CloudLink, EitherLink
from agent.compose_control import ControlSide
from agent.compose_tensor import TensorSide
from agent.compose_text import TextSide, text_mount
from agent.compose_webrtc import WebRtcSide
from agent.config import AgentConfig, PolicyBounds
from agent.console import Voice
from agent.device_class import DeviceClassing
from agent.gate import Gate
from agent.health import Health
from agent.host import Host
from agent.host_bridge import HostBridge
from agent.http import house_routes, serve_house
from agent.identity import IdentityStore
from agent.lifecycle import Track
from agent.link_memory import LinkMemory
from agent.pacing import Pace
from agent.policy import PolicyHolder, PolicyPorts
from agent.profiler import Profiler
from agent.queue_watch import QueueWatch
from agent.registration import Registrar, keep_registered
from agent.reload import Changes, take
from agent.service import status_line
from agent.status import Facts, document, measured
from agent.supervisor import LifeKeeper, Parts, Supervisor
from agent.telemetry import PERIOD_S, Counters, report
from agent.version import own_version
from engines.catalogue import load_catalogue
from engines.registry import ImportGuard, Unguarded, use_guard
from engines.store import ModelStore
from gateway.door_limits import DoorLimits
from gateway.memory import TextMemory
from gateway.providers import Providers
from gateway.request_log import RequestLog
from links.http_server import RunningServer
from links.otlp import open_spans
from links.port import Mount
from netprobe.probe import LinkProbe, UnderWay
from profiles.benchmark import Probe, decode_benchmark
from profiles.idle import CpuIdle
from profiles.rates import Slowdowns
from profiles.timing import memory_probe
from protocol.clock import wall_now
from protocol.device import Measured
from protocol.durable import read_durable
from protocol.errors import LinkError, MidstreamError
from protocol.exposition import Exposition
from protocol.fanout import Fanout
from protocol.pulse import Pulse
from protocol.spans import SpanFold

log = logging.getLogger("midstream.agent")

# Models come by a pull or with a new bundle: rare, and nobody waits for the new measurements.
MODELS_LOOK_S = 60.0
OFFERS_LOOK_S = 5.0
# Of a pause; an answer that is still being written then goes on, and its client may be frozen with us.
DRAIN_S = 5.0


class House:
    """A composed agent. `supervisor` starts and stops it. Raises ConfigError for state that cannot be used.

    bridge: to the program that this agent is a guest of; then it starts no child process, and its host stands in for
    what a guest cannot know or do.
    """

    def __init__(self, config: AgentConfig, console: Voice, bridge: HostBridge | None = None) -> None:
        self.config = config
        self.console = console
        self.clock = time.monotonic
        self.boot = secrets.token_hex(4)
        self._began_s = self.clock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._was_connected = False
        self._benchmark_path = config.state_dir / "benchmark.json"
        self._queueing: list[Queueing] = []
        self.life = LifeKeeper()
        self.health = Health(self.clock)
        self.metrics = Exposition()
        self.counters = Counters()
        self.queues = QueueWatch(self.health, self.metrics, CpuIdle().ratio, self.clock)
        self.emit = Fanout([self.metrics, self.counters, self.queues.depths, console.emit])
        self.host = Host(bridge, self.health, self._on_pace) if bridge is not None else None
        self.gate = Gate(self.host.hold_awake) if self.host is not None else Gate()
        self._pauses: set[str] = set()
        self._pausing = asyncio.Lock()
        use_guard(ImportGuard(config.state_dir / "engines.json") if self.host is None else Unguarded())
        store = ModelStore(config.models_dir, load_catalogue(config.models_dir / "catalogue.toml"))
        identity = IdentityStore(config.identity_dir, self.host.key(config.state_dir) if self.host else None)
        self.device_id = identity.device_id(config.device_id, socket.gethostname())
        self._tell_requests()
        keys: dict[str, bytes] = {}
        labels = self._labels = dict(config.labels)
        self.probe = LinkProbe(self.clock)
        self.links = LinkMemory(config.state_dir / "links.json", self.probe, self.clock, wall_now)
        self.slowdowns = Slowdowns()
        self.classing = DeviceClassing(lambda: self.tensors.digests(), slowed=config.slowdown > 1.0)
        self.cloud = CloudLink(self._on_trouble)
        self.webrtc = WebRtcSide(
            config, self.cloud, self.health, self.emit, lambda sample: self.tensors.sink(sample), self._lead,
            self._on_second_way, self.clock, wall_now,
        )  # fmt: skip
        self.far = EitherLink((self.cloud, self.webrtc.link))
        self.holder = PolicyHolder(config.state_dir / "policy.json", self._policy_ports(keys, labels))
        self.tensors = TensorSide(
            config, self.cloud, self.probe, self.holder.current, self.emit, self.health, slowdowns=self.slowdowns,
            look=self.links.look, second=self.webrtc.link, strategy=self.classing.strategy, host=self.host,
        )  # fmt: skip
        self.texts = TextSide(
            config, store, self.far, self.health, self.holder.current, self.emit, self._kept, self.slowdowns, self.host
        )
        self._queueing += [self.tensors, self.texts]
        self.profiler = Profiler(config, self.device_id, labels, self.life, self.health, self.host)
        self.control = self._control(identity, keys, labels)
        self.control.open_identity()
        self.webrtc.attach(self.control, self.device_id)
        self.ways = tuple(self.gate.before(way) for way in (self.tensors.mount, self._text_way(store)))
        self.life.listen(self._on_life)
        self.supervisor = Supervisor(self._parts())

    def _text_way(self, store: ModelStore) -> Mount:
        config, policy = self.config, self.holder.current
        memory = TextMemory(config.memory, config.state_dir / "text", store)
        limits = DoorLimits(config.state_dir, policy, self.emit, self.clock, wall_now)
        self.emit.add(limits.heard)
        return text_mount(self.texts, memory, limits, policy, self.emit, self.clock, self.health)

    def _tell_requests(self) -> None:
        """To the log, and to a collector of traces where there is one."""
        self._requests = RequestLog()
        self.emit.add(self._requests)
        self._spans = open_spans(self.config.otel_endpoint, "midstream-agent", self.device_id, self.clock, wall_now)
        if self._spans is not None:
            self.emit.add(SpanFold(self._spans, os.urandom))

    def tell_ready(self) -> None:
        """Say where the local API is."""
        self.console.say("ready", f"ready: {self.url}", port=self.supervisor.port, url=self.url)

    def pulses(self) -> tuple[Pulse, ...]:
        """Signs of life of the control channel and of all threads that compute; from any thread."""
        return (*self.control.pulses(), *self.tensors.pulses())

    def line(self) -> str:
        """The status in one line."""
        return status_line(self.status(), [*self.texts.loading(), *(() if self.tensors.begun else ("tensor models",))])

    def reconfigure(self, found: AgentConfig) -> Changes:
        """Put into force what a running agent can take of a configuration that was read anew."""
        self.config, changes = take(self, self.config, found)
        return changes

    def rebound(self, bounds: PolicyBounds) -> None:
        """Other local bounds over the policy; the coordinator is told what came of it."""
        self.holder.rebound(bounds)
        self._later(self._report_policy())

    def relabel(self, labels: Mapping[str, str]) -> None:
        """Other labels of this device: policies that select by them are judged by the new ones, and it registers."""
        fleet = {"fleet": self._labels["fleet"]} if "fleet" in self._labels else {}
        self._labels.clear()
        self._labels.update({**labels, **fleet})
        self._later(self._register())

    def reprovide(self, providers: Providers) -> None:
        """Take other providers, or other places of models."""
        self.texts.providers.configure(providers)

    @property
    def url(self) -> str:
        """Base URL of the local API."""
        host = f"[{self.config.host}]" if ":" in self.config.host else self.config.host
        return f"http://{host}:{self.supervisor.port}"

    def status(self) -> dict[str, Any]:
        """The status document."""
        connector, now_s = self.control.connector, self.clock()
        found = connector.found if connector else None
        broker = connector.broker if connector else None
        guest = {} if self.host is None else {"host": self.host.status(), "paused": sorted(self._pauses)}
        at_cloud = sorted(self.texts.cloud_models) if self.far.available else []
        facts = Facts(
            device_id=self.device_id,
            version=own_version(),
            uptime_s=now_s - self._began_s,
            url=self.url,
            life=self.life.life,
            fleet=self.control.enrolment.fleet if self.control.enrolment else None,
            where=f"{found.host}:{found.port}" if found else None,
            via=found.origin if found else None,
            broker=f"{broker[0]}:{broker[1]}" if broker else None,
            policy=self.holder.current(),
            profile=self.profiler.current(),
            tensor_models=self.tensors.models,
            text_model=next(iter((*self.texts.models, *at_cloud)), None),
            text_place="device" if self.texts.models else "cloud" if at_cloud else None,
            cloud_available=self.far.available,
            warnings=self.health.warnings,
            now_s=now_s,
            extra={**self.tensors.status(), "links": self._links_now(), "device_class": self.classing.status()} | guest,
        )
        return document(facts)

    def _links_now(self) -> dict[str, Any]:
        """Both ways to the coordinator, and what is known of each."""
        direct: dict[str, Any] = {"state": "up" if self.cloud.available else "down"}
        ways = {self.cloud.name: direct, self.webrtc.link.name: dict(self.webrtc.status())}
        return {name: way | measured(self.probe.view(name)) for name, way in ways.items()}

    def _policy_ports(self, keys: dict[str, bytes], labels: dict[str, str]) -> PolicyPorts:
        return PolicyPorts(
            keys=keys,
            labels=labels,
            bounds=self.config.bounds,
            wall=wall_now,
            clock=self.clock,
            emit=self.emit,
            actions={"log_level": set_log_level, "engines": set_wait_target(self._queueing)},
        )

    def _control(self, identity: IdentityStore, keys: dict[str, bytes], labels: dict[str, str]) -> ControlSide:
        return ControlSide(
            config=self.config,
            store=identity,
            device_id=self.device_id,
            boot=self.boot,
            cloud=self.cloud,
            sink=self.tensors.sink,
            emit=self.emit,
            on_link=self._lead,
            keys=keys,
            labels=labels,
            holder=self.holder,
            registrar=Registrar(self.profiler.current, lambda: self.models, own_version()),
            life=self.life,
            health=self.health,
            clock=self.clock,
            wall=wall_now,
            on_signal=self.webrtc.on_signal,
            host=self.host,
        )

    @property
    def paused(self) -> bool:
        """Whether requests are refused because the host paused the agent."""
        return not self.gate.open

    async def pause(self, *, drain: bool = True, why: str = "host") -> None:
        """Sleep: say so to the fleet, end the session and every track; idempotent.

        drain: also refuse requests, after those under way had DRAIN_S to end; without it, they are answered as before.
        why: each reason must be resumed.
        """
        async with self._pausing:
            self._pauses.add(why)
            if drain:
                self.gate.open = False
                self.life.step("serving", "pause")
                await self.gate.drained(DRAIN_S)
            if self.host is not None:
                self.host.hold_awake(True)
            try:
                self.control.sleep()
                await self.supervisor.pause()
                if drain:
                    await self.cloud.close()
            finally:
                if self.host is not None:
                    self.host.hold_awake(False)

    async def resume(self, *, why: str = "host") -> None:
        """Wake from a pause of the same reason; the tracks begin anew when no reason is left. Idempotent."""
        async with self._pausing:
            self._pauses.discard(why)
            if why == "host":
                self.gate.open = True
                self.life.step("serving", "resume")
            if not self._pauses:
                await self.supervisor.resume()

    @property
    def models(self) -> tuple[str, ...]:
        """Everything that this device serves by itself."""
        return (*self.tensors.models, *self.texts.models)

    def _parts(self) -> Parts:
        return Parts(
            life=self.life,
            health=self.health,
            open_server=self._open_server,
            ways=self.ways,
            tracks=(
                self.control.run,
                self.webrtc.run,
                self._measure,
                self._offer,
                self._report,
                self.links.run,
                self.queues.run,
            ),
            drain=self._drain,
            close=self._close,
            lasting=(self.host.run,) if self.host is not None else (),
        )

    async def _open_server(self) -> RunningServer:
        return await serve_house(self.config, house_routes(self.status, self.metrics.render), self.ways)

    async def _measure(self) -> None:
        """Facts, then measurements; again whenever other models came."""
        await self.profiler.collect()
        self.classing.know(self.profiler.facts)
        await self._register()
        if not self.config.benchmark:
            return
        await self.tensors.heads_ready(expected=self.control.enrolment is not None or bool(self.config.join_token))
        await self.texts.settled.wait()
        benchmark = Benchmark(
            self._benchmark_path,
            self._probes,
            self._digests,
            self.clock,
            self.health,
            slowdown=self.config.slowdown,
        )
        while True:
            measured_for = self._digests()
            await self.profiler.measure(benchmark, partial(self._profile_changed, measured_for))
            while self._digests() == measured_for:
                await asyncio.sleep(MODELS_LOOK_S)
            self.life.step("profiled", "stale")

    async def _offer(self) -> None:
        """Whatever this device comes to serve, it registers."""
        await keep_registered(lambda: self.models, self._register, OFFERS_LOOK_S)

    def _probes(self) -> Sequence[Probe]:
        found = [*self.tensors.probes(), *self.texts.probes()]
        return [memory_probe(), *found] if found else []

    def _digests(self) -> frozenset[str]:
        return self.tensors.digests() | self.texts.digests()

    def _kept(self) -> tuple[Measured, ...]:
        """Measurements of an earlier start, for choices made before this one has its own."""
        held = read_durable(self._benchmark_path, decode_benchmark)
        return held.measured if held is not None else ()

    def _profile_changed(self, measured_for: frozenset[str]) -> None:
        profile = self.profiler.current()
        self.tensors.learn(profile.measured)
        self.classing.measured(self.tensors.flops_per_s(profile.measured), measured_for)
        self.texts.learn(profile.measured)
        self.console.say("profiled", f"profiled: {len(profile.measured)} measurements", key=profile.key)
        self._later(self._register())

    async def _register(self) -> None:
        control = self.control.control
        if control is None:
            return
        try:
            await control.register()
        except MidstreamError as err:
            log.warning("not registered: %s", err)

    async def _report_policy(self) -> None:
        control = self.control.control
        if control is None:
            return
        try:
            await control.report()
        except MidstreamError as err:
            log.warning("the policy's new bounds are not reported: %s", err)

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(PERIOD_S)
            control = self.control.control
            if control is None or control.state != "up":
                continue
            values = self.counters.news()
            if values is not None:
                await control.tell(report(values, self.boot, wall_now().unix_s))

    async def _drain(self) -> None:
        control = self.control.control
        if control is not None and control.state == "up":
            await control.say("draining")

    async def _close(self) -> None:
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.cloud.close()
        await self.webrtc.close()
        await self.links.keep()
        await asyncio.to_thread(self._requests.close)
        if self._spans is not None:
            await asyncio.to_thread(self._spans.close)
        if self.host is not None:
            await self.host.close()

    def _on_second_way(self) -> None:
        self.console.say("webrtc", "connected by WebRTC", path=self.webrtc.status()["path"])
        self._later(self._meet_cloud())

    def _lead(self, link: str, host: str, port: int, under_way: UnderWay) -> None:
        self.links.lead(link, host, port, self.tensors.under_way(link, under_way))

    def _on_pace(self, before: Pace, now: Pace) -> None:
        """The host allows other things than before: sleep, wake, dial, or make the session anew."""
        if now.asleep != before.asleep:
            self._later(self.pause(drain=False, why="idle") if now.asleep else self.resume(why="idle"))
            return
        connector = self.control.connector
        if connector is None or not now.may_dial:
            return
        if not before.may_dial:
            connector.kick("the network is back")
            if connector.session is not None:
                connector.session.dial_now()
        elif now.keepalive_s != before.keepalive_s:
            connector.renew()

    def _on_trouble(self, error: LinkError) -> None:
        self.webrtc.poke()
        if self.control.connector is not None:
            self.control.connector.on_trouble(error)

    def _on_life(self, track: Track, state: str) -> None:
        if track != "connected":
            return
        self.webrtc.poke()
        connector = self.control.connector
        if state == "connected" and connector is not None:
            found = connector.found
            where = f"{found.host}:{found.port}" if found else ""
            via = found.origin if found else "broker"
            self.console.say("connected", f"connected: {where} (found by {via})", address=where, via=via)
            self._was_connected = True
            self._later(self._meet_cloud())
        elif self._was_connected:
            self._was_connected = False
            self.console.say("disconnected", f"coordinator: {state}", state=state)

    async def _meet_cloud(self) -> None:
        await self.texts.learn_cloud()
        await self.tensors.cloud_met()
        await self._register()

    def _later(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

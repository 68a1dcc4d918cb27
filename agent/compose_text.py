"""Composition of the text way: the device's engine, the cloud's remote twin, and who is a target at the moment."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from attrs import frozen

from agent.cloud_link import AvailableLink
from agent.compose_providers import open_providers
from agent.config import AgentConfig
from agent.device_power import DevicePower
from agent.health import Health
from agent.host import Host
from engines.gguf import parameters_of, read_metadata
from engines.measure_text import text_probes
from engines.peer import PeerEngine
from engines.port import TextEngine
from engines.queued_text import QueuedTextEngine
from engines.registry import engine_class, installed_engines
from engines.rethreaded import RethreadedTextEngine
from engines.store import ModelStore
from engines.text_admission import prefill_batch
from engines.thread_choice import ThreadChoice
from gateway.calibration import weights_of
from gateway.calibrations import CurvesFile
from gateway.control_channel import ControlChannel, desired_by
from gateway.door_limits import DoorLimits, limited
from gateway.memory import TextMemory, remembering
from gateway.mount import GatewayPorts, build
from gateway.ports import OpenKeys
from gateway.routing import PolicyRouter
from gateway.settings import GatewaySettings
from gateway.targets import Target
from links.http import HttpLink
from links.port import Mount
from profiles.benchmark import Probe, best_threads, fastest_engine
from profiles.facts import usable_cores
from profiles.rates import Slowdowns
from protocol.clock import Clock
from protocol.device import Measured
from protocol.errors import ConfigError, MidstreamError, NotFound
from protocol.events import Emit, ignore
from protocol.policy import Policy
from protocol.text import Sampling, TextRequest

log = logging.getLogger("midstream.agent")

HANDOFF_PATH = "/midstream/v1/handoff"
MODELS_PATH = "/v1/models"
MODELS_TIMEOUT_S = 10.0
MAX_CLOUD_MODELS = 256
# A lost cloud must not hold an answer up: the device goes on at once.
RESUME_S = 0.5
# One device, one reader as a rule; a second slot lets an answer begin while another ends.
SLOTS = 2
# Answers at once on a server by URL, which has its own batching.
SERVER_SLOTS = 16
FOREIGN_IDLE_S = 2.0
"""Other people's servers close an idle connection after 5 s or so; one that closes as we write loses the request."""
WARM_UP_PROMPT = "Hello"
WARM_UP_S = 120.0
LLAMA_BINDINGS = ("llama_server", "llama_cpp")
PROBE_RUNS = 1
PROBE_BUDGET_S = 6.0


@frozen
class Rates:
    """Tokens a second of the device's engine as measured; None: not measured."""

    prefill_tokens_per_s: float | None = None
    tokens_per_s: float | None = None


class TextSide:
    """The text engines of this device, and `targets` for the gateway."""

    def __init__(
        self,
        config: AgentConfig,
        store: ModelStore,
        cloud: AvailableLink,
        health: Health,
        policy: Callable[[], Policy],
        emit: Emit = ignore,
        measured: Callable[[], Sequence[Measured]] = tuple,
        slowdowns: Slowdowns | None = None,
        host: Host | None = None,
    ) -> None:
        self._config = config
        self._host = host
        self._brought: TextEngine | None = None
        self._slowdowns = slowdowns or Slowdowns()
        self._engine: str = config.text_engine
        self._rethreaded: RethreadedTextEngine | None = None
        self._fixed_threads = 0
        self._rates = Rates()
        self._parameters: float | None = None
        self._weights = ""
        self.curves = CurvesFile(config.state_dir)
        self.power = DevicePower(host=host)
        self._measured = measured
        self._store = store
        self._cloud = cloud
        self._health = health
        self._policy = policy
        self._emit = emit
        self._device: QueuedTextEngine | None = None
        self._peer = PeerEngine(lambda: cloud.open(HANDOFF_PATH), name="cloud", resume_s=RESUME_S)
        self._at_cloud: dict[str, PeerEngine] = {}
        self._server: HttpLink | None = None
        self.providers = open_providers(config)
        self.settled = asyncio.Event()

    @property
    def device(self) -> TextEngine | None:
        """The local engine, once it is open."""
        return self._device

    @property
    def models(self) -> tuple[str, ...]:
        """Text models that this device serves by itself."""
        return (self._config.text_model,) if self._device is not None and self._config.text_model else ()

    @property
    def cloud_models(self) -> frozenset[str]:
        """Text models that the coordinator was heard to serve."""
        return frozenset(self._at_cloud)

    def loading(self) -> frozenset[str]:
        """The text model that this device is still loading."""
        name = self._config.text_model
        return frozenset() if name is None or self.settled.is_set() else frozenset({name})

    def targets(self) -> Sequence[Target]:
        """What can answer now: the device first."""
        found = []
        if self._device is not None:
            found.append(
                Target(
                    "device",
                    True,
                    self._device,
                    frozenset({*self.models, *self._config.text_stands_in_for}),
                    weaker=frozenset(self._config.text_stands_in_for) - frozenset(self.models),
                    tokens_per_s=self._rates.tokens_per_s,
                    prefill_tokens_per_s=self._rates.prefill_tokens_per_s,
                    parameters=self._parameters,
                    weights=self._weights,
                    engine_name=self._engine,
                    slowdowns=self._slowdowns,
                )
            )
        if self._cloud.available:
            # One view per model, so that the first question about capabilities already names it.
            found += [Target("cloud", False, engine, frozenset({name})) for name, engine in self._at_cloud.items()]
        return [*found, *self.providers.targets()]

    def rtt_s(self) -> Mapping[str, float]:
        """Round trips seen by acknowledgements, by target."""
        return {} if self._peer.rtt_s is None else {"cloud": self._peer.rtt_s}

    async def open(self) -> None:
        """Open the device's engine and load its model, in the background of a serving agent."""
        try:
            await self._open()
        finally:
            self.settled.set()

    async def _open(self) -> None:
        if self._config.text_model is None:
            return
        try:
            self._brought = self._host.text_engine(self._config.text_model) if self._host is not None else None
            self._engine = self._binding(self._config.text_model)
            engine = self._open_engine(self._config.text_model)
            try:
                capabilities = await engine.capabilities()
                await _warm_up(engine, self._config.text_model)
            except BaseException:
                await engine.close()
                await self._leave_server()
                raise
        except MidstreamError as err:
            self._health.warn("text_model", f"{self._config.text_model}: {err.message}", err.next_step)
            return
        self._weights = self._named_weights(self._config.text_model)
        self._parameters = await asyncio.to_thread(_parameters, self._file(self._config.text_model))
        for peer in (self._peer, *self._at_cloud.values()):
            peer.vocabulary = capabilities.vocabulary
        self._device = QueuedTextEngine(
            engine,
            slots=self._slots,
            wait_target_s=self._policy().engines.wait_target_s,
            name=f"text {self._config.text_model}",
            emit=self._emit,
        )
        self.learn(self._measured())
        log.info("%s is ready on %s", self._config.text_model, self._engine)

    def _open_engine(self, model: str) -> TextEngine:
        """The engine with its threads: those of the settings, or those that the benchmark and the load ask for."""
        threads = self._threads(model)
        self._fixed_threads = threads or _usual_threads()
        if self._by_url or self._config.text_threads or self._fixed_threads < 2:
            return self._make(model, threads)
        choice = ThreadChoice(self._fixed_threads, self._idle_token_s(model, self._measured()))
        self._rethreaded = RethreadedTextEngine(lambda count: self._make(model, count), choice)
        return self._rethreaded

    def _binding(self, model: str) -> str:
        """The configured engine, or the fastest as measured among those that can load the model."""
        if self._config.text_engine != "auto" or self._by_url:
            return "llama_server" if self._config.text_engine == "auto" else self._config.text_engine
        able = self._able(model)
        return fastest_engine(self._measured(), self._store.entry(model).sha256, able, "decode") or able[0]

    def _able(self, model: str) -> Sequence[str]:
        """Installed engines for the model's format, the usual one first."""
        if self._config.text_engine != "auto":
            return (self._engine,)
        if self._store.entry(model).format == "genai":
            return ("onnx_genai",)
        if self._host is not None:
            return ("llama_cpp",)
        return [name for name in LLAMA_BINDINGS if name in installed_engines()] or LLAMA_BINDINGS[:1]

    def _idle_token_s(self, model: str, measured: Sequence[Measured]) -> dict[int, float]:
        mine = (self._store.entry(model).sha256, self._engine, "decode")
        rows = [row for row in measured if (row.digest, row.engine, row.what) == mine]
        return {row.threads: row.per_token_s for row in rows if row.per_token_s}

    @property
    def _running_threads(self) -> int:
        return self._fixed_threads if self._rethreaded is None else self._rethreaded.threads

    def learn(self, measured: Sequence[Measured]) -> None:
        """Take a profile's rates for what the device can do, where it has them of this engine as it runs now."""
        model = self._config.text_model
        if model is None or self._by_url or self._device is None:
            return
        self._rates = self._rates_of(model, self._running_threads, measured)
        self._device.expect(self._rates.tokens_per_s)
        if self._rethreaded is not None:
            self._rethreaded.expect(self._idle_token_s(model, measured))

    def _rates_of(self, model: str, threads: int, measured: Sequence[Measured] | None = None) -> Rates:
        mine = (self._store.entry(model).sha256, self._engine, threads)
        profile = self._measured() if measured is None else measured
        rows = {row.what: row for row in profile if (row.digest, row.engine, row.threads) == mine}
        return Rates(_tokens_per_s(rows.get("prefill")), _tokens_per_s(rows.get("decode")))

    async def learn_cloud(self) -> None:
        """Ask the coordinator which text models it serves."""
        try:
            reply = await self._cloud.exchange(MODELS_PATH, {}, b"", MODELS_TIMEOUT_S, method="GET")
            listed = json.loads(reply.body)["data"] if reply.status == 200 else []
            names = [str(model["id"]) for model in listed[:MAX_CLOUD_MODELS]]
            self._at_cloud = {name: self._at_cloud.get(name) or self._peer.for_model(name) for name in names}
        except MidstreamError as err:
            log.info("the coordinator's text models are not known: %s", err)
        except (ValueError, KeyError, TypeError) as err:
            log.warning("the coordinator's list of text models is not valid: %s", err)

    async def close(self) -> None:
        """Close both engines."""
        device, self._device = self._device, None
        for engine in self._at_cloud.values():
            await engine.close()
        await self._peer.close()
        await self.providers.close()
        if device is not None:
            await device.close()
        await self._leave_server()

    def set_wait_target(self, seconds: float) -> None:
        """Answers of this device may be waited for this long from now on."""
        if self._device is not None:
            self._device.set_wait_target(seconds)

    def probes(self) -> Sequence[Probe]:
        """Prefill and decode over thread counts, on engines of their own."""
        config, model = self._config, self._config.text_model
        if model is None or self._by_url or self._device is None:
            return ()
        usual = (_usual_threads(), 1, usable_cores())
        counts = (config.text_threads,) if config.text_threads else tuple(dict.fromkeys(usual))
        return [
            probe
            for name in self._able(model)
            for probe in text_probes(
                partial(self._make, model, engine_name=name),
                self._store.entry(model).sha256,
                model=model,
                engine=name,
                threads=counts,
                runs=PROBE_RUNS,
                budget_s=PROBE_BUDGET_S * config.slowdown,
            )
        ]

    def _named_weights(self, model: str) -> str:
        """Empty for a model that no store here knows: a server of its own serves it."""
        try:
            return weights_of(self._store.entry(model))
        except MidstreamError:
            return ""

    def digests(self) -> frozenset[str]:
        """What those are measured of."""
        served = self._config.text_model if self._device is not None and not self._by_url else None
        return frozenset({self._store.entry(served).sha256}) if served else frozenset()

    def _threads(self, model: str) -> int:
        """Configured, else the fewest of the fastest as measured before, else the engine's own choice."""
        if self._config.text_threads or self._by_url:
            return self._config.text_threads
        digest = self._store.entry(model).sha256
        return best_threads(self._measured(), digest, self._engine, "decode") or 0

    @property
    def _by_url(self) -> bool:
        """Whether the engine is a server that somebody else runs, or the host's own."""
        config = self._config
        return (
            self._brought is not None
            or config.text_engine == "openai_compat"
            or (config.text_engine in ("llama_server", "auto") and config.text_url is not None)
        )

    @property
    def _slots(self) -> int:
        """Answers at once."""
        return SERVER_SLOTS if self._config.text_engine == "openai_compat" else SLOTS

    def _make(self, model: str, threads: int, engine_name: str = "") -> TextEngine:
        config, name = self._config, engine_name or self._engine
        engine: TextEngine
        if self._brought is not None:
            engine = self._brought
        elif self._by_url:
            engine = self._make_by_url(model)
        else:
            more = self._as_guest(name) if self._host is not None else self._sized(model, threads, name)
            engine = engine_class(name)(
                self._store.path(model),
                model=model,
                context_tokens=config.context_tokens,
                threads=threads,
                slots=self._slots,
                chat_template=self._store.entry(model).chat_template,
                **more,
            )
        if config.slowdown > 1.0:
            from engines.slowed_text import SlowedTextEngine

            engine = SlowedTextEngine(engine, config.slowdown)
        return engine

    def _sized(self, model: str, threads: int, name: str) -> Mapping[str, Any]:
        """Prompt batches that end soon enough on this device when a client leaves, as far as its speed is known."""
        if name != "llama_server":
            return {}
        rates = self._rates_of(model, threads or _usual_threads())
        return {"batch_tokens": prefill_batch(rates.prefill_tokens_per_s), "embeds": True}

    def _as_guest(self, name: str) -> Mapping[str, Any]:
        """What an engine needs to be told to start no child process. Raises ConfigError for one that must."""
        if name != "llama_cpp":
            raise ConfigError(
                "llama_server runs in a child process, which an agent within another program does not start",
                next_step="let the host bring an engine, or set text_engine = llama_cpp or openai_compat",
                field="text_engine",
            )
        return {"in_process": True}

    def _make_by_url(self, model: str) -> TextEngine:
        config = self._config
        if config.text_url is None:
            raise ConfigError("text_engine openai_compat needs text_url", next_step="set text_url = http://host:port")
        link = self._server = HttpLink("text-server", config.text_url, keep_idle_s=FOREIGN_IDLE_S)
        made: TextEngine
        if config.text_engine == "openai_compat":
            made = engine_class("openai_compat")(link, model, config.text_key, max_open=self._slots)
        else:
            made = engine_class("llama_server_url")(
                link, api_key=config.text_key, model_file=self._file(model), slots=self._slots
            )
        return made

    def _file(self, model: str) -> Path | None:
        """The model's file where it is here too: then token ids may cross."""
        try:
            return self._store.path(model)
        except NotFound:
            return None

    async def _leave_server(self) -> None:
        link, self._server = self._server, None
        if link is not None:
            await link.close()


def _usual_threads() -> int:
    """What the engines take when they are told 0."""
    return max(1, usable_cores() - 1)


def _parameters(file: Path | None) -> float | None:
    """Of the model in `file`, where it tells its sizes."""
    try:
        return parameters_of(read_metadata(file)) if file is not None else None
    except MidstreamError:
        return None


def _tokens_per_s(measured: Measured | None) -> float | None:
    return 1.0 / measured.per_token_s if measured is not None and measured.per_token_s else None


async def _warm_up(engine: TextEngine, model: str) -> None:
    """One token: brings the weights into memory, so that the first answer does not look like a stalled one."""
    request = TextRequest(model, WARM_UP_PROMPT, Sampling(max_tokens=1))
    continuation = await engine.prepare(request, WARM_UP_S)
    try:
        async for token in continuation.start(0, 1):
            # Some engines end with a mark of its own, which wants credit like every token.
            continuation.acknowledge(token.index)
            if token.finish is not None:
                break
    finally:
        await continuation.close()


def text_mount(
    side: TextSide,
    memory: TextMemory,
    limits: DoorLimits,
    policy: Callable[[], Policy],
    emit: Emit,
    clock: Clock,
    health: Health,
) -> Mount:
    """The text way over the targets of `side`; start opens the engine, stop ends answers and closes it."""
    channel = ControlChannel(OpenKeys(), memory.results, lambda: desired_by(policy()), clock)
    inner = build(
        GatewaySettings(),
        GatewayPorts(
            targets=side.targets, policy=policy, emit=emit, clock=clock, rtt_s=side.rtt_s, loading=side.loading,
            cache=memory.cache, conversations=memory.conversations, router=PolicyRouter(second=memory.second_opinion),
            channel=channel, curves=side.curves,
            power=side.power, limits=limits, audit=limits,
        ),
    )  # fmt: skip
    inner = limited(remembering(inner, memory), limits)

    async def start() -> None:
        await inner.start()
        if memory.why:
            health.warn("cache", memory.why)
        await side.open()

    async def stop() -> None:
        await inner.stop()
        await side.close()

    return Mount(routes=inner.routes, frame_routes=inner.frame_routes, start=start, stop=stop)

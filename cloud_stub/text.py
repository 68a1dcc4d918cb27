"""The cloud's side of text: one engine per GGUF model, the OpenAI front over them, and the handoff endpoint."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Sequence

from attrs import evolve

from cloud_stub.access import Check, bearer
from cloud_stub.config import CoordinatorConfig
from cloud_stub.tenants import TenantHouse
from engines.peer_host import HostedStreams, serve_stream
from engines.port import TextEngine
from engines.queued_text import QueuedTextEngine
from engines.registry import ENGINES, engine_class, installed_engines
from engines.store import ModelStore
from gateway.control_channel import ControlChannel, desired_by
from gateway.limited_engine import LimitedEngine
from gateway.memory import TextMemory, remembering
from gateway.mount import GatewayPorts
from gateway.mount import build as build_gateway
from gateway.ports import KeyRing
from gateway.provider_house import ProviderHouse
from gateway.result_store import ResultStore
from gateway.routing import PolicyRouter
from gateway.settings import GatewaySettings
from gateway.targets import Target
from links.port import FrameRoute, FrameStream, Mount, Request
from protocol.errors import NotAllowed, NotFound
from protocol.events import Emit, ignore
from protocol.extras import install_step
from protocol.handoff import Prepare
from protocol.models import CatalogueEntry
from protocol.policy import LimitsPolicy, Policy, RoutingPolicy
from protocol.policy_routing import ShadowRouting

log = logging.getLogger("midstream.coordinator.text")

HANDOFF_PATH = "/midstream/v1/handoff"
TARGET = "cloud"
MAX_ANSWER_TOKENS = 8192
"""The coordinator's own bound; a device's policy is stricter where the fleet wants it."""


class TextHouse:
    """Engines by model name. They start at their first request and end with `close`."""

    def __init__(
        self,
        engines: dict[str, TextEngine],
        providers: ProviderHouse | None = None,
        shadow: ShadowRouting | None = None,
    ) -> None:
        self._engines = engines
        self._providers = providers
        self._streams = HostedStreams()
        self._policy = Policy(
            limits=LimitsPolicy(max_answer_tokens=MAX_ANSWER_TOKENS),
            routing=RoutingPolicy(shadow=shadow or ShadowRouting()),
        )

    @property
    def models(self) -> tuple[str, ...]:
        return tuple(self._engines)

    def targets(self) -> Sequence[Target]:
        """Each engine as a local target, for nothing leaves this machine; then what is at providers."""
        found = [Target(TARGET, True, engine, frozenset({name})) for name, engine in self._engines.items()]
        return [*found, *self._providers.targets()] if self._providers is not None else found

    def engine_for(self, model: str) -> TextEngine:
        """Raises NotFound."""
        engine = self._engines.get(model)
        if engine is None:
            known = ", ".join(self._engines) or "none"
            raise NotFound(f"there is no text model {model[:100]!r} here", next_step=f"known: {known}", field="model")
        return engine

    def handoff(self, member: Check, tenants: TenantHouse | None = None, emit: Emit = ignore) -> FrameRoute:
        """The handoff endpoint; who may open it was settled by the route's guard, each answer is asked for again.

        tenants: answers count under the limits of whoever opened it (devices: the tenant `fleet`).
        """

        async def handle(request: Request, stream: FrameStream) -> None:
            def admit(_: Prepare) -> None:
                if member(request) is None:
                    raise NotAllowed("whoever opened this stream is no member of the fleet any more")

            def limited(model: str) -> TextEngine:
                engine = self.engine_for(model)
                if tenants is None:
                    return engine
                keys, limits = tenants.keys, tenants.limits
                return LimitedEngine(engine, limits, lambda: keys.caller(request.headers, request.remote, request.peer))

            await serve_stream(limited, stream, admit, streams=self._streams, owner=owner_of(request), emit=emit)

        return FrameRoute(HANDOFF_PATH, handle)

    async def end(self, device_id: str) -> None:
        """End the answers that a device gets, and those that wait for it to come back."""
        owner = _device_owner(device_id)
        await asyncio.gather(*(hosted.end() for name, hosted in tuple(self._streams.open.values()) if name == owner))

    def channel(self, keys: KeyRing, results: ResultStore) -> ControlChannel:
        """The control channel to apps; front() mounts it."""
        return ControlChannel(keys, results, lambda: desired_by(self._policy), time.monotonic)

    def front(
        self,
        emit: Emit,
        tenants: TenantHouse | None = None,
        memory: TextMemory | None = None,
        channel: ControlChannel | None = None,
    ) -> Mount:
        """The OpenAI API over the same engines, behind keys and limits where there are tenants."""
        ports = GatewayPorts(targets=self.targets, policy=lambda: self._policy, emit=emit, channel=channel)
        if tenants is not None:
            ports = evolve(ports, keys=tenants.keys, limits=tenants.limits, audit=tenants.audit)
        if memory is None:
            return build_gateway(GatewaySettings(), ports)
        ports = evolve(
            ports,
            cache=memory.cache,
            conversations=memory.conversations,
            router=PolicyRouter(second=memory.second_opinion),
        )
        return remembering(build_gateway(GatewaySettings(), ports), memory)

    async def warm(self) -> None:
        """Load every model before its first request, one after the other; a model that fails stays cold."""
        for name, engine in self._engines.items():
            try:
                await engine.capabilities()
            except Exception as err:  # noqa: BLE001 - warming is a favour; the request itself will tell the error
                log.warning("%s could not be loaded ahead: %s", name, err)

    async def close(self) -> None:
        """End streams, then engines."""
        await self._streams.close()
        if self._providers is not None:
            await self._providers.close()
        await asyncio.gather(*(engine.close() for engine in self._engines.values()), return_exceptions=True)


def owner_of(request: Request) -> str:
    """Only the same device, or a holder of the same key, may resume a stream."""
    if request.peer is not None:
        return _device_owner(request.peer)
    return "key:" + hashlib.sha256((bearer(request) or "").encode()).hexdigest()[:16]


def _device_owner(device_id: str) -> str:
    return f"device:{device_id}"


def open_engines(
    config: CoordinatorConfig, store: ModelStore, emit: Emit = ignore
) -> tuple[dict[str, TextEngine], str]:
    """Engines for the models in the store that they can load, and why there are none (empty when there are)."""
    form = "genai" if config.text_engine == "onnx_genai" else "gguf"
    entries = [s.entry for s in store.list() if s.path is not None and s.entry.format == form]
    if config.text_engine == "none":
        return {}, "text is switched off"
    if not entries:
        return {}, "no text model is on this machine; midstream models pull smollm2-135m fetches one"
    if config.text_engine not in installed_engines():
        extra = ENGINES[config.text_engine].extra
        return {}, f"{config.text_engine} is not installed; {install_step(extra)}"
    return {entry.name: queued(_engine(config, store, entry), config, entry.name, emit) for entry in entries}, ""


def queued(engine: TextEngine, config: CoordinatorConfig, name: str, emit: Emit = ignore) -> TextEngine:
    """The engine behind a bounded queue: a device that is refused goes on with its own or asks again later."""
    return QueuedTextEngine(
        engine, slots=config.text_slots, wait_target_s=config.text_wait_target_s, name=f"text {name}", emit=emit
    )


def _engine(config: CoordinatorConfig, store: ModelStore, entry: CatalogueEntry) -> TextEngine:
    made: TextEngine = engine_class(config.text_engine)(
        store.path(entry.name),
        model=entry.name,
        context_tokens=min(config.text_context_tokens, entry.context_tokens or config.text_context_tokens),
        threads=config.text_threads,
        slots=config.text_slots,
        chat_template=entry.chat_template,
        **({"embeds": True} if config.text_engine == "llama_server" else {}),
    )
    return made

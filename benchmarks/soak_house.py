"""A coordinator-like house as a process of its own, for the soak: limits, audit, memory, engines, providers, shadows.

`python -m benchmarks.soak_house JSON`, see HouseSetup. It prints its port and runs until it is ended. Models:

    good     a provider that is never told to fail
    shaky    a provider that is told to fail, alone
    backed   the shaky provider, then the good one
    own      an engine of this machine that is told to fail, alone
    both     an engine of this machine that is told to fail, and one elsewhere that goes on
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import secrets
import signal
import sys
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

from attrs import field, frozen

from engines.fakes_text import FakeTextEngine, prompt_bytes
from engines.key_vault import KeyVault
from engines.port import Continuation
from engines.store import ModelStore
from engines.wrapping import WrappedContinuation, WrappedTextEngine
from gateway.audit import AuditBounds, FileAudit
from gateway.keys import KeyRecord, KeyTable, sha256_of
from gateway.memory import TextMemory, remembering
from gateway.memory_settings import MemorySettings
from gateway.metering import MeteredLimits
from gateway.mount import GatewayPorts, build
from gateway.provider_house import ProviderHouse
from gateway.providers import read_providers
from gateway.quotas import Quota, Tenant
from gateway.settings import GatewaySettings
from gateway.sqlite_ledger import SqliteLedger
from gateway.targets import Target
from links.http_front import ServerLimits
from links.http_lean import LeanHttpLink
from links.http_server import serve
from links.port import Mount, Request, Response, Route
from protocol.clock import wall_now
from protocol.errors import EngineCrashed
from protocol.policy import DispatchPolicy, LimitsPolicy, MigrationPolicy, Policy, RoutingPolicy
from protocol.policy_routing import ShadowRouting
from protocol.text import TextRequest, Token

ANSWER_TOKENS = 24
TOKENS_PER_S = 400.0
STALL_S = 0.5
FIRST_BYTE_S = 1.0
SHADOW_SHARE = 0.3
STATE_PATH = "/soak/state"
_FAULT = re.compile(rb"\b(crash|mute)=(\d+)")


@frozen
class HouseSetup:
    """folder: of this process's own state. quotas: by tenant, whose key is `key-<tenant>`."""

    folder: str
    good_port: int
    shaky_port: int
    room: int = 256
    quotas: Mapping[str, Mapping[str, float]] = field(factory=dict)


class FaultyEngine(WrappedTextEngine):
    """The fake engine, with faults told by words of the prompt: `crash=3` dies at that token, `mute=3` falls silent.

    sound: it does not listen to them.
    """

    def __init__(self, inner: FakeTextEngine, *, sound: bool = False) -> None:
        super().__init__(inner)
        self._fake = inner
        self._sound = sound

    async def prepare(self, request: TextRequest, deadline_s: float) -> Continuation:
        found = [] if self._sound else _FAULT.findall(prompt_bytes(request.prompt)[-4096:])
        inner = await self._inner.prepare(request, deadline_s)
        self._fake.prepared.clear()  # a test's memory, which would be taken for the house's
        return FaultyContinuation(inner, {name.decode(): int(at) for name, at in found})


class FaultyContinuation(WrappedContinuation):
    """One answer, up to its fault."""

    def __init__(self, inner: Continuation, faults: Mapping[str, int]) -> None:
        super().__init__(inner)
        self._faults = faults
        self._closed = asyncio.Event()

    def start(self, at: int, ahead_tokens: int) -> AsyncIterator[Token]:
        return self._tokens(self._inner.start(at, ahead_tokens))

    async def close(self) -> None:
        self._closed.set()
        await self._inner.close()

    async def _tokens(self, tokens: AsyncIterator[Token]) -> AsyncIterator[Token]:
        async for token in tokens:
            if token.index == self._faults.get("crash"):
                raise EngineCrashed("own died as it was told")
            if token.index == self._faults.get("mute"):
                await self._closed.wait()
                return
            yield token


def made_here(name: str) -> FakeTextEngine:
    """An engine without a model, at the speed of a good device."""
    return FakeTextEngine(
        name=name, tokens_per_s=TOKENS_PER_S, answer_tokens=ANSWER_TOKENS, context_tokens=1 << 20, capacity=64
    )


def providers(setup: HouseSetup) -> ProviderHouse:
    """Three models at two providers; bounds short enough for a soak."""
    bounds = {
        "kind": "openai", "keyless": True, "attempts": 2, "first_byte_s": FIRST_BYTE_S, "between_s": STALL_S,
        "total_s": 10.0,
    }  # fmt: skip
    tables = [
        {"name": name, "base_url": f"http://127.0.0.1:{port}", **bounds}
        for name, port in (("good", setup.good_port), ("shaky", setup.shaky_port))
    ]
    price = {"usd_per_million_prompt_tokens": 1.0, "usd_per_million_completion_tokens": 10.0}
    models: dict[str, Any] = {
        "good": {"at": "good/m", **price}, "shaky": {"at": "shaky/m", **price},
        "backed": {"at": ["shaky/m", "good/m"], **price},
    }  # fmt: skip
    house = ProviderHouse(
        KeyVault(Path(setup.folder) / "providers"),
        lambda one: LeanHttpLink(one.name, one.base_url, connections=setup.room),
    )
    house.configure(read_providers(tables, models))
    return house


@contextlib.asynccontextmanager
async def soak_house(setup: HouseSetup) -> AsyncIterator[int]:
    """The port it listens on."""
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(setup.folder)
        audit = FileAudit(folder / "audit", wall_now, AuditBounds(file_bytes=4 << 20, files=4))
        stack.callback(audit.close)
        ledger = SqliteLedger(folder / "ledger", wall_now)
        stack.push_async_callback(ledger.close)
        keys = KeyTable(
            wall_now,
            [KeyRecord(name, "invoke", name, sha256_of(f"key-{name}"), 0.0) for name in setup.quotas],
            [Tenant(name, quota=Quota(**quota)) for name, quota in setup.quotas.items()],  # type: ignore[arg-type]
        )
        limits = MeteredLimits(
            keys.tenant, ledger, clock=time.monotonic, wall=wall_now, holder=secrets.token_hex(8), room=setup.room
        )
        await limits.start()
        stack.push_async_callback(limits.stop)
        house, own, spare = (
            providers(setup),
            FaultyEngine(made_here("own")),
            FaultyEngine(made_here("spare"), sound=True),
        )
        stack.push_async_callback(own.close)
        stack.push_async_callback(spare.close)
        stack.push_async_callback(house.close)
        memory = TextMemory(
            MemorySettings(cache="exact", cache_entries=500), folder / "memory", ModelStore(folder / "models", {})
        )
        policy = Policy(
            dispatch=DispatchPolicy(start="device"),
            migration=MigrationPolicy(enabled=False, stall_s=STALL_S),
            limits=LimitsPolicy(max_prompt_bytes=256 << 10),
            routing=RoutingPolicy(shadow=ShadowRouting(share=SHADOW_SHARE, concurrent=4, deadline_s=10.0)),
        )
        here = Target("device", True, own, frozenset({"own", "both"}))
        there = Target("cloud", False, spare, frozenset({"both"}))
        ports = GatewayPorts(
            targets=lambda: [here, there, *house.targets()], policy=lambda: policy, keys=keys, limits=limits,
            audit=audit, cache=memory.cache, conversations=memory.conversations,
        )  # fmt: skip
        settings = GatewaySettings(max_concurrent=setup.room, drain_s=1.0, deadline_s=10.0)
        mount: Mount = remembering(build(settings, ports), memory)
        await mount.start()
        stack.push_async_callback(mount.stop)

        async def state(request: Request) -> Response:
            held = {name: dict(limits.reserved(name)) for name in setup.quotas}
            answer = {"reserved": held, "running": own.load().running + spare.load().running}
            return Response(200, {"content-type": "application/json"}, json.dumps(answer).encode())

        routes = (*mount.routes, Route("GET", STATE_PATH, state), Route("POST", STATE_PATH, state))
        server = await serve(routes, limits=ServerLimits(connections=2 * setup.room))
        stack.push_async_callback(server.close)
        yield server.port


async def _main(setup: HouseSetup) -> None:
    ending = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ending.set)
    async with soak_house(setup) as port:
        print(port, flush=True)
        await ending.wait()


if __name__ == "__main__":
    asyncio.run(_main(HouseSetup(**json.loads(sys.argv[1]))), debug=False)

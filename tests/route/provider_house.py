"""A house for route tests: the text way over real HTTP to fake upstreams, each a provider of its own."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from attrs import frozen

from benchmarks.fake_upstream import Ledger, serve_upstream
from engines.key_vault import KeyVault
from gateway.mount import GatewayPorts, build
from gateway.provider_house import ProviderHouse
from gateway.providers import read_providers
from gateway.settings import GatewaySettings
from gateway.targets import Target
from links.http_lean import LeanHttpLink
from links.http_server import serve
from protocol.events import RecordingEmit, TextDone
from protocol.policy import DispatchPolicy, MigrationPolicy, Policy

QUICK = {"keyless": True, "first_byte_s": 1.0, "between_s": 0.3, "attempts": 1}


@frozen
class Providing:
    """Where the front door is, and what each upstream saw."""

    base_url: str
    port: int
    ledgers: Sequence[Ledger]
    house: ProviderHouse
    vault: KeyVault
    emit: RecordingEmit
    stop: Callable[[], Awaitable[None]]

    def done(self) -> list[TextDone]:
        """Records of ended answers."""
        return [event for event in self.emit.events if isinstance(event, TextDone)]


@asynccontextmanager
async def providing(
    tmp_path: Path,
    upstreams: int = 1,
    *,
    settings: GatewaySettings | None = None,
    more: Mapping[str, Any] | None = None,
    device: Target | None = None,
    stall_s: float = 0.3,
) -> AsyncIterator[Providing]:
    """`upstreams` fake servers `p0`, `p1`, …; the model `m` is at all of them in this order, `m0`, `m1` at one each."""
    async with AsyncExitStack() as stack:
        ledgers, tables = [], []
        for number in range(upstreams):
            port, ledger, stop = await serve_upstream()
            stack.callback(stop)
            ledgers.append(ledger)
            base_url = f"http://127.0.0.1:{port}"
            tables.append({"name": f"p{number}", "kind": "openai", "base_url": base_url, **QUICK, **(more or {})})
        models: dict[str, Any] = {f"m{number}": f"p{number}/there" for number in range(upstreams)}
        models["m"] = [f"p{number}/there" for number in range(upstreams)]
        vault = KeyVault(tmp_path / "providers")
        house = ProviderHouse(vault, lambda one: LeanHttpLink(one.name, one.base_url, connect_s=one.connect_s))
        house.configure(read_providers(tables, models))
        stack.push_async_callback(house.close)
        emit = RecordingEmit()
        policy = Policy(
            dispatch=DispatchPolicy(start="cloud"), migration=MigrationPolicy(enabled=False, stall_s=stall_s)
        )
        own = [device] if device is not None else []
        ports = GatewayPorts(
            targets=lambda: [*own, *house.targets()], policy=lambda: policy, emit=emit, clock=time.monotonic
        )
        mount = build(settings or GatewaySettings(drain_s=0.2), ports)
        await mount.start()
        stack.push_async_callback(mount.stop)
        server = await serve(mount.routes)
        stack.push_async_callback(server.close)
        yield Providing(f"http://127.0.0.1:{server.port}", server.port, ledgers, house, vault, emit, mount.stop)

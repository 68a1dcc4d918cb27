"""One gateway as a process of its own: keys, tenants with limits, one provider, an audit. Prints its port.

`python -m benchmarks.limited_gateway JSON`, see GatewaySetup. It runs until it is ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

from attrs import asdict, define, field, frozen

from engines.key_vault import KeyVault
from gateway.audit import FileAudit
from gateway.keys import KeyRecord, KeyTable, sha256_of
from gateway.ledger import Ledger
from gateway.metering import MeteredLimits
from gateway.mount import GatewayPorts, build
from gateway.provider_house import ProviderHouse
from gateway.providers import read_providers
from gateway.quotas import Quota, Tenant
from gateway.redis_ledger import RedisLedger
from gateway.settings import GatewaySettings
from gateway.sqlite_ledger import SqliteLedger
from links.http import HttpLink
from links.http_front import ServerLimits
from links.http_server import serve
from protocol.clock import wall_now
from protocol.policy import DispatchPolicy, MigrationPolicy, Policy

USD_PER_MILLION_IN = 1.0
USD_PER_MILLION_OUT = 10.0
MODEL = "m"
ROOM = 2048
"""Connections and requests at once: the tenant's limits are to be met, not the process's own."""


@frozen
class GatewaySetup:
    """folder: of this process's own state. redis: a URL, or empty for SQLite in the folder.

    quotas: by tenant; the key of a tenant is `key-<tenant>`.
    """

    folder: str
    upstream_port: int
    redis: str = ""
    quotas: Mapping[str, Mapping[str, float]] = field(factory=dict)

    def tenants(self) -> list[Tenant]:
        return [Tenant(name, quota=Quota(**limits)) for name, limits in self.quotas.items()]  # type: ignore[arg-type]

    def keys(self) -> list[KeyRecord]:
        return [KeyRecord(name, "invoke", name, sha256_of(f"key-{name}"), 0.0) for name in self.quotas]


def providers(setup: GatewaySetup) -> ProviderHouse:
    """The model `m` at the fake upstream, at a price."""
    table = {"name": "p", "kind": "openai", "base_url": f"http://127.0.0.1:{setup.upstream_port}", "keyless": True}
    place = {
        "at": "p/there", "usd_per_million_prompt_tokens": USD_PER_MILLION_IN,
        "usd_per_million_completion_tokens": USD_PER_MILLION_OUT,
    }  # fmt: skip
    house = ProviderHouse(
        KeyVault(Path(setup.folder) / "providers"),
        lambda one: HttpLink(one.name, one.base_url, connect_s=one.connect_s, connections=ROOM),
    )
    house.configure(read_providers([{**table, "attempts": 1, "max_open": ROOM}], {MODEL: place}))
    return house


@contextlib.asynccontextmanager
async def limited_gateway(setup: GatewaySetup) -> AsyncIterator[tuple[int, MeteredLimits]]:
    """The port it listens on, and its limits."""
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(setup.folder)
        audit = FileAudit(folder / "audit", wall_now)
        stack.callback(audit.close)
        ledger: Ledger = RedisLedger(setup.redis) if setup.redis else SqliteLedger(folder / "ledger", wall_now)
        stack.push_async_callback(ledger.close)
        keys = KeyTable(wall_now, setup.keys(), setup.tenants())
        holder = secrets.token_hex(8)
        limits = MeteredLimits(keys.tenant, ledger, clock=time.monotonic, wall=wall_now, holder=holder)
        await limits.start()
        stack.push_async_callback(limits.stop)
        house = providers(setup)
        stack.push_async_callback(house.close)
        policy = Policy(dispatch=DispatchPolicy(start="cloud"), migration=MigrationPolicy(enabled=False))
        ports = GatewayPorts(targets=house.targets, policy=lambda: policy, keys=keys, limits=limits, audit=audit)
        mount = build(GatewaySettings(max_concurrent=ROOM, drain_s=0.5), ports)
        await mount.start()
        stack.push_async_callback(mount.stop)
        server = await serve(mount.routes, limits=ServerLimits(connections=ROOM))
        stack.push_async_callback(server.close)
        yield server.port, limits


@define(eq=False)
class GatewayProcess:
    """A started process; `kill` is SIGKILL."""

    process: subprocess.Popen[bytes]
    port: int

    def kill(self) -> None:
        self.process.kill()
        self._over()

    def stop(self) -> None:
        """In order: what is not needed goes back to the ledger."""
        self.process.terminate()
        self._over()

    def _over(self) -> None:
        self.process.wait(20)
        if self.process.stdout is not None:
            self.process.stdout.close()


def start_process(setup: GatewaySetup) -> GatewayProcess:
    """Waits until it listens; for threads."""
    command = [sys.executable, "-m", "benchmarks.limited_gateway", json.dumps(asdict(setup))]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError("the gateway did not start")
    return GatewayProcess(process, int(line))


async def _main(setup: GatewaySetup) -> None:
    ending = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ending.set)
    async with limited_gateway(setup) as (port, _):
        print(port, flush=True)
        await ending.wait()


def setup_of(document: Mapping[str, Any]) -> GatewaySetup:
    """From JSON."""
    return GatewaySetup(**document)


if __name__ == "__main__":
    asyncio.run(_main(setup_of(json.loads(sys.argv[1]))))

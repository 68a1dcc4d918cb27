"""The gateway as the bench measures it: the text way in a process of its own, one provider behind it.

`python -m benchmarks.gateway_server --upstream PORT --state-dir DIR`: prints `ready PORT KEY`, serves until it is
ended. Keys, limits in four dimensions over SQLite, privacy, routing, metrics and the hash-chained audit are on; the
cache is off.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import secrets
import signal
import time
from pathlib import Path

from attrs import evolve

from engines.key_vault import KeyVault
from gateway.audit import FileAudit
from gateway.metering import MeteredLimits
from gateway.mount import GatewayPorts, build
from gateway.provider_house import ProviderHouse
from gateway.providers import ProviderSettings, read_providers
from gateway.quotas import Quota, Tenant
from gateway.settings import GatewaySettings
from gateway.sqlite_ledger import SqliteLedger
from gateway.tenancy import Tenancy
from gateway.tenant_store import SqliteTenants
from links.event_loop import run_on, settle
from links.http_front import ServerLimits
from links.http_lean import LeanHttpLink
from links.http_server import serve
from protocol.clock import wall_now
from protocol.events import Emit
from protocol.exposition import Exposition
from protocol.policy import Policy

MODEL = "fake"
PROVIDER = "up"
CONNECTIONS = 512
QUOTA = Quota(
    requests_per_s=100_000.0, tokens_per_min=10**9, max_concurrent=10_000, usd_per_day=10_000.0, usd_per_month=100_000.0
)
PRICE = {"usd_per_million_prompt_tokens": 0.15, "usd_per_million_completion_tokens": 0.6}


def _link(settings: ProviderSettings) -> LeanHttpLink:
    return LeanHttpLink(settings.name, settings.base_url, connect_s=settings.connect_s, connections=CONNECTIONS)


def _providers(state_dir: Path, upstream: int) -> ProviderHouse:
    vault = KeyVault(state_dir / "providers")
    vault.add(PROVIDER, "sk-upstream")
    house = ProviderHouse(vault, _link)
    url = f"http://127.0.0.1:{upstream}"
    table = {"name": PROVIDER, "kind": "openai", "base_url": url, "max_open": CONNECTIONS}
    house.configure(read_providers([table], {MODEL: {"at": f"{PROVIDER}/{MODEL}-there", **PRICE}}))
    return house


async def _guarded(
    stack: contextlib.AsyncExitStack, ports: GatewayPorts, state_dir: Path, emit: Emit
) -> tuple[GatewayPorts, str]:
    """The ports with keys, limits and audit on, and a key to ask with."""
    audit = FileAudit(state_dir / "audit", wall_now)
    stack.callback(audit.close)
    store = SqliteTenants(state_dir / "tenants.sqlite")
    tenancy = Tenancy(store, wall_now, audit.management)
    stack.callback(tenancy.close)
    tenancy.set_tenant("bench", Tenant("bench", quota=QUOTA))
    key = tenancy.add_key("bench", "invoke", "bench").text
    ledger = SqliteLedger(state_dir / "ledger", wall_now)
    stack.push_async_callback(ledger.close)
    keys = tenancy.table
    limits = MeteredLimits(
        keys.tenant, ledger, clock=time.monotonic, wall=wall_now, holder=secrets.token_hex(8), emit=emit
    )
    await limits.start()
    stack.push_async_callback(limits.stop)
    return evolve(ports, keys=keys, limits=limits, audit=audit), key


async def run(upstream: int, state_dir: Path) -> None:
    """Serve until SIGTERM."""
    metrics, policy = Exposition(), Policy()
    async with contextlib.AsyncExitStack() as stack:
        house = _providers(state_dir, upstream)
        stack.push_async_callback(house.close)
        ports = GatewayPorts(targets=house.targets, policy=lambda: policy, emit=metrics)
        ports, key = await _guarded(stack, ports, state_dir, metrics)
        mount = build(GatewaySettings(max_concurrent=CONNECTIONS), ports)
        await mount.start()
        stack.push_async_callback(mount.stop)
        server = await serve(mount.routes, limits=ServerLimits(connections=1024))
        stack.push_async_callback(server.close)
        stopping = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)
        settle()
        print(f"ready {server.port} {key}", flush=True)
        await stopping.wait()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--upstream", type=int, required=True)
    parser.add_argument("--state-dir", type=Path, required=True)
    parser.add_argument("--event-loop", choices=("asyncio", "uvloop"), default="asyncio")
    options = parser.parse_args()
    run_on(options.event_loop, run(options.upstream, options.state_dir))


if __name__ == "__main__":
    main()

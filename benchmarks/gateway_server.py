"""The gateway as the bench measures it: the text way in a process of its own, one provider behind it.

`python -m benchmarks.gateway_server --upstream PORT --state-dir DIR`: prints `ready PORT`, serves until it is ended.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import signal
from pathlib import Path

from engines.key_vault import KeyVault
from gateway.mount import GatewayPorts, build
from gateway.provider_house import ProviderHouse
from gateway.providers import ProviderSettings, read_providers
from gateway.settings import GatewaySettings
from links.http import HttpLink
from links.http_server import ServerLimits, serve
from protocol.exposition import Exposition
from protocol.policy import Policy

MODEL = "fake"
PROVIDER = "up"
CONNECTIONS = 512


def _link(settings: ProviderSettings) -> HttpLink:
    return HttpLink(settings.name, settings.base_url, connect_s=settings.connect_s, connections=CONNECTIONS)


async def run(upstream: int, state_dir: Path) -> None:
    """Serve until SIGTERM."""
    vault = KeyVault(state_dir / "providers")
    vault.add(PROVIDER, "sk-upstream")
    house = ProviderHouse(vault, _link)
    table = {
        "name": PROVIDER,
        "kind": "openai_compat",
        "base_url": f"http://127.0.0.1:{upstream}",
        "max_open": CONNECTIONS,
    }
    house.configure(read_providers([table], {MODEL: f"{PROVIDER}/{MODEL}-there"}))
    metrics = Exposition()
    policy = Policy()
    ports = GatewayPorts(targets=house.targets, policy=lambda: policy, emit=metrics)
    mount = build(GatewaySettings(max_concurrent=CONNECTIONS), ports)
    await mount.start()
    server = await serve(mount.routes, limits=ServerLimits(connections=1024))
    stopping = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)
    gc.freeze()
    print(f"ready {server.port}", flush=True)
    await stopping.wait()
    await server.close()
    await mount.stop()
    await house.close()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--upstream", type=int, required=True)
    parser.add_argument("--state-dir", type=Path, required=True)
    options = parser.parse_args()
    asyncio.run(run(options.upstream, options.state_dir))


if __name__ == "__main__":
    main()

"""The agent's text side with a coordinator in reach, run as a process of its own by test_local_only_sockets.

`python -m tests.route.watched_agent COORDINATOR_URL MODELS_DIR STATE_DIR MODE`; MODE: `policy` (local_only is policy),
`request` (a detector finds that requests are private) or `open` (nothing keeps them here). It prints one JSON line when
it serves, one line with its events when standard input ends, and ends.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path

from attrs import evolve

from agent.cloud_link import CloudLink
from agent.compose_text import TextSide
from agent.config import load
from agent.health import Health
from engines.catalogue import load_catalogue
from engines.store import ModelStore
from gateway.context import Caller
from gateway.mount import GatewayPorts, build
from gateway.ports import Findings, Privacy
from gateway.privacy import PrivacyGuard
from gateway.settings import GatewaySettings
from links.http import HttpLink
from links.http_server import serve
from protocol.chat import ChatRequest
from protocol.events import HandedOver, RecordingEmit, SourceLost, TextDone
from protocol.policy import DispatchPolicy, MigrationPolicy, Policy, PrivacyPolicy

MODEL = "smollm2-135m"
TEMPTED = Policy(
    dispatch=DispatchPolicy(start="cloud"),
    migration=MigrationPolicy(min_tokens=1, min_remaining_tokens=1, consume_tokens_per_s=0.001, stall_s=10.0),
)


class Detects(PrivacyGuard):
    """Finds every request private, as a detector would."""

    def inspect(self, chat: ChatRequest, caller: Caller, policy: Policy) -> Findings:
        return Findings(local_only=True, reason="a detector found a name")


async def main(url: str, models_dir: str, state_dir: str, mode: str) -> None:
    """Serve until standard input ends."""
    policy = evolve(TEMPTED, privacy=PrivacyPolicy(local_only=mode == "policy"))
    privacy: Privacy = Detects() if mode == "request" else PrivacyGuard()
    chosen = {"state_dir": state_dir, "models_dir": models_dir, "port": 0, "mdns": False, "benchmark": False}
    # Slowed, so that there is time to be tempted.
    chosen |= {"text_model": MODEL, "text_threads": 1, "context_tokens": 512, "slowdown": 3.0}
    config = load(chosen, environ={"HOME": state_dir})
    cloud, emit = CloudLink(lambda err: None), RecordingEmit()
    await cloud.point_to(HttpLink("cloud", url))
    side = TextSide(
        config, ModelStore(config.models_dir, load_catalogue()), cloud, Health(time.monotonic), lambda: policy, emit
    )
    ports = GatewayPorts(
        targets=side.targets, policy=lambda: policy, emit=emit, rtt_s=side.rtt_s, loading=side.loading, privacy=privacy
    )
    mount = build(GatewaySettings(drain_s=0.2), ports)
    server = await serve(mount.routes, origin_check=True)
    await mount.start()
    await side.learn_cloud()
    await side.open()
    print(json.dumps({"port": server.port, "targets": [target.name for target in side.targets()]}), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    told = [event for event in emit.events if isinstance(event, TextDone | HandedOver | SourceLost)]
    print(json.dumps([[type(event).__name__, getattr(event, "sides", [])] for event in told]), flush=True)
    await mount.stop()
    await side.close()
    await server.close()
    await cloud.close()


if __name__ == "__main__":
    folders = [str(Path(folder).resolve()) for folder in sys.argv[2:4]]
    asyncio.run(main(sys.argv[1], *folders, sys.argv[4]))

"""A house for route tests: the text way behind the real HTTP server on a free port of 127.0.0.1."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from attrs import frozen

from gateway.mount import GatewayPorts, build
from gateway.settings import GatewaySettings
from gateway.targets import Target
from links.http_server import serve
from protocol.events import Emit, RecordingEmit, TextDone, ignore
from protocol.fanout import Fanout
from protocol.policy import Policy


@frozen
class House:
    """Where it listens and what it recorded."""

    base_url: str
    port: int
    emit: RecordingEmit

    def done(self) -> list[TextDone]:
        """Records of ended answers."""
        return [event for event in self.emit.events if isinstance(event, TextDone)]


@asynccontextmanager
async def house(
    targets: Sequence[Target],
    *,
    policy: Policy | None = None,
    settings: GatewaySettings | None = None,
    ports: Mapping[str, Any] | None = None,
    listener: Emit = ignore,
) -> AsyncIterator[House]:
    """Serve `targets` until the block ends. ports: further ports of the way (keys, limits). listener: hears too."""
    emit = RecordingEmit()
    made = GatewayPorts(
        targets=lambda: targets,
        policy=lambda: policy or Policy(),
        emit=Fanout([emit, listener]),
        clock=time.monotonic,
        **(ports or {}),
    )
    mount = build(settings or GatewaySettings(drain_s=0.2), made)
    await mount.start()
    server = await serve(mount.routes, origin_check=True)
    try:
        yield House(f"http://127.0.0.1:{server.port}", server.port, emit)
    finally:
        await mount.stop()
        await server.close()

"""Settings and ports in, the text way out: routes with a symmetric start and stop, for both houses."""

from __future__ import annotations

from gateway.front import Front
from gateway.pipeline import TextWay
from gateway.settings import GatewayPorts, GatewaySettings
from links.port import Mount

__all__ = ["GatewayPorts", "build"]


def build(settings: GatewaySettings, ports: GatewayPorts) -> Mount:
    """The text way. Engines belong to the house: stop() ends answers and closes no engine."""
    way = TextWay(settings, ports)
    channel = ports.channel
    frame_routes = (channel.route(),) if channel is not None else ()

    async def start() -> None:
        if channel is not None:
            await channel.start()

    async def stop() -> None:
        if channel is not None:
            await channel.stop()
        await way.stop()

    return Mount(routes=Front(way, ports.wall).routes(), frame_routes=frame_routes, start=start, stop=stop)

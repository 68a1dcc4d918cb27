"""A real TLS server with the coordinator's own authority and join endpoint, for tests of the agent."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

from cloud_stub.authority import Authority, ensure_certificates, open_authority
from cloud_stub.enrolment import BrokerAddress, Enrolment
from cloud_stub.join_secrets import JoinSecrets
from cloud_stub.registry import SqliteRegistry
from links.http_server import RunningServer, serve
from links.mqtt import MqttChannel, MqttSettings
from links.port import FrameRoute, Request, Response, Route
from links.tls import client_context, server_context
from protocol.clock import wall_now
from protocol.decode import decode, encode
from protocol.documents import CoordinatorState, JoinRequest
from protocol.topics import coord_state
from protocol.trust import JoinToken


class JoinableCoordinator:
    """Authority, secrets and a TLS server; `token()` invites a device."""

    def __init__(self, folder: Path, fleet: str = "default") -> None:
        now_s = time.time()
        self.authority: Authority = open_authority(folder / "roots", fleet, now_s)
        ensure_certificates(self.authority, ["127.0.0.1"], now_s)
        self.registry = SqliteRegistry(folder / "registry.db")
        self.secrets = JoinSecrets(folder / "join.json", time.monotonic)
        self.joins = 0
        self.broker_port = 1
        self.enrolment = Enrolment(
            self.authority, self.secrets, self.registry, lambda: BrokerAddress(None, self.broker_port), wall_now
        )
        self.server: RunningServer | None = None

    async def start(self, routes: Sequence[Route] = (), frame_routes: Sequence[FrameRoute] = (), port: int = 0) -> None:
        context = server_context(
            self.authority.server_file, self.authority.server_file, self.authority.roots_file, require_client=False
        )
        own = [
            Route("POST", "/midstream/v1/join", self._join),
            Route("GET", "/healthz", self._healthz, max_body_bytes=0),
        ]
        self.server = await serve([*own, *routes], frame_routes, ssl=context, port=port)

    async def _join(self, request: Request) -> Response:
        self.joins += 1
        answer = await self.enrolment.join(decode(JoinRequest, request.body, what="join request"))
        return Response(headers={"content-type": "application/json"}, body=encode(answer))

    async def _healthz(self, request: Request) -> Response:
        return Response(body=b"{}")

    async def announce(self, broker_port: int) -> None:
        """Publish our address on the broker, as the coordinator does."""
        own = self.authority.own_file
        context = client_context(self.authority.ca_pem, own, own)
        channel = MqttChannel(MqttSettings("127.0.0.1", broker_port, "coordinator", ssl=context))
        state = CoordinatorState(
            addresses=("127.0.0.1",), port=self.port, broker_port=broker_port, fingerprint="", epoch=1
        )
        up = asyncio.Event()
        channel.start()
        channel.watch(lambda state: up.set() if state == "up" else None)
        await asyncio.wait_for(up.wait(), 10)
        await channel.publish(coord_state(self.authority.fleet), encode(state), retain=True)
        await channel.close()

    @property
    def port(self) -> int:
        assert self.server is not None
        return self.server.port

    def token(self, fingerprint: str | None = None, secret: str | None = None) -> JoinToken:
        return JoinToken(
            host="127.0.0.1",
            port=self.port,
            ca_fingerprint=fingerprint or self.authority.ca_fingerprint,
            policy_key=next(iter(self.authority.policy_keys.values())),
            secret=secret or self.secrets.mint(60.0, time.time()),
        )

    async def stop(self) -> None:
        if self.server is not None:
            await self.server.close()
        self.registry.close()

"""A coordinator started for one test: loopback, free ports, and the links that the test opens to it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from attrs import define, field

from cloud_stub.compose import CoordinatorHouse
from cloud_stub.config import CoordinatorConfig
from links.http import HttpLink
from links.port import Reply
from links.tls import client_context
from protocol.decode import decode, encode
from protocol.documents import JoinAnswer, JoinRequest
from protocol.trust import decode_join
from tests.unit.cloud_stub.device_side import DeviceKey, new_device

JSON = {"content-type": "application/json"}


def settings(folder: Path, **changes: Any) -> CoordinatorConfig:
    """Loopback, free ports, no models, no mDNS."""
    values: dict[str, Any] = {
        "state_dir": folder / "coordinator", "models_dir": folder / "models", "host": "127.0.0.1", "port": 0,
        "broker_port": 0, "mdns": False, "text_engine": "none",
    }  # fmt: skip
    return CoordinatorConfig(**(values | changes))


@define(eq=False)
class Running:
    """A started coordinator and the links that a test opened to it."""

    house: CoordinatorHouse
    folder: Path
    records: list[dict[str, Any]]
    links: list[HttpLink] = field(factory=list)

    def link(self, files: tuple[Path, Path] | None = None, key: str | None = None) -> HttpLink:
        context = client_context(self.house.authority.ca_pem, *(files or (None, None)))
        headers = {"authorization": f"Bearer {key}"} if key else {}
        link = HttpLink("c", f"https://127.0.0.1:{self.house.port}", ssl=context, headers=headers)
        self.links.append(link)
        return link

    async def get(self, path: str, **who: Any) -> Reply:
        return await self.link(**who).exchange(path, {}, b"", 5, method="GET")

    async def join(self, device: DeviceKey, secret: str | None = None) -> Reply:
        if secret is None:
            secret = decode_join(self.house.join_string()).secret
        request = JoinRequest(secret=secret, device_id=device.device_id, csr_pem=device.csr_pem)
        return await self.link().exchange("/midstream/v1/join", JSON, encode(request), 5)

    async def member(self, device_id: str = "pi-1") -> tuple[Path, Path]:
        """Certificate and key files of a device that has joined."""
        device = new_device(device_id)
        reply = await self.join(device)
        assert reply.status == 200, reply.body
        return device.write(self.folder, decode(JoinAnswer, reply.body, what="answer").cert_pem)

    async def close(self) -> None:
        for link in self.links:
            await link.close()
        await self.house.stop()


@contextlib.asynccontextmanager
async def running(folder: Path, **changes: Any) -> AsyncIterator[Running]:
    records: list[dict[str, Any]] = []
    house = CoordinatorHouse(settings(folder, **changes), lambda record: records.append(dict(record)))
    await house.start()
    found = Running(house, folder, records)
    try:
        yield found
    finally:
        await found.close()

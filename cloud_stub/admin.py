"""The operator's endpoints under /midstream/v1/admin, for the command line: policy, devices, join strings."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

from cloud_stub.coordinator import Coordinator
from cloud_stub.policy_files import FORMS
from cloud_stub.publishing import MAX_POLICY_BYTES, Published, Publisher, as_document, selects
from cloud_stub.registry import DeviceRegistry, summary
from links.port import Request, Response, Route
from protocol.clock import WallClock
from protocol.errors import BadRequest, NotFound

ADMIN = "/midstream/v1/admin"


class AdminApi:
    """Routes over the coordinator's parts.

    mint: makes a join string that lives for the given seconds, in a thread. end_sessions: ends what a device has open.
    """

    def __init__(
        self,
        registry: DeviceRegistry,
        publisher: Publisher,
        coordinator: Coordinator,
        mint: Callable[[float | None], str],
        end_sessions: Callable[[str], Awaitable[None]],
        wall: WallClock,
    ) -> None:
        self._registry = registry
        self._publisher = publisher
        self._coordinator = coordinator
        self._mint = mint
        self._end_sessions = end_sessions
        self._wall = wall
        self._one_at_a_time = asyncio.Lock()

    def routes(self) -> list[Route]:
        """All of them take and give JSON, the policy upload apart."""
        return [
            Route("POST", f"{ADMIN}/policy", self._publish, max_body_bytes=MAX_POLICY_BYTES + 1),
            Route("GET", f"{ADMIN}/policy", self._history),
            Route("GET", f"{ADMIN}/policy/{{version}}", self._version),
            Route("POST", f"{ADMIN}/policy/{{version}}/rollback", self._rollback, max_body_bytes=1024),
            Route("GET", f"{ADMIN}/devices", self._devices),
            Route("DELETE", f"{ADMIN}/devices/{{device_id}}", self._forget, max_body_bytes=1024),
            Route("POST", f"{ADMIN}/devices/{{device_id}}/revoke", self._revoke, max_body_bytes=1024),
            Route("POST", f"{ADMIN}/token", self._token, max_body_bytes=1024),
        ]

    async def _publish(self, request: Request) -> Response:
        name = request.query.get("form", "toml")
        form = next((one for one in FORMS if one == name), None)
        if form is None:
            raise BadRequest(f"form is {name[:16]!r}, not {', '.join(FORMS)}", field="form")
        async with self._one_at_a_time:
            published = self._publisher.publish(request.body, form, request.query.get("note", ""))
        return self._sent(published)

    async def _rollback(self, request: Request) -> Response:
        async with self._one_at_a_time:
            published = self._publisher.rollback(_number(request))
        return self._sent(published)

    def _sent(self, published: Published) -> Response:
        self._coordinator.refresh()
        chosen = [name for name, labels in self._registry.labels().items() if selects(published.policy, labels)]
        return _json(as_document(published) | {"devices": chosen, "broker": self._coordinator.broker_state})

    async def _history(self, request: Request) -> Response:
        return _json({"policies": [as_document(found) for found in self._publisher.history()]})

    async def _version(self, request: Request) -> Response:
        return _json(as_document(self._publisher.version(_number(request))))

    async def _devices(self, request: Request) -> Response:
        now_s = self._wall().unix_s
        devices = [summary(device, now_s) for device in self._registry.devices()]
        return _json({"devices": devices, "broker": self._coordinator.broker_state})

    async def _forget(self, request: Request) -> Response:
        device_id = self._known(request)
        self._registry.forget(device_id)
        await self._end_sessions(device_id)
        await self._coordinator.forget(device_id)
        return _json({"forgotten": device_id})

    async def _revoke(self, request: Request) -> Response:
        device_id = self._known(request)
        self._registry.revoke(device_id)
        await self._end_sessions(device_id)
        return _json({"revoked": device_id})

    def _known(self, request: Request) -> str:
        device_id = request.params["device_id"]
        if self._registry.device(device_id) is None:
            raise NotFound(f"no device {device_id[:64]!r}", next_step="see midstream fleet list", field="device_id")
        return device_id

    async def _token(self, request: Request) -> Response:
        text = request.query.get("life_s")
        try:
            life_s = float(text) if text is not None else None
        except ValueError as err:
            raise BadRequest(f"life_s is {text!r}", next_step="give seconds", field="life_s") from err
        if life_s is not None and not 60 <= life_s <= 30 * 86_400:
            raise BadRequest("life_s must be from 60 seconds to 30 days", field="life_s")
        return _json({"join": await asyncio.to_thread(self._mint, life_s)})


def _number(request: Request) -> int:
    text = request.params["version"]
    if not (text.isascii() and text.isdigit() and len(text) <= 9):
        raise BadRequest(f"version is {text[:32]!r}", next_step="give the number of a version", field="version")
    return int(text)


def _json(document: dict[str, Any]) -> Response:
    return Response(headers={"content-type": "application/json"}, body=json.dumps(document).encode())

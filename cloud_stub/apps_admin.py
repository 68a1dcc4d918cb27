"""The operator's endpoints for connected apps, under /midstream/v1/admin/apps."""

from __future__ import annotations

import json
import uuid
from typing import Any, Literal

from attrs import frozen

from gateway.control_channel import ControlChannel
from gateway.result_store import ResultStore
from links.port import Request, Response, Route
from protocol.control_frames import Instruction
from protocol.decode import decode, plain
from protocol.errors import BadRequest

MAX_BODY_BYTES = 8 << 10
MAX_RESULTS = 1_000


@frozen
class InstructWish:
    """Body of POST /apps/instruct. tenant, session: to whom; absent: to all."""

    do: Literal["route", "switch", "warm"]
    target: str = ""
    model: str = ""
    tenant: str | None = None
    session: str | None = None
    reason: str = ""


class AppsApi:
    """Routes over the control channel and its results."""

    def __init__(self, channel: ControlChannel, results: ResultStore, prefix: str) -> None:
        self._channel = channel
        self._results = results
        self._prefix = f"{prefix}/apps"

    def routes(self) -> list[Route]:
        """All of them take and give JSON."""
        return [
            Route("GET", self._prefix, self._list, max_body_bytes=0),
            Route("GET", f"{self._prefix}/{{session}}/results", self._told, max_body_bytes=0),
            Route("POST", f"{self._prefix}/instruct", self._instruct, max_body_bytes=MAX_BODY_BYTES),
        ]

    async def _list(self, request: Request) -> Response:
        return _json({"apps": [plain(session) for session in self._channel.sessions], "reaped": self._channel.reaped})

    async def _told(self, request: Request) -> Response:
        """The last results of one session; `after` leaves out those up to a number."""
        after = request.query.get("after", "0")
        if not after.isdecimal() or len(after) > 12:
            raise BadRequest("after is no number", field="after")
        tenant = request.query.get("tenant", "local")
        found = await self._results.results(tenant, request.params["session"], int(after), MAX_RESULTS + 1)
        return _json({"results": [plain(result) for result in found[:MAX_RESULTS]], "more": len(found) > MAX_RESULTS})

    async def _instruct(self, request: Request) -> Response:
        wish = decode(InstructWish, request.body, what="the instruction", max_bytes=MAX_BODY_BYTES)
        if wish.do != "route" and not wish.model:
            raise BadRequest(f"{wish.do} needs a model", next_step="name it", field="model")
        if wish.do == "route" and not wish.target:
            raise BadRequest("route needs a target", next_step="name an engine, for example device", field="target")
        number = uuid.uuid4().hex[:12]
        order = Instruction(id=number, do=wish.do, target=wish.target, model=wish.model, reason=wish.reason)
        return _json({"id": number, "apps": await self._channel.instruct(order, wish.tenant, wish.session)})


def _json(document: dict[str, Any]) -> Response:
    return Response(200, {"content-type": "application/json"}, json.dumps(document).encode())

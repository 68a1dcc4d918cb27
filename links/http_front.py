"""From a request to an answer, whoever read it from the socket: origin, route, bounds, handler, errors."""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable, Mapping

from attrs import define, frozen

from links.origin import check_origin
from links.port import FrameRoute, Request, Response
from links.router import Matched, Router
from protocol.errors import Full, MidstreamError, NotAllowed, RejectedError, TooLarge

log = logging.getLogger("midstream.links.http_server")

OnError = Callable[[Request, MidstreamError], Response]
"""Shapes an error into the house's answer; must not raise."""

CLOSING_STATUSES = frozenset({408, 413})
"""After these the rest of a body may still come: the connection cannot carry another request."""


class BodyTooSlow(RejectedError):
    """The body did not arrive in time."""

    http_status = 408
    code = "request_timeout"


@frozen
class ServerLimits:
    """What one peer may take. Seconds are waits, not totals, unless they say so."""

    connections: int = 256
    header_s: float = 15.0
    body_chunk_s: float = 20.0
    body_total_s: float = 300.0
    keep_idle_s: float = 75.0
    write_s: float = 60.0
    heartbeat_s: float = 20.0


def plain_error(request: Request, error: MidstreamError) -> Response:
    """`{"error": {"message", "code", "field"}}` with the family's status."""
    document = {"error": {"message": str(error), "code": error.code, "field": error.field}}
    headers = {"content-type": "application/json"}
    if isinstance(error, Full):
        headers["retry-after"] = str(max(1, round(error.retry_after_s)))
    return Response(status=error.http_status, headers=headers, body=json.dumps(document).encode())


@define(eq=False)
class Front:
    """Routes and the house's form of errors. port: the one that is listened on, for the check of origins."""

    router: Router
    on_error: OnError
    limits: ServerLimits
    origin_check: bool
    port: int = 0

    def matched(self, request: Request, upgrade: bool = False) -> Matched:
        """The route of a request. Raises NotAllowed for foreign web pages, RouteNotFound, MethodNotAllowed."""
        if self.origin_check:
            refused = check_origin(request.headers, self.port)
            if refused is not None:
                raise NotAllowed(refused.message, next_step=refused.next_step, field=refused.header)
        return self.router.find(request.method, request.path, upgrade)

    async def answer(self, request: Request) -> Response:
        """The answer to a request whose body is here. Only cancellation leaves it."""
        return await self.guarded(request, self._handled(request))

    async def guarded(self, request: Request, handling: Awaitable[Response]) -> Response:
        """What `handling` gives, or the answer that says why not."""
        try:
            return await handling
        except MidstreamError as err:
            return self.on_error(request, err)
        except Exception:
            log.exception("handler of %s %s failed", request.method, request.path)
            return self.on_error(request, MidstreamError("internal error", next_step="see the log of this process"))

    async def _handled(self, request: Request) -> Response:
        matched = self.matched(request)
        assert not isinstance(matched.route, FrameRoute), "those need an upgrade"
        size_bytes, limit = len(request.body), matched.route.max_body_bytes
        if size_bytes > limit:
            raise TooLarge(f"the body has {size_bytes} bytes, at most {limit} are taken here")
        return await matched.route.handle(with_body(request, matched.params, request.body))


def with_body(request: Request, params: Mapping[str, str], body: bytes) -> Request:
    """The request with what is known later. Not by evolve(), which costs ten times as much, once per request."""
    if body is request.body and not params:
        return request
    return Request(
        method=request.method,
        path=request.path,
        headers=request.headers,
        params=params,
        query=request.query,
        body=body,
        peer=request.peer,
        peer_der=request.peer_der,
        remote=request.remote,
    )

"""GET /midstream/v1/split/{model}: what `midstream split explain` and `status` are made of."""

from __future__ import annotations

from collections.abc import Mapping

from links.port import Request, Response, Route
from protocol.decode import encode
from protocol.errors import MidstreamError, NotFound
from protocol.oip import error_body
from split_models.runner import Runner

PATH = "/midstream/v1/split/"


def report_route(runners: Mapping[str, Runner]) -> Route:
    """The route over a house's runners by model name; read at each request."""

    async def report(request: Request) -> Response:
        try:
            body = encode(_runner(runners, request.params["model"]).report())
        except MidstreamError as err:
            status, headers, body = error_body(err)
            return Response(status, headers, body)
        return Response(200, {"content-type": "application/json"}, body)

    return Route("GET", PATH + "{model}", report, max_body_bytes=0)


def _runner(runners: Mapping[str, Runner], name: str) -> Runner:
    found = runners.get(name)
    if found is None:
        known = ", ".join(runners) or "none"
        raise NotFound(
            f"no model {name[:100]!r} with arms to choose from", next_step=f"models with arms: {known}", field="model"
        )
    return found

"""Finds the Route of a method and path; pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from urllib.parse import unquote

from attrs import frozen

from links.port import FrameRoute, Route
from protocol.errors import NotFound, RejectedError


class RouteNotFound(NotFound):
    """No route has this path."""

    code = "not_found"


class MethodNotAllowed(RejectedError):
    """The path exists, the method does not."""

    http_status = 405
    code = "method_not_allowed"


@frozen
class Matched:
    """A route and what its path's `{name}` segments hold (percent-decoded)."""

    route: Route | FrameRoute
    params: Mapping[str, str]


class Router:
    """Exact method and path; `{name}` matches one segment. HEAD is answered by the GET route."""

    def __init__(self, routes: Sequence[Route], frame_routes: Sequence[FrameRoute] = ()) -> None:
        self._routes = [(_pattern(route.path), route.method.upper(), route) for route in routes]
        self._frames = [(_pattern(route.path), route) for route in frame_routes]
        self._plain = self._unmistakable()

    def _unmistakable(self) -> dict[tuple[str, str], Matched]:
        """Paths without parameters that no route before them takes: most requests, found at once."""
        found: dict[tuple[str, str], Matched] = {}
        for number, (_, method, route) in enumerate(self._routes):
            before = self._routes[:number]
            if "{" not in route.path and not any(m == method and p.fullmatch(route.path) for p, m, _ in before):
                found[method, route.path] = Matched(route, {})
        return found

    def find(self, method: str, path: str, upgrade: bool) -> Matched:
        """The first route that fits; frame routes need `upgrade`. Raises RouteNotFound or MethodNotAllowed."""
        plain = None if upgrade else self._plain.get((method, path))
        if plain is not None:
            return plain
        allowed = set()
        for pattern, route_method, route in self._routes:
            found = pattern.fullmatch(path)
            if found is not None and not upgrade:
                if route_method == method or (method == "HEAD" and route_method == "GET"):
                    return Matched(route, _params(found))
                allowed.add(route_method)
        for pattern, frame_route in self._frames:
            found = pattern.fullmatch(path)
            if found is not None:
                if upgrade:
                    return Matched(frame_route, _params(found))
                allowed.add("a WebSocket upgrade")
        if allowed:
            raise MethodNotAllowed(f"{path} does not take {method}", next_step=f"use {' or '.join(sorted(allowed))}")
        raise RouteNotFound(f"there is nothing at {path[:200]}", next_step=self._near(path))

    def _near(self, path: str) -> str:
        """What may have been meant: the same path with or without the beginning that a base URL brings."""
        known = sorted({route.path for _, _, route in self._routes if "{" not in route.path})
        end = path.rstrip("/")
        meant = [name for name in known if end.count("/") and (name.endswith(end) or end.endswith(name))]
        if end and meant:
            return f"did you mean {' or '.join(meant[:3])}?"
        roots = sorted({"/" + route.path.split("/")[1] for _, _, route in self._routes})
        return f"paths here begin with {', '.join(roots)}" if roots else ""


def _pattern(path: str) -> re.Pattern[str]:
    pieces = re.split(r"\{(\w+)\}", path)
    return re.compile("".join(f"(?P<{p}>[^/]+)" if i % 2 else re.escape(p) for i, p in enumerate(pieces)))


def _params(found: re.Match[str]) -> dict[str, str]:
    return {name: unquote(value) for name, value in found.groupdict().items()}

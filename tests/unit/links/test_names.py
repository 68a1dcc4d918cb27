"""The small pure parts: topic filters, routes, Host and Origin."""

from __future__ import annotations

import pytest

from links.origin import check_origin, is_loopback
from links.port import FrameRoute, FrameStream, Request, Response, Route
from links.router import MethodNotAllowed, RouteNotFound, Router
from links.topic_filter import matches


@pytest.mark.parametrize(
    ("pattern", "topic", "expected"),
    [
        ("a/b", "a/b", True),
        ("a/b", "a/c", False),
        ("a/b", "a", False),
        ("a", "a/b", False),
        ("a/+", "a/b", True),
        ("a/+", "a/", True),
        ("a/+", "a/b/c", False),
        ("+/+", "a/b", True),
        ("a/#", "a/b/c", True),
        ("a/#", "a", True),
        ("a/#", "ab", False),
        ("#", "a/b", True),
        ("#", "$SYS/load", False),
        ("+/load", "$SYS/load", False),
        ("$SYS/#", "$SYS/load", True),
        ("+", "", True),
    ],
)
def test_filters_match_as_mqtt_says(pattern: str, topic: str, expected: bool) -> None:
    assert matches(pattern, topic) is expected


async def _handle(request: Request) -> Response:
    return Response()


async def _frames(request: Request, stream: FrameStream) -> None:
    return None


ROUTER = Router(
    [Route("GET", "/v2/models/{model}", _handle), Route("POST", "/v2/models/{model}/infer", _handle)],
    [FrameRoute("/handoff/{id}", _frames)],
)


def test_parameters_are_one_decoded_segment() -> None:
    assert ROUTER.find("GET", "/v2/models/a%2Fb", upgrade=False).params == {"model": "a/b"}
    assert ROUTER.find("HEAD", "/v2/models/x", upgrade=False).params == {"model": "x"}
    assert ROUTER.find("GET", "/handoff/7", upgrade=True).params == {"id": "7"}


@pytest.mark.parametrize("path", ["/v2/models/", "/v2/models/a/b", "/v2/models/a/infer/", "/", "", "/V2/models/a"])
def test_other_paths_are_not_found(path: str) -> None:
    with pytest.raises(RouteNotFound):
        ROUTER.find("GET", path, upgrade=False)


def test_a_base_url_that_is_too_short_or_too_long_is_told_what_was_meant() -> None:
    router = Router([Route("POST", "/v1/chat/completions", _handle), Route("GET", "/v2/models/{model}", _handle)])
    for path in ("/chat/completions", "/v1/v1/chat/completions", "/v1/chat/completions/", "/completions"):
        with pytest.raises(RouteNotFound) as missed:
            router.find("POST", path, upgrade=False)
        assert missed.value.next_step == "did you mean /v1/chat/completions?"
    for path in ("/", "", "//", "/v2", "x"):
        with pytest.raises(RouteNotFound) as missed:
            router.find("GET", path, upgrade=False)
        assert missed.value.next_step == "paths here begin with /v1, /v2"
    assert Router([])._near("/") == ""


@pytest.mark.parametrize(
    ("method", "path", "upgrade"),
    [("DELETE", "/v2/models/a", False), ("GET", "/v2/models/a/infer", False), ("GET", "/handoff/1", False)],
)
def test_wrong_methods_name_the_right_one(method: str, path: str, upgrade: bool) -> None:
    with pytest.raises(MethodNotAllowed) as refusal:
        ROUTER.find(method, path, upgrade=upgrade)
    assert refusal.value.next_step.startswith("use ")


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST.", "agent.localhost", "127.0.0.1", "127.9.9.9", "[::1]", "::1"]
)
def test_loopback_names(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize(
    "host", ["", "localhost.evil.example", "127.0.0.1.nip.io", "0.0.0.0", "10.0.0.1", "2130706433"]
)
def test_names_that_are_not_loopback(host: str) -> None:
    assert not is_loopback(host)


@pytest.mark.parametrize(
    ("headers", "refused"),
    [
        ({"host": "127.0.0.1:8790"}, None),
        ({"host": "localhost:8790", "origin": "http://127.0.0.1:1234"}, None),
        ({"host": "[::1]:8790"}, None),
        ({"host": "localhost:8791"}, "host"),
        ({"host": "localhost"}, "host"),
        ({"host": "localhost:port"}, "host"),
        ({"host": "user@localhost:8790"}, "host"),
        ({"host": "localhost:8790/x"}, "host"),
        ({}, "host"),
        ({"host": "localhost:8790", "origin": "http://localhost.evil.example"}, "origin"),
        ({"host": "localhost:8790", "origin": "file://"}, "origin"),
        ({"host": "localhost:8790", "origin": ""}, "origin"),
        ({"host": "localhost:8790", "origin": "http://[bad"}, "origin"),
    ],
)
def test_host_and_origin(headers: dict[str, str], refused: str | None) -> None:
    found = check_origin(headers, 8790)
    assert (found.header if found else None) == refused

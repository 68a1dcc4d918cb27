"""The loop that was asked for runs what it is given, the lean client on it too."""

from __future__ import annotations

import asyncio
import gc
import importlib.util

import pytest

from links.event_loop import LoopKind, run_on, settle
from links.http_lean import LeanHttpLink
from links.http_server import serve
from links.port import Request, Response, Route
from protocol.errors import ConfigError

HAS_UVLOOP = importlib.util.find_spec("uvloop") is not None


async def exchange() -> tuple[str, bytes]:
    async def echo(request: Request) -> Response:
        return Response(200, {}, request.body)

    server = await serve([Route("POST", "/echo", echo)])
    link = LeanHttpLink("peer", f"http://127.0.0.1:{server.port}")
    try:
        return type(asyncio.get_running_loop()).__module__, (await link.exchange("/echo", {}, b"hello", 5.0)).body
    finally:
        await link.close()
        await server.close()


@pytest.mark.parametrize("kind", ["asyncio", "uvloop"])
def test_it_runs_on_the_loop_that_was_asked_for(kind: LoopKind) -> None:
    if kind == "uvloop" and not HAS_UVLOOP:
        with pytest.raises(ConfigError, match="not installed"):
            run_on(kind, exchange())
        return
    module, body = run_on(kind, exchange())
    assert module.partition(".")[0] == kind and body == b"hello"


def test_auto_is_the_faster_loop_where_it_is_installed() -> None:
    module, body = run_on("auto", exchange())
    assert module.partition(".")[0] == ("uvloop" if HAS_UVLOOP else "asyncio") and body == b"hello"


def test_what_is_there_after_the_start_is_not_looked_at_for_garbage_again() -> None:
    before = gc.get_threshold()
    try:
        settle()
        assert gc.get_freeze_count() > 0
        assert gc.get_threshold()[0] > before[0]
    finally:
        gc.unfreeze()
        gc.set_threshold(*before)

"""The text side's own composition: the key of a server by URL, rates from the profile, the way of the data link."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agent.cloud_link import CloudLink
from agent.compose_text import TextSide
from agent.discovery import Candidate
from agent.health import Health
from engines.catalogue import load_catalogue
from engines.registry import installed_engines
from engines.store import ModelStore
from gateway.targets import Target
from links.http_server import serve
from links.port import Request, Response, Route
from profiles.rates import Slowdowns
from protocol.device import Measured
from protocol.events import TransferSample
from protocol.policy import Policy
from tests.unit.agent.houses import RunningHouse, config_for

MODEL = "smollm2-135m"


def side_of(folder: Path, measured: Callable[[], tuple[Measured, ...]] = tuple, **flags: Any) -> TextSide:
    config = config_for(folder, **flags)
    store = ModelStore(config.models_dir, load_catalogue())
    cloud = CloudLink(lambda err: None)
    return TextSide(config, store, cloud, Health(time.monotonic), Policy, measured=measured, slowdowns=Slowdowns())


@pytest.mark.parametrize("engine", ["openai_compat", "llama_server"])
async def test_a_server_by_url_is_asked_with_the_configured_key(tmp_path: Path, engine: str) -> None:
    seen: list[str | None] = []

    async def refuse(request: Request) -> Response:
        seen.append(request.headers.get("authorization"))
        return Response(401, {}, b'{"error": {"message": "who are you?"}}')

    routes = [Route("POST", "/v1/chat/completions", refuse), Route("GET", "/props", refuse)]
    server = await serve(routes, host="127.0.0.1", port=0, origin_check=False)
    url = f"http://127.0.0.1:{server.port}"
    side = side_of(tmp_path, text_engine=engine, text_url=url, text_model="words", text_key="sk-1")
    try:
        await side.open()
    finally:
        await side.close()
        await server.close()
    assert seen and set(seen) == {"Bearer sk-1"}
    assert side.targets() == []


async def test_the_profile_tells_the_gateway_what_the_device_can_do(
    model_file: Callable[[str], Path], tmp_path: Path
) -> None:
    path = model_file(MODEL)
    flags = {"models_dir": str(path.parent.parent), "text_model": MODEL, "text_threads": 1, "context_tokens": 256}
    flags["text_stands_in_for"] = "large"
    kept: list[Measured] = []
    side = side_of(tmp_path, lambda: tuple(kept), **flags)
    digest = side._store.entry(MODEL).sha256

    def row(what: str, per_token_s: float, threads: int = 1, engine: str = "llama_server") -> Measured:
        return Measured(digest, engine, threads, what, 1.0, 0.0, per_token_s)

    def device() -> Target:
        (found,) = side.targets()
        return found

    kept += [row("prefill", 0.01), row("decode", 0.125), row("decode", 0.5, threads=4), row("prefill", 9.0, 1, "other")]
    try:
        await side.open()
        assert (device().prefill_tokens_per_s, device().tokens_per_s) == (100.0, 8.0)
        assert (device().engine_name, device().slowdowns) == ("llama_server", side._slowdowns)
        assert device().parameters == pytest.approx(134.5e6, rel=0.01)
        assert (device().models, device().weaker) == (frozenset({MODEL, "large"}), frozenset({"large"}))
        side.learn([row("decode", 0.25)])
        assert (device().prefill_tokens_per_s, device().tokens_per_s) == (None, 4.0)
    finally:
        await side.close()


@pytest.mark.parametrize(("other_s", "engine"), [(0.2, "llama_server"), (0.05, "llama_cpp")])
async def test_the_benchmark_chooses_binding_and_threads(
    model_file: Callable[[str], Path], tmp_path: Path, other_s: float, engine: str
) -> None:
    if engine == "llama_cpp" and engine not in installed_engines():
        pytest.skip("llama-cpp-python is not installed")
    flags = {"models_dir": str(model_file(MODEL).parent.parent), "text_model": MODEL, "context_tokens": 256}
    digest = load_catalogue()[MODEL].sha256
    rows = (
        Measured(digest, "llama_server", 1, "decode", 1.0, 0.0, 0.3),
        Measured(digest, "llama_server", 2, "decode", 1.0, 0.0, 0.1),
        Measured(digest, "llama_cpp", 1, "decode", 1.0, 0.0, 2 * other_s),
        Measured(digest, "llama_cpp", 2, "decode", 1.0, 0.0, other_s),
    )
    side = side_of(tmp_path, lambda: rows, **flags)
    try:
        await side.open()
        (device,) = side.targets()
        assert device.engine_name == engine
        assert device.tokens_per_s == pytest.approx(1 / min(0.1, other_s)), "of the two threads that are the fastest"
        names = {probe.name.split()[1] for probe in side.probes()}
        assert names == {"llama_server", "llama_cpp"} & set(installed_engines())
    finally:
        await side.close()


async def test_a_data_link_that_leads_elsewhere_is_measured_anew(tmp_path: Path) -> None:
    async with RunningHouse(config_for(tmp_path)) as agent:
        probe = agent.house.probe
        now_s = agent.house.clock()
        probe.add(TransferSample(at_s=now_s, link="cloud", direction="up", size_bytes=100_000, seconds=1.0))
        assert probe.view("cloud").samples == 1
        await agent.house.control._point_data(Candidate("127.0.0.1", 9, "static"))
        assert probe.view("cloud").samples == 0


async def test_both_ways_write_down_slow_downs_in_one_place(tmp_path: Path) -> None:
    async with RunningHouse(config_for(tmp_path)) as agent:
        house = agent.house
        assert house.texts._slowdowns is house.slowdowns is house.tensors._way._ports.slowdowns

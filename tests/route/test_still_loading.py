"""Models that are not ready yet: 503 with a time to come back, and listed only when they answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engines.catalogue import load_catalogue
from engines.fakes_text import FakeTextEngine
from engines.store import ModelStore
from gateway.mount import GatewayPorts, build
from gateway.settings import GatewaySettings
from gateway.targets import Target
from links.http import HttpLink
from links.http_server import serve
from links.port import Reply
from protocol.policy import Policy, PrivacyPolicy
from split_models.device_way import DeviceWay
from split_models.settings import SplitPorts, SplitSettings
from tests.tensor_house import engines
from tests.unit.agent.houses import RunningHouse, config_for

TEXT, IMAGES = "smollm2-135m", "ppocr-v2-cls"
JSON = {"content-type": "application/json"}


async def chat(link: HttpLink, model: str) -> Reply:
    body = {"model": model, "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
    return await link.exchange("/v1/chat/completions", JSON, json.dumps(body).encode(), 30)


async def listed(link: HttpLink) -> list[str]:
    reply = await link.exchange("/v1/models", {}, b"", 5, method="GET")
    return [model["id"] for model in json.loads(reply.body)["data"]]


async def test_an_agent_that_still_loads_its_text_model(model_file: Callable[[str], Path], tmp_path: Path) -> None:
    config = config_for(
        tmp_path, models_dir=str(model_file(TEXT).parent.parent), text_model=TEXT, text_threads=1, context_tokens=256,
        tensor_models=IMAGES,
    )  # fmt: skip
    async with RunningHouse(config) as agent:
        early = await chat(agent.link, TEXT)
        assert (early.status, early.headers["retry-after"]) == (503, "2")
        assert json.loads(early.body)["error"]["code"] == "model_loading"
        assert "still loading" in json.loads(early.body)["error"]["message"]
        assert (await agent.get(f"/v1/models/{TEXT}"))[0] == 503
        assert TEXT not in await listed(agent.link)
        assert (await chat(agent.link, "nope")).status == 404
        await agent.until(agent.house.texts.settled.is_set, 40)
        assert TEXT in await listed(agent.link)
        assert (await chat(agent.link, TEXT)).status == 200


async def test_a_text_model_that_cannot_be_loaded_is_not_loading_for_ever(tmp_path: Path) -> None:
    async with RunningHouse(config_for(tmp_path, text_model=TEXT)) as agent:
        await agent.until(agent.house.texts.settled.is_set)
        assert (await chat(agent.link, TEXT)).status == 404
        assert "text_model" in [warning.name for warning in agent.house.health.warnings]


@pytest.mark.parametrize(("local_only", "status"), [(False, 200), (True, 503)])
async def test_while_it_loads_the_cloud_answers_if_it_may(local_only: bool, status: int) -> None:
    policy = Policy(privacy=PrivacyPolicy(local_only=local_only))
    targets = [Target("cloud", False, FakeTextEngine(), frozenset({"fake"}))]
    mount = build(
        GatewaySettings(drain_s=0.1),
        GatewayPorts(targets=lambda: targets, policy=lambda: policy, loading=lambda: {"fake"}),
    )
    server = await serve(mount.routes, origin_check=True)
    link = HttpLink("house", f"http://127.0.0.1:{server.port}")
    try:
        assert (await chat(link, "fake")).status == status
    finally:
        await link.close()
        await mount.stop()
        await server.close()


class SlowStore(ModelStore):
    """A store whose list takes until it is let go."""

    def __init__(self, root: Path, go: Any) -> None:
        super().__init__(root, load_catalogue())
        self._go = go

    def list(self) -> Any:
        assert self._go.wait(10)
        return tuple(stored for stored in super().list() if stored.entry.name == IMAGES)


async def test_a_tensor_model_that_is_not_served_yet(model_file: Callable[[str], Path]) -> None:
    import threading

    go = threading.Event()
    store = SlowStore(model_file(IMAGES).parent.parent, go)
    parts = engines(store)
    way = DeviceWay(SplitSettings(), SplitPorts(local=parts.local, store=store, compute=parts.compute))
    server = await serve(way.mount.routes, origin_check=True)
    link = HttpLink("device", f"http://127.0.0.1:{server.port}")
    starting = asyncio.create_task(way.mount.start())
    try:
        early = await link.exchange(f"/v2/models/{IMAGES}/ready", {}, b"", 5, method="GET")
        assert (early.status, json.loads(early.body)["ready"]) == (503, False)
        body = json.dumps({"inputs": [{"name": "x", "shape": [1], "datatype": "FP32", "data": [1.0]}]}).encode()
        infer = await link.exchange(f"/v2/models/{IMAGES}/infer", JSON, body, 5)
        assert (infer.status, infer.headers["retry-after"]) == (503, "2")
        assert b"still loading" in infer.body
        for unknown in ("nope", TEXT):
            assert (await link.exchange(f"/v2/models/{unknown}/ready", {}, b"", 5, method="GET")).status == 404
        go.set()
        await starting
        ready = await link.exchange(f"/v2/models/{IMAGES}/ready", {}, b"", 5, method="GET")
        assert (ready.status, json.loads(ready.body)["ready"]) == (200, True)
    finally:
        go.set()
        await link.close()
        await server.close()
        await starting
        await way.mount.stop()
        await parts.close()

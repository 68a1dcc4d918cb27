"""A device that cannot reach its coordinator's port: both agree over the broker, and all goes over WebRTC."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from agent.enrolment import join
from agent.identity import IdentityStore
from cloud_stub.admin_client import AdminClient
from engines.remote_oip import RemoteEndpoint
from links.channel_link import ChannelLink
from links.shaped import ShaperProxy
from protocol.events import TensorDone, TransferSample
from protocol.oip import bytes_tensor
from protocol.sse import SseParser
from protocol.trust import decode_join
from tests.route.coordinator_house import JSON, Running, running
from tests.unit.agent.houses import RunningHouse, config_for

pytestmark = pytest.mark.timeout(240)

UNREACHABLE = "127.0.0.9"
"""A loopback address at which nobody listens."""

CLS, TEXT = "ppocr-v2-cls", "smollm2-135m"


def shelf(folder: Path, names: tuple[str, ...], model_file: Callable[[str], Path]) -> Path:
    """A model store that holds these models of the real one."""
    folder.mkdir(parents=True)
    for name in names:
        (folder / name).symlink_to(model_file(name).parent, target_is_directory=True)
    return folder


@contextlib.asynccontextmanager
async def behind_nat(folder: Path, coordinator: Running, **flags: Any) -> AsyncIterator[RunningHouse]:
    """An agent of the fleet to which every address of the coordinator is a dead end, and that reaches the broker."""
    token = evolve(decode_join(coordinator.house.join_string()), host="127.0.0.1")
    chosen = {"broker": f"127.0.0.1:{coordinator.house.broker_port}", "webrtc_addresses": "127.0.0.1"}
    config = config_for(folder, **(chosen | flags))
    store = IdentityStore(config.identity_dir)
    enrolment = await join(store, "pi", token)
    store.keep(evolve(enrolment, coordinator_host=UNREACHABLE))
    async with RunningHouse(config) as agent:
        yield agent


@contextlib.asynccontextmanager
async def unreachable(folder: Path, **changes: Any) -> AsyncIterator[Running]:
    """A coordinator that names only a dead address to devices."""
    async with running(folder, addresses=(UNREACHABLE,), webrtc_addresses=("127.0.0.1",), **changes) as coordinator:
        yield coordinator


async def test_the_second_way_comes_by_itself_with_the_rights_of_the_certificate(tmp_path: Path) -> None:
    async with unreachable(tmp_path) as coordinator, behind_nat(tmp_path / "device", coordinator) as agent:
        link = agent.house.webrtc.link
        await agent.until(lambda: link.available)
        status = await agent.status()
        assert (status["links"]["cloud"]["state"], status["cloud_available"]) == ("down", True)
        assert (status["links"]["webrtc"]["state"], status["links"]["webrtc"]["path"]) == ("up", "host-host")
        told = await link.exchange("/midstream/v1/status", {}, b"", 5, method="GET")
        assert (told.status, json.loads(told.body)["webrtc"]) == (200, 1)
        assert (await link.exchange("/midstream/v1/admin/devices", {}, b"", 5, method="GET")).status == 401
        await agent.until(lambda: agent.house.probe.view("webrtc").rtt_s is not None)
        control = agent.house.control.control
        assert control is not None
        await control.offer(b"noise")
        async with asyncio.timeout(10):
            while b"midstream_documents_dropped 1" not in (await link.exchange("/metrics", {}, b"", 5, "GET")).body:
                await asyncio.sleep(0.05)
        # No member any more: the way ends at once and is not made again.
        await AdminClient(coordinator.house.config.state_dir).ask("POST", "/devices/pi/revoke")
        await agent.until(lambda: not link.available)
        await asyncio.sleep(1.5)
        assert not link.available
        assert "webrtc" in agent.console.names()


async def test_tensors_and_text_are_answered_over_it(tmp_path: Path, model_file: Callable[[str], Path]) -> None:
    models = {"models_dir": shelf(tmp_path / "far", (CLS, TEXT), model_file), "text_engine": "llama_server"}
    near = {"models_dir": str(shelf(tmp_path / "near", (CLS,), model_file)), "slowdown": 60.0}
    picture = model_file("sample-page").read_bytes()
    async with unreachable(tmp_path, **models) as coordinator, behind_nat(tmp_path / "d", coordinator, **near) as agent:
        await agent.until(lambda: agent.house.webrtc.link.available)
        await agent.until(lambda: TEXT in agent.house.texts.cloud_models, 60)
        body = {"model": TEXT, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8, "temperature": 0}
        answer = await agent.link.exchange(
            "/v1/chat/completions", {"content-type": "application/json"}, json.dumps(body).encode(), 60
        )
        assert answer.status == 200, answer.body
        assert json.loads(answer.body)["usage"]["completion_tokens"] > 0
        endpoint = RemoteEndpoint(agent.link)
        done: list[TensorDone] = []
        async with asyncio.timeout(150):
            while not done or not done[-1].arm.startswith(("cloud", "cut")):
                await endpoint.infer(CLS, [bytes_tensor("image", [picture])], 30)
                done = [event for event in agent.console.events.events if isinstance(event, TensorDone)]
                await asyncio.sleep(0.2)
        wires = [event for event in agent.console.events.events if isinstance(event, TransferSample)]
        assert {event.link for event in wires} == {"webrtc"}
        assert max(event.size_bytes for event in wires) >= min(len(picture), 10_000)


async def test_of_two_ways_the_faster_measured_one_is_used(tmp_path: Path, model_file: Callable[[str], Path]) -> None:
    """The direct way is slow at first, so tensors take the other; when it is fast again they come back."""
    near = {"models_dir": str(shelf(tmp_path / "near", (CLS,), model_file)), "slowdown": 60.0}
    picture = model_file("sample-page").read_bytes()
    far = {"webrtc_addresses": ("127.0.0.1",), "models_dir": shelf(tmp_path / "far", (CLS,), model_file)}
    async with running(tmp_path, **far) as coordinator, contextlib.AsyncExitStack() as stack:
        proxy = ShaperProxy("127.0.0.1", coordinator.house.port, up_bytes_per_s=100_000, delay_s=0.05)
        await proxy.start()
        stack.push_async_callback(proxy.close)
        config = config_for(
            tmp_path / "device", join_token=coordinator.house.join_string(), webrtc="always",
            webrtc_addresses="127.0.0.1", data_proxy=f"127.0.0.1:{proxy.port}", **near,
        )  # fmt: skip
        policy = b"[split]\nexplore_one_in = 3\nperiod_s = 0.05\nperiods = 1\n"
        await AdminClient(coordinator.house.config.state_dir).ask("POST", "/policy", policy, {"form": "toml"})
        async with RunningHouse(config) as agent:
            await agent.until(lambda: agent.house.webrtc.link.available and agent.house.cloud.available)
            await agent.until(lambda: agent.house.holder.current().split.periods == 1)
            endpoint = RemoteEndpoint(agent.link)

            async def until_by_webrtc(wanted: bool) -> None:
                async with asyncio.timeout(100):
                    arm = ""
                    while not arm.startswith(("cloud", "cut")) or arm.endswith("@webrtc") != wanted:
                        await endpoint.infer(CLS, [bytes_tensor("image", [picture])], 30)
                        arm = [e.arm for e in agent.console.events.events if isinstance(e, TensorDone)][-1]
                        await asyncio.sleep(0.05)

            await until_by_webrtc(True)
            last = agent.house.tensors._way.runners[CLS].last
            assert last is not None and {str(entry.arm) for entry in last.ranking} >= {"cloud", "cloud@webrtc"}
            proxy.set_rate(float("inf"))
            proxy.set_delay(0.0)
            await until_by_webrtc(False)
            links = (await agent.status())["links"]
            assert {name: way["state"] for name, way in links.items()} == {"cloud": "up", "webrtc": "up"}
            assert min(way["samples"] for way in links.values()) > 0


async def test_an_answer_goes_on_over_the_other_way_when_its_own_breaks(
    tmp_path: Path, model_file: Callable[[str], Path]
) -> None:
    """The same coordinator, the same answer, the next token: only the wire is another."""
    far = {"webrtc_addresses": ("127.0.0.1",), "models_dir": shelf(tmp_path / "far", (TEXT,), model_file)}
    async with (
        running(tmp_path, text_engine="llama_server", **far) as coordinator,
        contextlib.AsyncExitStack() as stack,
    ):
        proxy = ShaperProxy("127.0.0.1", coordinator.house.port)
        await proxy.start()
        stack.push_async_callback(proxy.close)
        config = config_for(
            tmp_path / "device", join_token=coordinator.house.join_string(), webrtc="always",
            webrtc_addresses="127.0.0.1", data_proxy=f"127.0.0.1:{proxy.port}",
        )  # fmt: skip
        async with RunningHouse(config) as agent:
            await agent.until(lambda: agent.house.webrtc.link.available and agent.house.cloud.available)
            await agent.until(lambda: TEXT in agent.house.texts.cloud_models, 60)
            body = {"model": TEXT, "prompt": "Once upon a time", "max_tokens": 120, "temperature": 0, "stream": True}
            events: list[dict[str, Any]] = []
            cut_at = 0
            parser = SseParser()
            async for chunk in agent.link.lines("/v1/completions", JSON, json.dumps(body).encode(), 60):
                for event in parser.feed(chunk):
                    if not event.done:
                        events.append(json.loads(event.data))
                if len(events) >= 5 and not cut_at:
                    cut_at = len(events)
                    proxy.cut()
            marks = [event["midstream"] for event in events if "midstream" in event]
            assert [mark["index"] for mark in marks] == _running(mark["tokens"] for mark in marks)
            assert {mark["side"] for mark in marks} == {"cloud"}
            assert sum(mark["tokens"] for mark in marks) >= 100
            assert 5 <= cut_at < len(events) - 20
            over = agent.house.webrtc.link._link
            assert isinstance(over, ChannelLink) and over.idle_s() < 5.0, "the rest came over it"


def _running(counts: Iterable[int]) -> list[int]:
    """The index at which each run begins when none is missing or doubled."""
    return list(itertools.accumulate(counts, initial=0))[:-1]

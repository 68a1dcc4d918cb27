"""Smaller parts of the house: addresses, the advertisement, text engines and their handoff endpoint, access."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from cloud_stub.access import (
    OpenFrames,
    admin,
    bearer,
    error_response,
    fleet_member,
    guarded_frames,
    observer,
)
from cloud_stub.addresses import advertised, local_url_host
from cloud_stub.advert import SERVICE_TYPE, advertise, instance_name, txt_record
from cloud_stub.config import CoordinatorConfig
from cloud_stub.tails import ServedStore
from cloud_stub.text import TextHouse, open_engines, owner_of, queued
from engines.catalogue import load_catalogue
from engines.fakes_text import FakeTextEngine
from engines.peer import PeerEngine
from gateway.keys import KeyKind, KeyRecord, KeyTable, sha256_of
from links.memory import MemoryBrowser, MemoryLink, MemoryNetwork
from links.port import FrameRoute, FrameStream, Request
from links.service_record import MAX_TXT_BYTES, check_service
from protocol.clock import wall_now
from protocol.errors import Full, LinkError, NotAllowed, NotFound, Unauthenticated
from protocol.events import ignore
from protocol.openai_wire import error_body
from protocol.text import Sampling, TextRequest


def config(folder: Path, **changes: Any) -> CoordinatorConfig:
    return CoordinatorConfig(state_dir=folder, models_dir=folder / "models", **changes)


def test_addresses_are_those_configured_or_the_host_or_the_machines(tmp_path: Path) -> None:
    assert advertised(config(tmp_path, addresses=("cloud.lan", "10.0.0.9"))) == ("cloud.lan", "10.0.0.9")
    assert advertised(config(tmp_path, host="127.0.0.1")) == ("127.0.0.1",)
    found = advertised(config(tmp_path))
    assert found[-1] == "127.0.0.1", "loopback last: it means another machine elsewhere"
    assert len(set(found)) == len(found) <= 8
    assert [local_url_host(h) for h in ("0.0.0.0", "::", "10.0.0.1", "fd00::1")] == [
        "127.0.0.1", "127.0.0.1", "10.0.0.1", "[fd00::1]",
    ]  # fmt: skip


class Stubborn(MemoryBrowser):
    """A browser whose interface is not up at first."""

    failures = 2

    async def advertise(self, service_type: str, instance: str, port: int, txt: Mapping[str, str]) -> str:
        if self.failures:
            self.failures -= 1
            raise LinkError("no interface")
        return await super().advertise(service_type, instance, port, txt)


async def test_the_advertisement_holds_public_facts_and_is_tried_again() -> None:
    network, told = MemoryNetwork(), list[str]()
    txt = txt_record("coordinator", "lab", "ab" * 32, 8883)
    check_service(SERVICE_TYPE, instance_name("abc123-8791", "f" * 32), 8791, txt)
    assert sum(len(f"{k}={v}") + 1 for k, v in txt.items()) < MAX_TXT_BYTES
    await advertise(Stubborn(network), instance_name("a", "lab"), 8791, txt, told.append, retry_s=(0.01,))
    (found,) = await MemoryBrowser(network).browse(SERVICE_TYPE, 0.1)
    assert found.port == 8791
    assert found.txt == {"txtvers": "1", "id": "coordinator", "v": "1", "fl": "lab", "fp": "ab" * 8, "bp": "8883"}
    assert told == ["midstream lab a"]
    await advertise(MemoryBrowser(network), instance_name("a", "lab"), 8792, txt, told.append)
    assert told[1] != told[0], "a second coordinator of that name is renamed, not fatal"


def anyone(request: Request) -> str:
    return request.peer or "client"


async def test_handoff_serves_the_engine_of_the_model() -> None:
    house = TextHouse({"tiny": FakeTextEngine(answer_tokens=6)})
    link = MemoryLink("cloud", frame_routes=[house.handoff(anyone)], peer="pi-1")
    engine = PeerEngine(lambda: link.open("/midstream/v1/handoff"))
    continuation = await engine.prepare(TextRequest("tiny", "hello", Sampling(max_tokens=6)), 5)
    tokens = [token async for token in continuation.start(0, 64)]
    assert [token.index for token in tokens if token.data] == list(range(6))
    await continuation.close()
    with pytest.raises(NotFound, match="no text model"):
        await engine.prepare(TextRequest("huge", "hello"), 5)
    await engine.close()
    await link.close()
    await house.close()


async def test_a_device_that_is_no_member_any_more_gets_no_new_answer(tmp_path: Path) -> None:
    house, members = TextHouse({"tiny": FakeTextEngine(answer_tokens=6)}), {"pi-1"}
    link = MemoryLink(
        "cloud", frame_routes=[house.handoff(lambda r: r.peer if r.peer in members else None)], peer="pi-1"
    )
    engine = PeerEngine(lambda: link.open("/midstream/v1/handoff"))
    running = await engine.prepare(TextRequest("tiny", "hello", Sampling(max_tokens=6)), 5)
    members.clear()
    with pytest.raises(NotAllowed, match="no member"):
        await engine.prepare(TextRequest("tiny", "hello"), 5)
    assert len(house._streams.open) == 1
    await house.end("pi-2")
    assert len(house._streams.open) == 1, "another device's"
    await house.end("pi-1")
    assert not house._streams.open
    await running.close()
    await engine.close()
    await link.close()
    await house.close()


async def test_a_devices_frame_streams_are_known_while_they_are_open_and_end_together() -> None:
    opened = OpenFrames()

    async def echo(request: Request, stream: FrameStream) -> None:
        while (frame := await stream.receive()) is not None:
            await stream.send(frame)

    routes = guarded_frames([FrameRoute("/echo", echo)], anyone, opened)
    mine, other = (MemoryLink("cloud", frame_routes=routes, peer=peer) for peer in ("pi-1", "pi-2"))
    first, second, foreign = await mine.open("/echo"), await mine.open("/echo"), await other.open("/echo")
    for stream in (first, second, foreign):
        await stream.send(b"x")
        assert await stream.receive() == b"x"
    await opened.end("pi-1")
    assert [await stream.receive() for stream in (first, second)] == [None, None]
    await foreign.send(b"y")
    assert await foreign.receive() == b"y"
    await mine.close()
    await other.close()
    assert opened._open == {}


async def test_past_its_queue_the_cloud_refuses_a_stream_with_the_time_to_come_back(tmp_path: Path) -> None:
    inner = FakeTextEngine(answer_tokens=6, capacity=1)
    house = TextHouse({"tiny": queued(inner, config(tmp_path, text_slots=1, text_wait_target_s=0.01), "tiny")})
    link = MemoryLink("cloud", frame_routes=[house.handoff(anyone)], peer="pi-1")
    engine = PeerEngine(lambda: link.open("/midstream/v1/handoff")).for_model("tiny")
    try:
        running = await engine.prepare(TextRequest("tiny", "hello", Sampling(max_tokens=6)), 5)
        waiting = asyncio.create_task(engine.prepare(TextRequest("tiny", "hello"), 5))
        while house.engine_for("tiny").load().waiting == 0:
            await asyncio.sleep(0.005)
        with pytest.raises(Full) as full:
            await engine.prepare(TextRequest("tiny", "hello"), 5)
        assert full.value.retry_after_s > 0
        assert [token.index async for token in running.start(0, 64) if token.data] == list(range(6))
        await (await waiting).close()
    finally:
        await engine.close()
        await link.close()
        await house.close()


async def test_the_front_has_one_local_target() -> None:
    house = TextHouse({"tiny": FakeTextEngine()})
    (target,) = house.targets()
    assert (target.name, target.local, target.models) == ("cloud", True, frozenset({"tiny"}))
    front = house.front(ignore)
    await front.start()
    assert "/v1/chat/completions" in {route.path for route in front.routes}
    await front.stop()
    await house.close()


def test_text_says_why_there_is_none(tmp_path: Path) -> None:
    store = ServedStore(tmp_path / "models", load_catalogue(), lambda name: True)
    engines, why = open_engines(config(tmp_path), store)
    assert engines == {} and "models pull" in why
    assert open_engines(config(tmp_path, text_engine="none"), store)[1] == "text is switched off"


def request(headers: Mapping[str, str] | None = None, peer: str | None = None, path: str = "/v1/models") -> Request:
    return Request("GET", path, headers or {}, peer=peer)


def test_who_is_who() -> None:
    def key(text: str, kind: KeyKind) -> KeyRecord:
        return KeyRecord(f"{kind}-1", kind, "default", sha256_of(text), 0.0)

    keys = KeyTable(wall_now, [key("good", "invoke"), key("boss", "admin")])

    def is_device(name: str, der: bytes | None) -> bool:
        return name != "revoked"

    member, watcher, operator = fleet_member(is_device, keys), observer(is_device, keys), admin(keys)
    for check in (member, watcher):
        assert check(request(peer="pi-1")) == "pi-1"
        assert check(request(peer="revoked")) is None
    assert operator(request(peer="pi-1")) is None
    assert member(request({"authorization": "Bearer good"})) == "invoke-1"
    assert member(request({"authorization": "bearer  good "})) == "invoke-1"
    assert watcher(request({"authorization": "Bearer boss"})) == "admin-1"
    assert operator(request({"authorization": "Bearer boss"})) == "admin-1"
    with pytest.raises(NotAllowed, match="admin keys cannot invoke"):
        member(request({"authorization": "Bearer boss"}))
    for check in (watcher, operator):
        with pytest.raises(NotAllowed, match="neither bills nor configuration"):
            check(request({"authorization": "Bearer good"}))
    for check in (member, watcher, operator):
        for wrong in ("Basic good", "good", "", "Bearer " + "x" * 300, "Bearer "):
            assert check(request({"authorization": wrong})) is None, wrong
        with pytest.raises(Unauthenticated):
            check(request({"authorization": "Bearer bad"}))
    assert bearer(request()) is None
    assert owner_of(request(peer="pi-1")) == "device:pi-1"
    assert owner_of(request({"authorization": "Bearer a"})) != owner_of(request({"authorization": "Bearer b"}))
    assert "good" not in owner_of(request({"authorization": "Bearer good"}))


@pytest.mark.parametrize("path", ["/v2", "/v2/models/m/infer"])
def test_errors_of_oip_have_its_form(path: str) -> None:
    full = Full("busy", retry_after_s=2.0)
    answer = error_response(request(path=path), full)
    assert (answer.status, answer.headers["retry-after"]) == (503, "2")
    assert json.loads(bytes(answer.body)) == {"error": str(full)}  # type: ignore[arg-type]


@pytest.mark.parametrize("path", ["/v1/models", "/midstream/v1/join", "/v2x"])
def test_other_errors_have_openais_form(path: str) -> None:
    full = Full("busy", retry_after_s=2.0)
    answer = error_response(request(path=path), full)
    assert (answer.status, answer.headers["retry-after"]) == (503, "2")
    assert bytes(answer.body) == error_body(full)[2]  # type: ignore[arg-type]
    assert error_response(request(path=path), Unauthenticated("no key")).headers["www-authenticate"] == "Bearer"


def test_errors_of_other_makers_apis_have_theirs() -> None:
    stranger = Unauthenticated("no key")
    theirs = json.loads(bytes(error_response(request(path="/v1/messages"), stranger).body))  # type: ignore[arg-type]
    assert theirs == {"type": "error", "error": {"type": "authentication_error", "message": "no key"}}
    lines = json.loads(bytes(error_response(request(path="/api/chat"), stranger).body))  # type: ignore[arg-type]
    assert lines == {"error": "no key"}


async def test_only_wanted_models_are_listed(tmp_path: Path) -> None:
    store = ServedStore(tmp_path / "models", load_catalogue(), lambda name: name == "ppocr-v4-det")
    assert [s.entry.name for s in await asyncio.to_thread(store.list)] == ["ppocr-v4-det"]

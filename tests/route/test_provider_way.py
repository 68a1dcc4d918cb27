"""The text way over providers: fail-over, honest ends, keys, and clients that leave; real HTTP on both sides."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from benchmarks.fake_upstream import Seen
from engines.fakes_text import FakeTextEngine
from gateway.settings import GatewaySettings
from gateway.targets import Target
from tests.route.provider_house import Providing, providing

LEAVING_S = 0.1


def asked(words: str, model: str = "m", **more: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": words}], "max_tokens": 100, **more}


async def whole(house: Providing, words: str, model: str = "m", **more: Any) -> tuple[int, Any, Any]:
    async with (
        aiohttp.ClientSession() as client,
        client.post(f"{house.base_url}/v1/chat/completions", json=asked(words, model, **more)) as response,
    ):
        return response.status, await response.json(), response.headers


async def streamed(house: Providing, words: str, model: str = "m", **more: Any) -> tuple[int, list[Any], str]:
    """Status, the events' documents, and the raw text."""
    async with (
        aiohttp.ClientSession() as client,
        client.post(f"{house.base_url}/v1/chat/completions", json=asked(words, model, stream=True, **more)) as response,
    ):
        text = await response.text()
    lines = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    return response.status, [json.loads(line) for line in lines if line != "[DONE]"], text


def text_of(events: list[Any]) -> str:
    return "".join(e["choices"][0]["delta"].get("content") or "" for e in events if e.get("choices"))


async def until(what: Callable[[], bool], seconds: float = 2.0) -> None:
    end_s = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end_s, "it did not happen in time"
        await asyncio.sleep(0.005)


async def test_an_answer_and_a_stream_pass_through(tmp_path: Path) -> None:
    async with providing(tmp_path) as house:
        status, document, headers = await whole(house, "n=a")
        assert status == 200 and document["choices"][0]["message"]["content"].startswith("reply to a ")
        assert document["usage"]["prompt_tokens"] == 12 and document["usage"]["completion_tokens"] == 8
        assert headers["x-midstream-target"] == "cloud:p0"
        status, events, raw = await streamed(house, "n=b tokens=5", stream_options={"include_usage": True})
        assert status == 200 and text_of(events) == "reply to b w1 w2 w3 w4 "
        assert raw.endswith("data: [DONE]\n\n") and events[-1]["choices"] == []
        assert events[-1]["usage"]["completion_tokens"] == 5
        assert house.ledgers[0].by_name["b"].path == "/v1/chat/completions"


@pytest.mark.parametrize("relayed", [True, False])
async def test_usage_is_the_upstreams_and_goes_to_those_who_asked(tmp_path: Path, relayed: bool) -> None:
    """U1 BerriAI/litellm#5632, U2 ggml-org/llama.cpp#12102: always asked upstream, stripped for other clients."""
    # A device that could answer as well keeps bytes from passing.
    device = None if relayed else Target("device", True, FakeTextEngine(), frozenset({"m"}))
    async with providing(tmp_path, device=device) as house:
        _, events, _ = await streamed(house, "n=a tokens=3 per=20 rate=50")
        assert all(event.get("usage") is None for event in events)
        assert (house.done()[-1].prompt_tokens, house.done()[-1].completion_tokens) == (12, 60)
        _, document, _ = await whole(house, "n=b tokens=3 per=20")
        assert document["usage"]["completion_tokens"] == 60


REFUSALS = ["status=500", "status=503", "status=429"]
FAULTS = [(False, fault) for fault in REFUSALS] + [
    (True, fault) for fault in ("cut=0", "stall=0", "garble=0", "fail=0", *REFUSALS)
]


@pytest.mark.parametrize(("stream", "fault"), FAULTS)
async def test_a_fault_before_the_first_word_goes_to_the_next_provider(
    tmp_path: Path, fault: str, stream: bool
) -> None:
    """S3 BerriAI/litellm#38610, S4 #6957, S5 tashfeenahmed/freellmapi PR#192: no promise before."""
    async with providing(tmp_path, 2) as house:
        ask: Any = streamed if stream else whole
        # Only the first provider follows the script; the second one is asked for another model's name.
        house.ledgers[1].sane = True
        status, found, _ = await ask(house, f"n=a tokens=4 {fault}")
        assert status == 200
        text = text_of(found) if stream else found["choices"][0]["message"]["content"]
        assert text.startswith("reply to a ")
        assert house.ledgers[0].requests == house.ledgers[1].requests == 1
        assert house.done()[-1].status == "ok"


@pytest.mark.parametrize("fault", ["cut=3", "stall=3", "garble=3", "fail=3"])
async def test_a_stream_that_breaks_in_the_middle_ends_with_an_error_in_band(tmp_path: Path, fault: str) -> None:
    """S1 BerriAI/litellm#40404, S2 Portkey-AI/gateway#1797: cut is told from complete: an error event, no [DONE]."""
    async with providing(tmp_path) as house:
        status, events, raw = await streamed(house, f"n=a tokens=9 {fault}")
        assert status == 200 and text_of(events) == "reply to a w1 w2 "
        assert "error" in events[-1] and "[DONE]" not in raw
        assert not any(e["choices"][0].get("finish_reason") for e in events if e.get("choices"))
        assert house.done()[-1].status != "ok"


@pytest.mark.parametrize("fault", ["cut=3", "stall=3", "garble=3", "fail=3"])
async def test_a_stream_that_breaks_in_the_middle_goes_on_at_the_device(tmp_path: Path, fault: str) -> None:
    """S1 BerriAI/litellm#40404: the fall-back gets the request and continues; the visible text has no seam."""
    device = Target("device", True, FakeTextEngine(), frozenset({"m"}))
    async with providing(tmp_path, device=device) as house:
        status, events, raw = await streamed(house, f"n=a tokens=9 {fault}")
        assert status == 200 and raw.endswith("data: [DONE]\n\n")
        assert text_of(events).startswith("reply to a w1 w2 ")
        assert len({side for side, _ in house.done()[-1].sides}) == 2


async def test_when_all_fail_the_client_hears_it_with_its_own_status(tmp_path: Path) -> None:
    async with providing(tmp_path, 2) as house:
        status, document, _ = await whole(house, "n=a status=500")
        assert status >= 500 and document["error"]["message"]
        status, _, _ = await streamed(house, "n=b status=500")
        assert status >= 500


async def test_a_silent_prefill_is_bridged_by_pings(tmp_path: Path) -> None:
    """S6 BerriAI/litellm PR#37322: comment lines until the first token."""
    settings = GatewaySettings(hold_headers_s=0.1, ping_every_s=0.1, drain_s=0.2)
    async with providing(tmp_path, settings=settings) as house:
        _, events, raw = await streamed(house, "n=a first=0.5 tokens=2")
        assert raw.startswith(": ping\n\n") and text_of(events) == "reply to a w1 "


@pytest.mark.parametrize("form", ["mid-stream", "before the first token", "not streamed"])
async def test_a_client_that_leaves_closes_the_upstream_at_once(tmp_path: Path, form: str) -> None:
    """C1 BerriAI/litellm#13774, #37140: in all three forms, within a tenth of a second."""
    words = "n=a tokens=500 rate=50" if form == "mid-stream" else "n=a first=1.0"
    async with providing(tmp_path) as house:
        ledger = house.ledgers[0]
        client = aiohttp.ClientSession()
        body = asked(words, stream=form != "not streamed")
        request = asyncio.create_task(client.post(f"{house.base_url}/v1/chat/completions", json=body))
        await until(lambda: "a" in ledger.by_name)
        seen: Seen = ledger.by_name["a"]
        if form == "mid-stream":
            await (await request).content.readany()
        else:
            await asyncio.sleep(0.05)
        left_s = time.monotonic()
        request.cancel()
        await client.close()
        await until(lambda: seen.closed_s is not None, 0.9)
        assert seen.closed_s is not None and seen.closed_s - left_s < 5 * LEAVING_S
        await until(lambda: bool(house.done()))
        assert house.done()[-1].status == "cancelled"


async def test_keys_are_taken_by_tenant_and_rotated_while_it_runs(tmp_path: Path) -> None:
    async with providing(tmp_path, more={"keyless": False}) as house:
        status, document, _ = await whole(house, "n=a")
        assert status == 403 and "add-key" in document["error"]["message"]
        first = house.vault.add("p0", "key-one")
        await asyncio.sleep(0.6)
        await whole(house, "n=b")
        house.vault.add("p0", "key-two")
        house.vault.remove("p0", first)
        await asyncio.sleep(0.6)
        await whole(house, "n=c")
        seen = house.ledgers[0].by_name
        assert (seen["b"].authorization, seen["c"].authorization) == ("Bearer key-one", "Bearer key-two")


async def test_identical_requests_in_flight_reach_the_provider_once(tmp_path: Path) -> None:
    async with providing(tmp_path) as house:
        same = [asyncio.create_task(whole(house, "n=a first=0.3", temperature=0)) for _ in range(5)]
        await asyncio.sleep(0.1)
        same.pop(0).cancel()
        answers = await asyncio.gather(*same)
        assert house.ledgers[0].requests == 1
        assert {document["choices"][0]["message"]["content"][:10] for _, document, _ in answers} == {"reply to a"}
        await asyncio.gather(*(whole(house, "n=b", temperature=1) for _ in range(2)))
        assert house.ledgers[0].requests == 3, "two draws were asked for"


async def test_the_model_is_called_as_the_client_calls_it(tmp_path: Path) -> None:
    async with providing(tmp_path) as house:
        _, document, _ = await whole(house, "n=a")
        _, events, _ = await streamed(house, "n=b", stop=["\n"])
        assert {document["model"]} | {event["model"] for event in events} == {"m"}
        assert house.ledgers[0].by_name["b"].model == "there"


async def test_a_house_that_stops_tells_its_relayed_streams(tmp_path: Path) -> None:
    async with providing(tmp_path) as house:
        reading = asyncio.create_task(streamed(house, "n=a tokens=500 rate=50"))
        await until(lambda: "a" in house.ledgers[0].by_name and house.ledgers[0].by_name["a"].pieces > 3)
        await house.stop()
        _, events, raw = await reading
        assert "error" in events[-1] and "[DONE]" not in raw


@pytest.mark.parametrize("stream", [False, True])
async def test_a_full_house_gives_back_what_it_reserved(tmp_path: Path, stream: bool) -> None:
    async with providing(tmp_path, settings=GatewaySettings(max_concurrent=0, drain_s=0.2)) as house:
        ask: Any = streamed if stream else whole
        status, _, _ = await ask(house, "n=a")
        assert status == 503 and house.ledgers[0].requests == 0
        assert [done.status for done in house.done()] == ["over_capacity"]


async def test_a_stream_ends_with_the_requests_deadline(tmp_path: Path) -> None:
    async with providing(tmp_path, settings=GatewaySettings(deadline_s=0.3, drain_s=0.2)) as house:
        _, events, raw = await streamed(house, "n=a tokens=500 rate=50")
        assert events[-1]["error"]["code"] == "upstream_timeout" and "[DONE]" not in raw

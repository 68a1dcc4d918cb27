"""The replaceable data link: who is available, what counts as trouble, and events on their way out."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import pytest

from agent.cloud_link import TIMEOUTS_BEFORE_TROUBLE, CloudLink
from agent.console import Console
from agent.emitting import LineWriter, record, sentence
from agent.telemetry import Counters
from links.memory import MemoryLink
from links.port import FrameRoute, FrameStream, RejectedStatus, Reply, Request, Response, Route
from protocol.errors import ConfigError, LinkClosed, LinkError, LinkTimeout
from protocol.events import ArmSwitched, Event, HandedOver, RecordingEmit, SourceLost, TensorDone, TextDone
from protocol.fanout import Fanout


class Broken(MemoryLink):
    """A link whose exchanges end with the error that was set."""

    def __init__(self, error: LinkError | None = None) -> None:
        async def answer(request: Request) -> Response:
            return Response(body=b"ok")

        super().__init__("far", [Route("POST", "/x", answer)])
        self.error = error
        self.closed = False

    async def exchange(
        self, path: str, headers: Mapping[str, str], body: bytes, deadline_s: float, method: str = "POST"
    ) -> Reply:
        if self.error is not None:
            raise self.error
        return await super().exchange(path, headers, body, deadline_s, method)

    def lines(self, path: str, headers: Mapping[str, str], body: bytes, deadline_s: float) -> AsyncIterator[bytes]:
        if self.error is not None:
            raise self.error
        return super().lines(path, headers, body, deadline_s)

    async def close(self) -> None:
        self.closed = True
        await super().close()


async def ask(link: CloudLink) -> None:
    await link.exchange("/x", {}, b"", 1.0)


async def test_without_a_coordinator_the_link_says_so() -> None:
    link = CloudLink(lambda error: None)
    with pytest.raises(LinkClosed, match="no coordinator"):
        await ask(link)
    assert not link.available


async def test_a_broken_exchange_is_trouble_once_until_it_is_found_again() -> None:
    troubles: list[LinkError] = []
    link, far = CloudLink(troubles.append), Broken()
    await link.point_to(far)
    await ask(link)
    assert link.available
    far.error = LinkClosed("gone")
    for _ in range(2):
        with pytest.raises(LinkClosed):
            await ask(link)
    assert (len(troubles), link.available) == (1, False)
    link.mark_available()
    with pytest.raises(LinkClosed):
        await ask(link)
    assert len(troubles) == 2
    await link.close()


async def test_one_slow_answer_is_no_trouble_and_several_in_a_row_are() -> None:
    troubles: list[LinkError] = []
    link, far = CloudLink(troubles.append), Broken(LinkTimeout("slow"))
    await link.point_to(far)
    for _ in range(TIMEOUTS_BEFORE_TROUBLE):
        assert troubles == []
        with pytest.raises(LinkTimeout):
            await ask(link)
    assert len(troubles) == 1
    await link.close()


async def test_a_refusal_is_an_answer() -> None:
    link = CloudLink(lambda error: pytest.fail("not trouble"))
    await link.point_to(Broken(RejectedStatus("no", status=404, body=b"")))
    with pytest.raises(RejectedStatus):
        [chunk async for chunk in link.lines("/x", {}, b"", 1.0)]
    assert link.available
    await link.close()


async def test_pointing_elsewhere_closes_the_link_before() -> None:
    link, first, second = CloudLink(lambda error: None), Broken(), Broken()
    await link.point_to(first)
    await link.point_to(second)
    assert (first.closed, second.closed) == (True, False)
    await ask(link)
    await link.close()


SWITCH = ArmSwitched(at_s=1.0, model="m", source="device", target="cloud", reason="r", request_id="q")
HANDOFF = HandedOver(at_s=2.0, request_id="q", source="device", target="cloud", index=7, local=False)
LOST = SourceLost(at_s=3.0, request_id="q", source="cloud", target="device", index=9)


def test_events_read_as_the_demo_promises() -> None:
    assert sentence(SWITCH).startswith("switch: device -> cloud")
    assert sentence(HANDOFF) == "handoff: device -> cloud at token 7"
    assert sentence(LOST) == "cloud lost at token 9, device continued"
    names = [found["event"] for event in (SWITCH, HANDOFF, LOST) if (found := record(event)) is not None]
    assert names == ["switch", "handoff", "cloud_lost"]
    assert record(Event(at_s=0.0)) is None


def test_requests_go_to_the_file_and_seam_moves_to_both(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "events.jsonl"
    console = Console(json_lines=True, events_file=file)
    done = TensorDone(at_s=1.0, request_id="q", model="m", arm="device", status="ok", total_s=0.1)
    for event in (done, SWITCH, LOST):
        console.emit(event)
    console.say("ready", "ready", port=1)
    console.close()
    assert [json.loads(line)["event"] for line in file.read_text().splitlines()] == [
        "tensor_done", "switch", "cloud_lost",
    ]  # fmt: skip
    shown = [json.loads(line)["event"] for line in capsys.readouterr().out.splitlines()]
    assert shown == ["switch", "cloud_lost", "ready"]


def test_a_file_that_cannot_be_opened_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot write"):
        LineWriter.to_file(tmp_path)


def test_a_listener_that_fails_is_dropped_and_harms_nobody() -> None:
    kept = RecordingEmit()

    def broken(event: Event) -> None:
        raise RuntimeError("a bug")

    fanout = Fanout([broken, kept])
    fanout(SWITCH)
    fanout(HANDOFF)
    assert list(kept.events) == [SWITCH, HANDOFF]


def test_telemetry_tells_only_news() -> None:
    counters = Counters()
    assert counters.news() is None
    counters(
        TextDone(
            at_s=0, request_id="q", model="m", status="ok", prompt_tokens=3, completion_tokens=5, ttft_s=1, total_s=2
        )
    )
    counters(LOST)
    assert counters.news() == {
        "text_requests": 1.0, "prompt_tokens": 3.0, "completion_tokens": 5.0, "sources_lost": 1.0,
    }  # fmt: skip
    assert counters.news() is None


async def test_a_stream_over_the_link_before_is_no_trouble_of_the_one_after() -> None:
    async def hold(request: Request, stream: FrameStream) -> None:
        await stream.receive()

    troubles: list[LinkError] = []
    link = CloudLink(troubles.append)
    old, new = (MemoryLink("far", [], [FrameRoute("/frames", hold)]) for _ in range(2))
    await link.point_to(old)
    stream = await link.open("/frames")
    await link.point_to(new)
    old.cut()
    with pytest.raises(LinkClosed):
        await stream.send(b"x")
    assert troubles == []
    assert link.available
    await stream.close()
    await link.close()


async def test_frames_that_come_between_slow_answers_show_that_somebody_is_there() -> None:
    async def tick(request: Request, stream: FrameStream) -> None:
        while True:
            await stream.send(b"x")

    class Slow(MemoryLink):
        async def exchange(self, *args: object, **kwargs: object) -> Reply:
            raise LinkTimeout("slow")

    troubles: list[LinkError] = []
    link = CloudLink(troubles.append)
    await link.point_to(Slow("far", [], [FrameRoute("/frames", tick)]))
    stream = await link.open("/frames")
    for _ in range(2 * TIMEOUTS_BEFORE_TROUBLE):
        with pytest.raises(LinkTimeout):
            await ask(link)
        assert await stream.receive() == b"x"
    assert troubles == []
    await stream.close()
    await link.close()

"""Discovery: order of sources, parallel attempts, and identity as the only judge."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import pytest

from agent.discovery import MAX_CANDIDATES, MAX_MESSAGE_CHARS, Candidate, listed, locate, ordered
from links.http import HttpLink
from protocol.errors import LinkError


class Network:
    """Which addresses hold the real coordinator; everything else refuses, or hangs when it is in `silent`."""

    def __init__(self, real: set[str], silent: set[str] = frozenset()) -> None:  # type: ignore[assignment]
        self.real = real
        self.silent = silent
        self.tried: list[str] = []

    async def check(self, candidate: Candidate) -> None:
        self.tried.append(candidate.host)
        if candidate.host in self.silent:
            await asyncio.sleep(3600)
        if candidate.host not in self.real:
            raise LinkError("another identity")


def finds(*candidates: Candidate) -> Sequence[Candidate]:
    return candidates


def test_order_is_static_last_good_mdns_broker_and_bridges_last() -> None:
    found = ordered(
        [
            Candidate("172.17.0.1", 1, "mdns"), Candidate("b", 1, "broker"), Candidate("fe80::1", 1, "mdns"),
            Candidate("192.168.1.5", 1, "mdns"), Candidate("l", 1, "last_good"), Candidate("s", 1, "static"),
            Candidate("s", 1, "mdns"), Candidate("", 1, "mdns"), Candidate("x", 70000, "mdns"),
        ]
    )  # fmt: skip
    assert [c.host for c in found] == ["s", "l", "192.168.1.5", "172.17.0.1", "fe80::1", "b"]


def test_a_flood_of_candidates_is_bounded() -> None:
    assert len(ordered(Candidate(f"h{i}", 1, "mdns") for i in range(1000))) == MAX_CANDIDATES


async def test_a_static_address_beats_mdns() -> None:
    network = Network({"static", "found"})

    async def mdns() -> Sequence[Candidate]:
        return finds(Candidate("found", 1, "mdns"))

    winner = await locate([Candidate("static", 1, "static")], [mdns], network.check)
    assert winner.host == "static"


async def test_every_address_of_a_record_is_tried_and_a_hanging_one_holds_nothing_up() -> None:
    network = Network({"good"}, silent={"docker"})

    async def mdns() -> Sequence[Candidate]:
        return finds(*(Candidate(host, 1, "mdns") for host in ("docker", "wrong", "good")))

    winner = await asyncio.wait_for(locate([], [mdns], network.check), 3)
    assert winner.host == "good"
    assert set(network.tried) == {"docker", "wrong", "good"}


async def test_an_imposter_is_not_a_coordinator_and_the_error_lists_what_was_tried() -> None:
    with pytest.raises(LinkError, match="found: imposter:1 another identity") as caught:
        await locate([Candidate("imposter", 1, "static")], [], Network(set()).check)
    assert caught.value.next_step


async def test_a_refusing_address_is_named_once_without_raw_error_text(free_port: Callable[[], int]) -> None:
    async def check(candidate: Candidate) -> None:
        link = HttpLink("coordinator", f"http://{candidate.host}:{candidate.port}")
        try:
            await link.exchange("/healthz", {}, b"", 2.0, method="GET")
        finally:
            await link.close()

    port = free_port()
    with pytest.raises(LinkError) as caught:
        await locate([Candidate("127.0.0.1", port, "static")], [], check)
    assert caught.value.message == f"no coordinator found: 127.0.0.1:{port} refused"


async def test_the_list_of_what_was_tried_is_bounded() -> None:
    many = [Candidate(f"host-{n}" + "x" * 200 * (n == 0), 1, "static") for n in range(20)]
    with pytest.raises(LinkError, match=r"xxx:1 another identity; host-1:1 another identity; .*1\d more") as caught:
        await locate(many, [], Network(set()).check)
    assert len(caught.value.message) <= MAX_MESSAGE_CHARS
    assert listed(["a:1 refused", "a:1 refused"]) == "a:1 refused"


async def test_a_failing_search_does_not_hide_a_known_address() -> None:
    async def broken() -> Sequence[Candidate]:
        raise LinkError("mDNS cannot start")

    winner = await locate([Candidate("known", 1, "last_good")], [broken], Network({"known"}).check)
    assert winner.host == "known"


async def test_nothing_known_and_nothing_found_says_so() -> None:
    with pytest.raises(LinkError, match="no address is known"):
        await locate([], [], Network(set()).check)


async def test_a_silent_address_ends_by_its_time_out() -> None:
    with pytest.raises(LinkError, match="no answer in"):
        await locate([Candidate("dead", 1, "static")], [], Network(set(), {"dead"}).check, timeout_s=0.05)


async def test_a_join_token_address_waits_for_the_search_and_takes_the_name_of_the_fresher_source() -> None:
    network = Network({"here", "elsewhere"})

    async def mdns() -> Sequence[Candidate]:
        await asyncio.sleep(0.05)
        return finds(Candidate("here", 1, "mdns", 8883))

    winner = await locate([Candidate("here", 1, "join")], [mdns], network.check)
    assert (winner.origin, winner.broker_port) == ("mdns", 8883)
    assert (await locate([Candidate("here", 1, "join")], [], network.check)).origin == "join"

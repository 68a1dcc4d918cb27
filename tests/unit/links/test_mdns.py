"""mDNS between two processes on loopback, shared responders, conflicts."""

from __future__ import annotations

import asyncio
import secrets
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from links.mdns import ZeroconfBrowser
from protocol.errors import LinkError

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def service_type() -> str:
    return f"_ms-{secrets.token_hex(4)}._tcp"


@asynccontextmanager
async def announced(service_type: str, instance: str, port: int, *pairs: str) -> AsyncIterator[str]:
    """Another process that announces; yields the name it got."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(Path(__file__).with_name("announcer.py")),
        service_type,
        instance,
        str(port),
        "127.0.0.1",
        *pairs,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT)},
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        async with asyncio.timeout(15):
            yield (await process.stdout.readline()).decode().strip()
    finally:
        process.stdin.close()
        async with asyncio.timeout(10):
            await process.wait()


async def test_two_processes_on_loopback_find_each_other(service_type: str) -> None:
    browser = ZeroconfBrowser(["127.0.0.1"])
    async with announced(service_type, "coordinator", 8791, "txtvers=1", "id=c1") as name:
        found = await browser.browse(service_type, 6.0)
    await browser.close()
    assert name == "coordinator"
    assert [(f.instance, f.addresses, f.port, dict(f.txt)) for f in found] == [
        ("coordinator", ("127.0.0.1",), 8791, {"txtvers": "1", "id": "c1"})
    ]


async def test_a_name_that_is_taken_is_changed_and_never_fatal(service_type: str) -> None:
    """DI5: a conflict in name crashed or looped others."""
    async with announced(service_type, "same-name", 8791) as first:
        # A responder repeats a record at most once a second (RFC 6762, section 6): let the announcement pass.
        await asyncio.sleep(1.5)
        async with announced(service_type, "same-name", 8792) as second:
            assert (first, second) == ("same-name", "same-name-2")


async def test_browsers_of_one_process_share_one_responder(service_type: str) -> None:
    """DI4: many responders in one process flood the network and fight for the port."""
    one, two, other = (
        ZeroconfBrowser(["127.0.0.1"]),
        ZeroconfBrowser(["127.0.0.1"]),
        ZeroconfBrowser(["127.0.0.1"]),
    )
    assert one._responder() is two._responder()
    await one.close()
    assert two._responder() is other._responder()
    assert await two.browse(service_type, 0.1) == []
    await two.close()
    await other.close()


async def test_each_search_looks_at_the_interfaces_anew(service_type: str) -> None:
    """DI6: sockets of an old set of interfaces are blind after a roam; nothing of a search may outlive it."""
    before = ZeroconfBrowser(["127.0.0.1"])
    await before.browse(service_type, 0.1)
    old = before._responder()
    await before.close()
    after = ZeroconfBrowser(["127.0.0.1"])
    await after.browse(service_type, 0.1)
    assert after._responder() is not old
    assert old.responder.zeroconf.done
    await after.close()


async def test_an_interface_that_is_not_there_is_a_link_error_with_a_next_step(service_type: str) -> None:
    browser = ZeroconfBrowser(["203.0.113.77"])
    with pytest.raises(LinkError) as failure:
        await browser.browse(service_type, 0.2)
    assert "coordinator's address" in failure.value.next_step
    await browser.close()

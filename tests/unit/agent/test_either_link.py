"""One link over the first of two that is there."""

from __future__ import annotations

import pytest

from agent.cloud_link import CloudLink, EitherLink
from links.memory import MemoryLink
from links.port import FrameRoute, FrameStream, Request, Response, Route
from protocol.errors import LinkClosed, LinkError


def far(name: str) -> MemoryLink:
    """A link whose far end says its name."""

    async def who(request: Request) -> Response:
        return Response(body=name.encode())

    async def frames(request: Request, stream: FrameStream) -> None:
        await stream.send(name.encode())

    return MemoryLink(name, [Route("POST", "/who", who)], [FrameRoute("/frames", frames)])


async def who(link: EitherLink) -> str:
    return (await link.exchange("/who", {}, b"", 5)).body.decode()


async def test_the_first_that_is_there_is_used_by_all_three_kinds_of_call() -> None:
    troubles: list[LinkError] = []
    direct, other = CloudLink(troubles.append), CloudLink(troubles.append, "webrtc")
    either = EitherLink((direct, other))
    assert (either.available, either.name) == (False, "cloud")
    with pytest.raises(LinkClosed, match="no coordinator"):
        await who(either)
    await other.point_to(far("second"))
    assert (either.available, either.name, await who(either)) == (True, "webrtc", "second")
    first = far("first")
    await direct.point_to(first)
    assert await who(either) == "first"
    assert [chunk async for chunk in either.lines("/who", {}, b"", 5)] == [b"first"]
    stream = await either.open("/frames")
    assert await stream.receive() == b"first"
    first.cut()
    with pytest.raises(LinkError):
        await who(either)
    assert (len(troubles), await who(either)) == (1, "second"), "the next call takes the other way"
    await either.close()
    assert other.available, "it does not close what others own"
    for link in (direct, other):
        await link.close()

"""llama-server on a socket of this machine, asked over plain HTTP: one connection per request."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, aclosing
from typing import Any

from engines.llama_server_wire import server_error
from engines.unix_http import LocalReply, local_request
from protocol.errors import LinkClosed, LinkError, LinkTimeout, MidstreamError, ProtocolError
from protocol.sse import SseParser


class LocalServer:
    """NativeServer at `address` (`unix:///path` or `http://host:port`). key: its bearer token."""

    def __init__(self, address: str, key: str) -> None:
        self.address = address
        self.key = key

    async def complete(self, body: Mapping[str, Any]) -> AsyncGenerator[Mapping[str, Any], None]:
        data = json.dumps(body).encode()
        try:
            async with self.asked("/completion", data) as reply:
                if reply.status > 399:
                    raise refused(reply.status, await reply.body())
                async for chunk in events(reply.chunks()):
                    yield chunk
        except LinkClosed as err:
            raise await self.gone(err) from err

    async def call(self, path: str, body: Mapping[str, Any] | None, deadline_s: float) -> Mapping[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        try:
            async with asyncio.timeout(deadline_s), self.asked(path, data) as reply:
                answer = await reply.body()
        except TimeoutError as err:
            raise LinkTimeout(f"llama-server did not answer within {deadline_s:.0f} s") from err
        except LinkClosed as err:
            raise await self.gone(err) from err
        if reply.status > 399:
            raise refused(reply.status, answer)
        return json_object(answer)

    def asked(self, path: str, data: bytes | None) -> AbstractAsyncContextManager[LocalReply]:
        """One request under way; leaving the context hangs up."""
        return local_request(self.address, path, data, self.key)

    async def gone(self, err: LinkClosed) -> MidstreamError:
        """What it means that the connection was lost."""
        return err


async def events(chunks: AsyncIterator[bytes]) -> AsyncGenerator[Mapping[str, Any], None]:
    """The JSON documents of an event stream."""
    parser = SseParser()
    async with aclosing(chunks) as pieces:  # type: ignore[type-var]
        async for piece in pieces:
            for event in parser.feed(piece):
                if not event.done:
                    yield json_object(event.data.encode())


def refused(status: int, body: bytes) -> Exception:
    """What an answer with an error's status means."""
    try:
        return server_error(json_object(body).get("error", {}), status)
    except ProtocolError:
        return LinkError(f"llama-server answered {status} without a reason")


def json_object(body: bytes) -> Mapping[str, Any]:
    """Raises ProtocolError for anything else."""
    try:
        found = json.loads(body)
    except ValueError as err:
        raise ProtocolError("llama-server sent something that is not JSON", field="body") from err
    if not isinstance(found, dict):
        raise ProtocolError("llama-server sent JSON that is not an object", field="body")
    return found

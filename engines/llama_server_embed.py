"""Embeddings of a llama-server: whether its model makes them, and vectors of texts or token ids."""

from __future__ import annotations

from collections.abc import Sequence

from engines.llama_server_stream import NativeServer
from protocol.errors import EngineError, ProtocolError, RejectedError

CALL_S = 30.0


async def embed(native: NativeServer, texts: Sequence[str | Sequence[int]]) -> list[tuple[float, ...]]:
    """One vector of length 1 per text. Raises TooLarge for one over a batch, ProtocolError for nonsense."""
    answer = await native.call("/v1/embeddings", {"input": texts}, CALL_S)
    try:
        return [tuple(float(value) for value in one["embedding"]) for one in answer["data"]]
    except (KeyError, TypeError, ValueError) as err:
        raise ProtocolError("llama-server sent embeddings that are none", field="data") from err


async def embeds_texts(native: NativeServer) -> bool:
    """One short text; a server that was started without embeddings refuses it."""
    try:
        return bool(await embed(native, ["a"]))
    except (EngineError, ProtocolError, RejectedError):
        return False

"""Scenes 3 and 4: an answer that moves to the cloud by plan, and one that survives the loss of the cloud."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from attrs import define

from benchmarks.demo.records import Tail, line_of
from benchmarks.demo.screen import Screen
from benchmarks.demo.stage import TEXT_MODEL, Stage
from links.http import HttpLink
from protocol.errors import EngineError
from protocol.sse import SseParser

CHUNK_S = 30.0
PROMPTS = (
    "Explain in detail how a river shapes the land it flows through, step by step.",
    "Tell me a short story about a lighthouse keeper and a storm.",
)


@define
class Answer:
    """What arrived: the text, tokens by side in order, and how it ended."""

    text: str = ""
    tokens: int = 0
    finish: str | None = None


async def ask(
    stage: Stage, tail: Tail, prompt: str, tokens: int, screen: Screen, on_cloud_token: Callable[[int], None]
) -> Answer:
    """Stream one chat answer; `on_cloud_token(n)` is called at the n-th token that the cloud made."""
    body = {
        "model": TEXT_MODEL,
        "messages": [{"role": "user", "content": prompt}],
        "stream": True,
        "max_tokens": tokens,
        "temperature": 0,
        "stream_options": {"include_usage": True},
    }
    link = HttpLink("demo", stage.url)
    answer, parser, cloud_tokens = Answer(), SseParser(), 0
    try:
        chunks = link.lines("/v1/chat/completions", {}, json.dumps(body).encode(), CHUNK_S)
        async for chunk in chunks:
            for event in parser.feed(chunk):
                if event.data == "[DONE]":
                    continue
                side = _take(json.loads(event.data), answer, tail, screen)
                if side == "cloud":
                    cloud_tokens += 1
                    on_cloud_token(cloud_tokens)
    finally:
        await link.close()
    show_marks(tail, screen)
    screen.say(f"    ended with finish_reason={answer.finish}, {answer.tokens} tokens")
    return answer


def _take(chunk: dict[str, Any], answer: Answer, tail: Tail, screen: Screen) -> str | None:
    if "error" in chunk:
        raise EngineError(f"the answer broke off: {chunk['error']}")
    if chunk.get("usage"):
        answer.tokens = int(chunk["usage"]["completion_tokens"])
    for choice in chunk.get("choices", ()):
        answer.finish = choice.get("finish_reason") or answer.finish
        piece = choice["delta"].get("content") or ""
        if piece:
            side = str((chunk.get("midstream") or {}).get("side", "device"))
            show_marks(tail, screen)
            screen.token(piece, side)
            answer.text += piece
            return side
    return None


def show_marks(tail: Tail, screen: Screen) -> None:
    """Print what the agent's records say happened since the last look."""
    for record in tail.new():
        line = line_of(record)
        if line is not None:
            screen.mark(line)

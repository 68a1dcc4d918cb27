"""What `midstream infer` and `midstream chat` make of answers: boxes, labels, sides and seams; no I/O."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from typing import Any

from protocol.errors import LinkError
from protocol.oip import InferResponse
from protocol.tensors import Tensor

GREEN, BLUE, YELLOW, RESET = "\x1b[32m", "\x1b[34m", "\x1b[33m", "\x1b[0m"
COLOURS = {"device": GREEN, "cloud": BLUE}
MAX_LINES = 40


def painted(side: str, text: str) -> str:
    """`text` in the colour of its side."""
    return f"{COLOURS.get(side, YELLOW)}{text}{RESET}"


def labels_of(response: InferResponse) -> dict[str, Any]:
    """Boxes with scores (det), labels with scores (cls), or just shapes, as JSON types plus `lines` for people."""
    outputs = {tensor.name: tensor for tensor in response.outputs}
    if "boxes" in outputs:
        return _boxes(outputs)
    if "label" in outputs:
        labels, scores = _numbers(outputs["label"]), _numbers(outputs["score"]) if "score" in outputs else []
        lines = [
            f"label {label:g}" + (f"  {scores[i]:.3f}" if i < len(scores) else "") for i, label in enumerate(labels)
        ]
        return {"labels": labels, "scores": scores, "lines": lines}
    shapes = [f"{t.name} {t.datatype}{list(t.shape)}" for t in response.outputs]
    return {"outputs": shapes, "lines": shapes}


def _boxes(outputs: dict[str, Tensor]) -> dict[str, Any]:
    flat = _numbers(outputs["boxes"])
    scores = _numbers(outputs["scores"]) if "scores" in outputs else []
    boxes = [[flat[i + j : i + j + 2] for j in range(0, 8, 2)] for i in range(0, len(flat) - 7, 8)]
    lines = [f"{len(boxes)} boxes"]
    for at, box in enumerate(boxes[:MAX_LINES]):
        corners = " ".join(f"({x:.0f},{y:.0f})" for x, y in box)
        lines.append(f"{scores[at]:.3f}  {corners}" if at < len(scores) else corners)
    if len(boxes) > MAX_LINES:
        lines.append(f"... {len(boxes) - MAX_LINES} more")
    return {"boxes": boxes, "scores": scores, "lines": lines}


_FORMATS = {"FP32": "f", "FP64": "d", "INT64": "q", "INT32": "i", "UINT8": "B", "INT8": "b", "BOOL": "?"}


def _numbers(tensor: Tensor) -> list[float]:
    code = _FORMATS.get(tensor.datatype)
    if code is None:
        return []
    size = struct.calcsize(code)
    return list(struct.unpack(f"<{tensor.size_bytes // size}{code}", bytes(tensor.data)))


class ChatStream:
    """Folds the events of one streamed answer: text by side, seams, usage, finish reason."""

    def __init__(self) -> None:
        self.text = ""
        self.sides: list[tuple[str, int]] = []
        self.usage: dict[str, Any] = {}
        self.finish: str | None = None

    def take(self, data: str | bytes) -> Iterator[tuple[str, str]]:
        """Yield (side, piece of text) of one event's data. Raises LinkError for an error event."""
        if data in ("[DONE]", b"[DONE]"):
            return
        try:
            chunk = json.loads(data)
        except ValueError as err:
            raise LinkError("the agent sent an event that is not JSON", next_step="check what listens there") from err
        if "error" in chunk:
            found = chunk["error"]
            raise LinkError(
                f"the answer broke off: {found.get('message', found) if isinstance(found, dict) else found}"
            )
        self.usage = chunk.get("usage") or self.usage
        for choice in chunk.get("choices", ()):
            self.finish = choice.get("finish_reason") or self.finish
            text = (choice.get("delta") or {}).get("content") or ""
            side, tokens = _made(chunk, text)
            self._count(side, tokens)
            self.text += text
            if text:
                yield side, text

    def _count(self, side: str, tokens: int) -> None:
        if not tokens:
            return
        if self.sides and self.sides[-1][0] == side:
            self.sides[-1] = (side, self.sides[-1][1] + tokens)
        else:
            self.sides.append((side, tokens))

    def summary(self, model: str) -> dict[str, Any]:
        """The answer as one JSON object; `sides` counts tokens in order."""
        return {
            "model": model,
            "text": self.text,
            "sides": [list(side) for side in self.sides],
            "finish_reason": self.finish,
            "usage": self.usage,
        }

    def footer(self) -> str:
        """One line: who made how much, and where the seam moved."""
        if not self.sides:
            return "(no text)"
        parts, at = [], 0
        for place, (side, count) in enumerate(self.sides):
            parts.append(f"{count} on the {side}" if place == 0 else f"at {at} to the {side}: {count}")
            at += count
        tokens = self.usage.get("completion_tokens")
        return f"[{', '.join(parts)}" + (f"; {tokens} tokens" if tokens else "") + f"; {self.finish or 'unfinished'}]"


def _made(chunk: dict[str, Any], text: str) -> tuple[str, int]:
    """(side, tokens) of a chunk. A server that tells neither gets one token for each chunk with text."""
    found = chunk.get("midstream")
    if not isinstance(found, dict):
        return "server", 1 if text else 0
    side, tokens = found.get("side"), found.get("tokens")
    return str(side), tokens if isinstance(tokens, int) and tokens > 0 else 0

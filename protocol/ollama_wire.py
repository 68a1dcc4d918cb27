"""Ollama's own API as JSON lines: answers, lists of models, errors. Parsing is in protocol.ollama_parse."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from protocol.errors import MidstreamError
from protocol.openai_wire import dump
from protocol.openai_wire import error_body as openai_error_body
from protocol.text import FinishReason, Usage

Json = dict[str, Any]
HEADERS: Mapping[str, str] = {
    "content-type": "application/x-ndjson",
    "cache-control": "no-store",
    "x-accel-buffering": "no",
}


def moment(unix_s: float) -> str:
    """RFC 3339, as Ollama writes times."""
    return datetime.fromtimestamp(unix_s, UTC).isoformat().replace("+00:00", "Z")


def line(document: Mapping[str, Any]) -> bytes:
    """One line of a stream."""
    return dump(document) + b"\n"


def ends(finish: FinishReason, usage: Usage, ttft_s: float | None, total_s: float) -> Json:
    """What the last line adds: reason, counts, and times in nanoseconds."""
    first_s = min(ttft_s or 0.0, total_s)
    return {
        "done": True,
        "done_reason": "length" if finish == "length" else "stop",
        "total_duration": _ns(total_s),
        "load_duration": 0,
        "prompt_eval_count": usage.prompt_tokens,
        "prompt_eval_duration": _ns(first_s),
        "eval_count": usage.completion_tokens,
        "eval_duration": _ns(total_s - first_s),
    }


def call_object(id: str, index: int, name: str, arguments: Mapping[str, Any]) -> Json:
    """A tool call; always whole, its arguments an object."""
    return {"id": id, "function": {"index": index, "name": name, "arguments": dict(arguments)}}


def models_list(models: Sequence[str], unix_s: float) -> Json:
    """GET /api/tags."""
    return {"models": [_listed(model, unix_s) for model in models]}


def shown_model(context_tokens: int, can: Sequence[str], unix_s: float) -> Json:
    """POST /api/show: what is known here of a model, whoever runs it."""
    return {
        "modelfile": "",
        "parameters": "",
        "template": "",
        "modified_at": moment(unix_s),
        "details": _details(),
        "model_info": {"general.architecture": "midstream", "midstream.context_length": context_tokens},
        "capabilities": list(can),
    }


def error_line(err: MidstreamError) -> bytes:
    """Last line of a stream that was cut; no line with `done: true` comes after it."""
    return line({"error": str(err)})


def error_body(err: MidstreamError) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of a refusal."""
    status, headers, _ = openai_error_body(err)
    return status, headers, dump({"error": str(err)})


def _listed(model: str, unix_s: float) -> Json:
    return {
        "name": model,
        "model": model,
        "modified_at": moment(unix_s),
        "size": 0,
        "digest": "",
        "details": _details(),
    }


def _details() -> Json:
    return {
        "parent_model": "",
        "format": "",
        "family": "",
        "families": [],
        "parameter_size": "",
        "quantization_level": "",
    }


def _ns(seconds: float) -> int:
    return max(0, round(seconds * 1e9))

"""Refusals in the form of the API that a path belongs to, for what stands before a front door."""

from __future__ import annotations

from collections.abc import Callable

from protocol import anthropic_wire, oip, ollama_wire, openai_wire
from protocol.errors import MidstreamError

ErrorBody = tuple[int, dict[str, str], bytes]
"""Status, headers and body."""

_FORMS: tuple[tuple[str, Callable[[MidstreamError], ErrorBody]], ...] = (
    ("/v2", oip.error_body),
    ("/v1/messages", anthropic_wire.error_body),
    ("/api", ollama_wire.error_body),
)


def error_body(path: str, err: MidstreamError) -> ErrorBody:
    """OIP's error text for /v2, Anthropic's for /v1/messages, Ollama's for /api, OpenAI's object for the rest."""
    for begin, form in _FORMS:
        if path == begin or path.startswith(begin + "/"):
            return form(err)
    return openai_wire.error_body(err)

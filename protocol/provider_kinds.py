"""Every kind of model server by name: its codec, and where the vendor serves it."""

from __future__ import annotations

from protocol.anthropic_upstream import AnthropicCodec
from protocol.errors import ConfigError
from protocol.gemini_upstream import GeminiCodec
from protocol.ollama_upstream import OllamaCodec
from protocol.openai_upstream import OpenAICodec
from protocol.upstream import UpstreamCodec
from protocol.vendors import VENDORS

_OTHERS: dict[str, tuple[type[AnthropicCodec | GeminiCodec | OllamaCodec], str]] = {
    "anthropic": (AnthropicCodec, "https://api.anthropic.com"),
    "gemini": (GeminiCodec, "https://generativelanguage.googleapis.com"),
    "ollama": (OllamaCodec, "http://127.0.0.1:11434"),
}

KINDS: tuple[str, ...] = (*VENDORS, *_OTHERS)


def codec_of(kind: str) -> UpstreamCodec:
    """The wire form of a kind. Raises ConfigError for one that is not known."""
    if kind in VENDORS:
        return OpenAICodec(VENDORS[kind])
    if kind in _OTHERS:
        return _OTHERS[kind][0]()
    raise ConfigError(f"{kind!r} is no kind of provider", next_step=f"one of {', '.join(KINDS)}", field="kind")


def base_url_of(kind: str) -> str:
    """Where the vendor serves it; empty: the operator has to say."""
    return VENDORS[kind].base_url if kind in VENDORS else _OTHERS[kind][1]

"""Bodies of Ollama's own API to the canonical request, checked field by field.

Streaming is on unless it is switched off. `keep_alive` and the options that only place a model in memory are left to
this side; an option that would change the answer and cannot be honoured is refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from attrs import evolve

from protocol.chat import ChatRequest, EmbeddingsRequest, tool_call
from protocol.errors import BadRequest, TooLarge, Unsupported
from protocol.images import MAX_IMAGES, from_base64
from protocol.openai_parse import (
    MAX_EMBEDDING_TEXTS,
    MAX_MESSAGES,
    MAX_TOOLS,
    checked_images,
    parse_tools,
    stop_texts,
)
from protocol.request_fields import Fields, clean, load_object
from protocol.text import ImagePart, Message, Part, Sampling, TextPart

DEFAULT_MAX_TOKENS = 1024
LATEST = ":latest"
HARMLESS = frozenset(
    {
        "num_ctx", "num_batch", "num_gpu", "main_gpu", "num_thread", "num_keep", "use_mmap", "low_vram", "numa",
        "num_predict", "temperature", "top_p", "seed", "stop", "vocab_only", "use_mlock",
    }
)  # fmt: skip
"""Options that are honoured, or that say only how to run the model. A prompt over the context is refused, never cut,
whatever num_ctx and num_keep say."""

NEUTRAL: Mapping[str, tuple[float, ...]] = {
    "repeat_penalty": (1,), "presence_penalty": (0,), "frequency_penalty": (0,), "mirostat": (0,), "min_p": (0,),
    "typical_p": (1,), "tfs_z": (1,), "top_k": (0,),
}  # fmt: skip
"""Options with the values that change nothing."""


def parse_chat(body: bytes | Mapping[str, Any]) -> ChatRequest:
    """Read a body of POST /api/chat. Raises BadRequest, Unsupported or TooLarge with `field`."""
    fields = Fields(load_object(body))
    tools, choice = parse_tools(fields.objects("tools", MAX_TOOLS), None)
    listed = fields.raw.get("messages")
    if not isinstance(listed, list) or not listed:
        raise BadRequest("messages must be a non-empty list", field="messages")
    if len(listed) > MAX_MESSAGES:
        raise TooLarge(f"messages has {len(listed)} entries, at most {MAX_MESSAGES} are taken", field="messages")
    turns = _linked([_turn(turn, f"messages[{number}]") for number, turn in enumerate(listed)])
    return ChatRequest(prompt=checked_images(turns), tools=tools, tool_choice=choice, **_shared(fields))


def parse_generate(body: bytes | Mapping[str, Any]) -> ChatRequest:
    """Read a body of POST /api/generate: one turn through the model's template, or the prompt as it is with `raw`."""
    fields = Fields(load_object(body))
    fields.only("suffix", ("",))
    fields.only("template", ("",))
    fields.only("context", ([],))
    prompt, images = _text(fields.raw, "prompt", ""), _images(fields.raw.get("images"), "images")
    shared = _shared(fields)
    if fields.flag("raw"):
        if images:
            raise Unsupported("images need the model's template", field="images")
        if not prompt:
            raise BadRequest("prompt must be a non-empty text", field="prompt")
        return ChatRequest(prompt=prompt, endpoint="completion", **shared)
    system = _text(fields.raw, "system", "")
    turns = (Message("system", system),) if system else ()
    user = Message("user", prompt, parts=(TextPart(prompt), *images) if images else ())
    return ChatRequest(prompt=checked_images((*turns, user)), **shared)


def parse_embed(body: bytes | Mapping[str, Any]) -> EmbeddingsRequest:
    """Read a body of POST /api/embed (`input`) or of the older /api/embeddings (`prompt`)."""
    fields = Fields(load_object(body))
    fields.only("dimensions", ())
    name = "input" if "input" in fields.raw else "prompt"
    given = fields.raw.get(name)
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts, list) or not texts or len(texts) > MAX_EMBEDDING_TEXTS:
        raise BadRequest(f"{name} must be a text or a list of 1 to {MAX_EMBEDDING_TEXTS} texts", field=name)
    if not all(isinstance(text, str) and text for text in texts):
        raise BadRequest(f"each {name} must be a non-empty text", field=name)
    return EmbeddingsRequest(_model(fields), tuple(clean(text, name) for text in texts))


def bare_name(model: str) -> str:
    """A model's name as it is known here.

    >>> bare_name("smollm2-135m:latest")
    'smollm2-135m'
    """
    return model.removesuffix(LATEST)


def _shared(fields: Fields) -> dict[str, Any]:
    fields.only("think", (False,))
    fields.only("logprobs", (False,))
    options = Fields(fields.mapping("options") or {}, "options.")
    for name, value in options.raw.items():
        if name in HARMLESS or value is None or value in NEUTRAL.get(name, ()):
            continue
        raise Unsupported(f"{name[:64]} is not supported", next_step=f"leave {name[:64]} out", field=f"options.{name}")
    predict = options.raw.get("num_predict")
    bounded = type(predict) is int and predict > 0
    return {
        "model": _model(fields),
        "sampling": Sampling(
            temperature=options.number("temperature", 0.0, 2.0, 0.8),
            top_p=options.number("top_p", 0.0, 1.0, 0.9, above=True),
            seed=None if options.raw.get("seed") is None else options.integer("seed", -(1 << 63), (1 << 63) - 1, 0),
            max_tokens=options.integer("num_predict", 1, 1 << 31, 1) if bounded else DEFAULT_MAX_TOKENS,
        ),
        "stream": fields.raw.get("stream") is not False,
        "include_usage": True,
        "stop": stop_texts(options.raw.get("stop"), "options.stop"),
        "response_format": _format(fields.raw.get("format")),
    }


def _model(fields: Fields) -> str:
    return bare_name(fields.model("GET /api/tags"))


def _format(raw: Any) -> Mapping[str, Any] | None:
    if raw in (None, ""):
        return None
    if raw == "json":
        return {"type": "json_object"}
    if isinstance(raw, Mapping):
        return {"type": "json_schema", "json_schema": {"name": "answer", "schema": dict(raw)}}
    raise BadRequest("format must be json or a JSON schema", field="format")


def _turn(raw: Any, path: str) -> Message:
    if not isinstance(raw, Mapping) or raw.get("role") not in ("system", "user", "assistant", "tool"):
        raise BadRequest("role must be system, user, assistant or tool", field=f"{path}.role")
    text = _text(raw, "content", "", f"{path}.")
    images = _images(raw.get("images"), f"{path}.images")
    calls = Fields(raw, f"{path}.").objects("tool_calls", MAX_TOOLS)
    parts: tuple[Part, ...] = (TextPart(text), *images) if images else ()
    return Message(
        role=str(raw["role"]),
        content=text,
        tool_calls=tuple(_call(call, f"{path}.tool_calls[{number}]") for number, call in enumerate(calls)),
        tool_call_id=_text(raw, "tool_name", "", f"{path}.") or None,
        parts=parts,
    )


def _linked(turns: Sequence[Message]) -> tuple[Message, ...]:
    """Calls with ids of their own; results with the id of the call they answer: by name, else the first open one."""
    made: list[Message] = []
    open_calls: list[tuple[str, str]] = []
    count = 0
    for turn in turns:
        calls = []
        for call in turn.tool_calls:
            count += 1
            id_ = call["id"] or f"call_{count}"
            open_calls.append((id_, call["function"]["name"]))
            calls.append(tool_call(id_, call["function"]["name"], call["function"]["arguments"]))
        id_ = turn.tool_call_id
        if turn.role == "tool":
            named = next((one for one in open_calls if one[1] == turn.tool_call_id), None)
            found = named or (open_calls[0] if open_calls and not turn.tool_call_id else None)
            if found is not None:
                open_calls.remove(found)
                id_ = found[0]
        made.append(evolve(turn, tool_calls=tuple(calls), tool_call_id=id_))
    return tuple(made)


def _call(raw: Mapping[str, Any], path: str) -> Mapping[str, Any]:
    function = raw.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise BadRequest("a tool call has a function with a name", field=f"{path}.function")
    arguments = function.get("arguments") or {}
    if not isinstance(arguments, Mapping):
        raise BadRequest("arguments must be an object", field=f"{path}.function.arguments")
    text = clean(json.dumps(arguments, ensure_ascii=False), path)
    return tool_call(str(raw.get("id") or "")[:256], clean(function["name"], path), text)


def _text(raw: Mapping[str, Any], name: str, default: str, prefix: str = "") -> str:
    value = raw.get(name)
    if value is None:
        return default
    if not isinstance(value, str):
        raise BadRequest(f"{name} must be a text", field=prefix + name)
    return clean(value, prefix + name)


def _images(raw: Any, path: str) -> tuple[ImagePart, ...]:
    if raw is None:
        return ()
    if not isinstance(raw, list) or len(raw) > MAX_IMAGES or not all(isinstance(image, str) for image in raw):
        raise BadRequest(f"images must be a list of at most {MAX_IMAGES} base64 texts", field=path)
    return tuple(from_base64(image, f"{path}[{number}]") for number, image in enumerate(raw))

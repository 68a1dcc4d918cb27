"""Bodies of OpenAI requests, checked field by field.

Unknown fields are ignored. A field that is known and cannot be honoured is refused by name (Unsupported), never
silently dropped; null stands for absent.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from protocol.chat import ChatRequest, EmbeddingsRequest, tool_call, tool_definition
from protocol.errors import BadRequest, TooLarge, Unsupported
from protocol.images import MAX_IMAGES, from_url
from protocol.request_fields import Fields, clean, load_object
from protocol.text import ImagePart, Message, Part, Prompt, Sampling, TextPart

MAX_MESSAGES = 2048
MAX_STOPS = 4
MAX_STOP_CHARS = 1024
MAX_TOP_LOGPROBS = 20
MAX_BIASES = 1024
MAX_TOOLS = 128
MAX_EMBEDDING_TEXTS = 256
MAX_PROMPT_IDS = 1 << 18
DEFAULT_MAX_TOKENS = 512
_TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")

_HARMLESS: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "presence_penalty": (0, 0.0),
    "frequency_penalty": (0, 0.0),
    "audio": (),
    "functions": (),
    "function_call": (),
    "prediction": (),
    "web_search_options": (),
}
"""Parameters that cannot be honoured, with the values that ask for nothing."""

_PLAIN_FIELDS = frozenset({"model", "messages", "max_tokens", "temperature", "top_p", "stream"})
"""Most requests have no others."""

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


def parse_chat(body: bytes | Mapping[str, Any], *, default_max_tokens: int = DEFAULT_MAX_TOKENS) -> ChatRequest:
    """Read a body of POST /v1/chat/completions.

    Raises BadRequest or Unsupported with `field` set to the parameter, TooLarge for a body over MAX_BODY_BYTES.
    """
    fields = Fields(load_object(body))
    if fields.raw.keys() <= _PLAIN_FIELDS:
        return _plain_chat(fields, default_max_tokens)
    want_logprobs = fields.flag("logprobs")
    top = fields.integer("top_logprobs", 0, MAX_TOP_LOGPROBS, 0)
    if top and not want_logprobs:
        raise BadRequest("top_logprobs needs logprobs: true", field="top_logprobs")
    tools, choice = parse_tools(fields.objects("tools", MAX_TOOLS), fields.raw.get("tool_choice"))
    parallel = fields.raw.get("parallel_tool_calls")
    if parallel is not None and not isinstance(parallel, bool):
        raise BadRequest("parallel_tool_calls must be true or false", field="parallel_tool_calls")
    return ChatRequest(
        model=fields.model(),
        prompt=_messages(fields.raw.get("messages")),
        sampling=_sampling(fields, max(1, top) if want_logprobs else 0, default_max_tokens),
        endpoint="chat",
        want_logprobs=want_logprobs,
        top_logprobs=top,
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=parallel is not False,
        response_format=_response_format(fields.mapping("response_format")),
        **_shared(fields),
    )


def _plain_chat(fields: Fields, default_max_tokens: int) -> ChatRequest:
    """What the long way makes of a body without other fields; nothing is looked for that is not there."""
    return ChatRequest(
        model=fields.model(),
        prompt=_messages(fields.raw.get("messages")),
        sampling=Sampling(
            temperature=fields.number("temperature", 0.0, 2.0, 1.0),
            top_p=fields.number("top_p", 0.0, 1.0, 1.0, above=True),
            max_tokens=fields.integer("max_tokens", 1, 1 << 31, default_max_tokens),
        ),
        stream=fields.flag("stream"),
    )


def parse_completion(body: bytes | Mapping[str, Any], *, default_max_tokens: int = DEFAULT_MAX_TOKENS) -> ChatRequest:
    """Read a body of POST /v1/completions; as `parse_chat`. The prompt is one text or one list of token ids."""
    fields = Fields(load_object(body))
    for name, harmless in (("echo", (False,)), ("suffix", ("",)), ("best_of", (1,)), ("tools", ([],))):
        fields.only(name, harmless)
    wanted = fields.raw.get("logprobs")
    top = fields.integer("logprobs", 0, MAX_TOP_LOGPROBS, 0)
    return ChatRequest(
        model=fields.model(),
        prompt=_prompt(fields.raw.get("prompt")),
        sampling=_sampling(fields, max(1, top) if wanted is not None else 0, default_max_tokens),
        endpoint="completion",
        want_logprobs=wanted is not None,
        top_logprobs=top,
        response_format=_response_format(fields.mapping("response_format")),
        **_shared(fields),
    )


def parse_embeddings(body: bytes | Mapping[str, Any]) -> EmbeddingsRequest:
    """Read a body of POST /v1/embeddings. Token-id input and `dimensions` are not supported."""
    fields = Fields(load_object(body))
    fields.only("dimensions", ())
    given = fields.raw.get("input")
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts, list) or not texts or len(texts) > MAX_EMBEDDING_TEXTS:
        raise BadRequest(f"input must be a text or a list of 1 to {MAX_EMBEDDING_TEXTS} texts", field="input")
    if not all(isinstance(text, str) and text for text in texts):
        raise BadRequest("each input must be a non-empty text", field="input")
    form = fields.raw.get("encoding_format") or "float"
    if form not in ("float", "base64"):
        raise BadRequest("encoding_format must be float or base64", field="encoding_format")
    checked = tuple(clean(text, "input") for text in texts)
    return EmbeddingsRequest(model=fields.model(), texts=checked, base64=form == "base64")


def parse_tools(raw: Sequence[Mapping[str, Any]], choice: Any) -> tuple[tuple[Mapping[str, Any], ...], str]:
    """Definitions and the choice as ChatRequest has them; `none` takes the tools away. Raises BadRequest."""
    if not raw and choice is None:
        return (), "auto"
    tools = tuple(_tool(tool, f"tools[{number}]") for number, tool in enumerate(raw))
    names = [tool["function"]["name"] for tool in tools]
    if len(set(names)) != len(names):
        raise BadRequest("two tools have the same name", field="tools")
    if isinstance(choice, Mapping):
        function = choice.get("function")
        name = function.get("name") if isinstance(function, Mapping) else None
        if choice.get("type") != "function" or name not in names:
            raise BadRequest("tool_choice must name a function of tools", field="tool_choice")
        return tools, f"function:{name}"
    if choice not in (None, "none", "auto", "required"):
        raise BadRequest("tool_choice must be none, auto, required or a function", field="tool_choice")
    if choice == "required" and not tools:
        raise BadRequest("tool_choice needs tools", field="tool_choice")
    return ((), "auto") if choice == "none" else (tools, choice or "auto")


def _tool(raw: Mapping[str, Any], path: str) -> Mapping[str, Any]:
    function = raw.get("function")
    if raw.get("type") != "function" or not isinstance(function, Mapping):
        raise Unsupported("a tool must be of type function", field=f"{path}.type")
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not _TOOL_NAME.fullmatch(name):
        raise BadRequest("a function's name has 1 to 128 letters, digits, _ . or -", field=f"{path}.function.name")
    if parameters is not None and not isinstance(parameters, Mapping):
        raise BadRequest("parameters must be a JSON schema", field=f"{path}.function.parameters")
    description = function.get("description")
    if description is not None and not isinstance(description, str):
        raise BadRequest("description must be a text", field=f"{path}.function.description")
    made = tool_definition(name, clean(description or "", path), parameters)
    if function.get("strict") is True:
        made["function"]["strict"] = True
    return made


def _response_format(form: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    kind = form.get("type", "text") if form else "text"
    if form is None or kind == "text":
        return None
    if kind == "json_object":
        return {"type": "json_object"}
    if kind != "json_schema":
        raise Unsupported("response_format is text, json_object or json_schema", field="response_format")
    named = form.get("json_schema")
    if not isinstance(named, Mapping) or not isinstance(named.get("schema", {}), Mapping):
        raise BadRequest("json_schema must hold a schema", field="response_format.json_schema")
    return {"type": "json_schema", "json_schema": dict(named)}


def _shared(fields: Fields) -> dict[str, Any]:
    """What both endpoints have in common, and what neither supports."""
    for name, harmless in _HARMLESS.items():
        if name in fields.raw:
            fields.only(name, harmless)
    modalities = fields.raw.get("modalities")
    if modalities is not None and modalities != ["text"]:
        raise Unsupported("only text can be answered", field="modalities")
    options = fields.mapping("stream_options") or {}
    include_usage = options.get("include_usage", False)
    if not isinstance(include_usage, bool):
        raise BadRequest("include_usage must be true or false", field="stream_options.include_usage")
    return {
        "stream": fields.flag("stream"),
        "include_usage": include_usage,
        "stop": stop_texts(fields.raw.get("stop")),
        "user": str(fields.raw.get("user") or "")[:256],
    }


def _sampling(fields: Fields, logprobs: int, default_max_tokens: int) -> Sampling:
    older = fields.integer("max_tokens", 1, 1 << 31, default_max_tokens)
    seed = fields.raw.get("seed")
    return Sampling(
        temperature=fields.number("temperature", 0.0, 2.0, 1.0),
        top_p=fields.number("top_p", 0.0, 1.0, 1.0, above=True),
        seed=None if seed is None else fields.integer("seed", -(1 << 63), (1 << 63) - 1, 0),
        max_tokens=fields.integer("max_completion_tokens", 1, 1 << 31, older),
        logit_bias=_biases(fields.mapping("logit_bias") or {}),
        logprobs=logprobs,
    )


def _biases(raw: Mapping[str, Any]) -> dict[int, float]:
    if len(raw) > MAX_BIASES:
        raise TooLarge(f"logit_bias has {len(raw)} entries, at most {MAX_BIASES} are taken", field="logit_bias")
    found: dict[int, float] = {}
    for key, value in raw.items():
        here = f"logit_bias.{key[:32]}"
        if not (key.isascii() and key.isdigit() and len(key) < 10):
            raise BadRequest("a key of logit_bias must be a token id", field=here)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not -100 <= value <= 100:
            raise BadRequest("a bias must be a number from -100 to 100", field=here)
        found[int(key)] = float(value)
    return found


def stop_texts(raw: Any, name: str = "stop") -> tuple[str, ...]:
    """Stop strings, one or a list. Raises BadRequest."""
    if raw is None:
        return ()
    listed = [raw] if isinstance(raw, str) else raw
    if not isinstance(listed, list) or len(listed) > MAX_STOPS:
        raise BadRequest(f"{name} must be a text or a list of at most {MAX_STOPS}", field=name)
    for text in listed:
        if not isinstance(text, str) or not 0 < len(text) <= MAX_STOP_CHARS:
            raise BadRequest(f"a stop text has 1 to {MAX_STOP_CHARS} characters", field=name)
    return tuple(clean(text, name) for text in listed)


def _prompt(raw: Any) -> Prompt:
    if isinstance(raw, list) and len(raw) == 1 and isinstance(raw[0], (str, list)):
        raw = raw[0]
    if isinstance(raw, str) and raw:
        return clean(raw, "prompt")
    if isinstance(raw, list) and raw and all(type(item) is int and 0 <= item < 1 << 31 for item in raw):
        if len(raw) > MAX_PROMPT_IDS:
            raise TooLarge(f"the prompt has {len(raw)} ids, at most {MAX_PROMPT_IDS} are taken", field="prompt")
        return tuple(raw)
    if isinstance(raw, list) and len(raw) > 1 and all(isinstance(item, (str, list)) for item in raw):
        raise Unsupported("one prompt per request", next_step="send one request per prompt", field="prompt")
    raise BadRequest("prompt must be a non-empty text or a list of token ids", field="prompt")


def _messages(raw: Any) -> tuple[Message, ...]:
    if not isinstance(raw, list) or not raw:
        raise BadRequest("messages must be a non-empty list", field="messages")
    if len(raw) > MAX_MESSAGES:
        raise TooLarge(f"messages has {len(raw)} entries, at most {MAX_MESSAGES} are taken", field="messages")
    found = tuple([_plain(item) or _message(item, f"messages[{number}]") for number, item in enumerate(raw)])
    for message in found:
        if message.parts:
            return checked_images(found)
    return found


def checked_images(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """The same messages. Raises TooLarge for more than MAX_IMAGES pictures."""
    count = sum(isinstance(part, ImagePart) for message in messages for part in message.parts)
    if count > MAX_IMAGES:
        raise TooLarge(f"the request has {count} images, at most {MAX_IMAGES} are taken", field="messages")
    return messages


def _plain(raw: Any) -> Message | None:
    """A message of a role and a text in ASCII, as most are; None for any other."""
    if type(raw) is not dict or len(raw) != 2:
        return None
    role, text = raw.get("role"), raw.get("content")
    if type(role) is not str or role not in _ROLES or type(text) is not str or not text.isascii():
        return None
    return Message(_ROLES[role], text)


def _message(raw: Any, path: str) -> Message:
    if not isinstance(raw, Mapping):
        raise BadRequest("a message must be an object", field=path)
    role = raw.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise BadRequest(f"role must be one of {', '.join(_ROLES)}", field=f"{path}.role")
    if len(raw) == 2 and type(raw.get("content")) is str:
        return Message(_ROLES[role], clean(raw["content"], f"{path}.content"))
    fields = Fields(raw, path + ".")
    listed = fields.objects("tool_calls", MAX_TOOLS)
    calls = tuple(_call(call, f"{path}.tool_calls[{number}]") for number, call in enumerate(listed))
    content = raw.get("content")
    if content is None and not (role == "assistant" and (calls or raw.get("refusal"))):
        raise BadRequest("content is missing", field=f"{path}.content")
    text, parts = _content(content, f"{path}.content")
    return Message(
        role=_ROLES[role],
        content=text,
        name=fields.optional_text("name"),
        tool_calls=calls,
        tool_call_id=fields.optional_text("tool_call_id"),
        parts=parts,
    )


def _call(raw: Mapping[str, Any], path: str) -> Mapping[str, Any]:
    function, id_ = raw.get("function"), raw.get("id")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise BadRequest("a tool call has a function with a name", field=f"{path}.function")
    arguments = function.get("arguments", "")
    if not isinstance(arguments, str):
        raise BadRequest("arguments must be JSON as a text", field=f"{path}.function.arguments")
    name = clean(function["name"], f"{path}.function.name")
    return tool_call(str(id_ or "")[:256], name, clean(arguments, f"{path}.function.arguments"))


def _content(raw: Any, path: str) -> tuple[str, tuple[Part, ...]]:
    """The text, and all parts where one of them is a picture."""
    if raw is None:
        return "", ()
    if isinstance(raw, str):
        return clean(raw, path), ()
    if not isinstance(raw, list) or len(raw) > MAX_MESSAGES:
        raise BadRequest("content must be a text or a list of parts", field=path)
    parts = tuple(_part(part, f"{path}[{number}]") for number, part in enumerate(raw))
    text = "\n".join(part.text for part in parts if isinstance(part, TextPart))
    return text, parts if any(isinstance(part, ImagePart) for part in parts) else ()


def _part(raw: Any, path: str) -> Part:
    kind = raw.get("type") if isinstance(raw, Mapping) else None
    if kind in ("text", "refusal"):
        text = raw.get(kind)
        if not isinstance(text, str):
            raise BadRequest(f"{kind} must be a text", field=f"{path}.{kind}")
        return TextPart(clean(text, f"{path}.{kind}"))
    if kind == "image_url":
        image = raw.get("image_url")
        url = image.get("url") if isinstance(image, Mapping) else image
        detail = image.get("detail") if isinstance(image, Mapping) else None
        if not isinstance(url, str) or detail not in (None, "auto", "low", "high"):
            raise BadRequest("image_url must have a url, and a detail of auto, low or high", field=f"{path}.image_url")
        return from_url(url, f"{path}.image_url.url", detail or "auto")
    raise Unsupported(f"content parts of type {str(kind)[:32]!r} are not supported", field=path)

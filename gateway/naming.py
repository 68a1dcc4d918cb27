"""What a request says of itself beside its prompt: user, conversation, intent label, labels. Pure.

By header: `x-midstream-user`, `-conversation`, `-intent`, `-labels` (`name=value`, separated by commas). By body:
`conversation_id`, `user`, and the same names in `metadata` (Anthropic's `user_id` too), whose other entries are labels.
Headers win.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import evolve

from gateway.context import Caller
from protocol import trace
from protocol.errors import BadRequest
from protocol.request_fields import clean

MAX_CHARS = 256
MAX_LABELS = 16
HEADER = "x-midstream-"
_OWN = ("user", "user_id", "conversation_id", "intent")


def named(caller: Caller, headers: Mapping[str, str], body: Mapping[str, Any]) -> Caller:
    """The caller with what this request says. Raises BadRequest by the field."""
    raw = body.get("metadata")
    if raw is not None and not isinstance(raw, Mapping):
        raise BadRequest("metadata must be an object", field="metadata")
    metadata: Mapping[str, Any] = raw or {}
    user = _first(headers, "user", body.get("user"), metadata.get("user"), metadata.get("user_id"))
    conversation = _first(headers, "conversation", body.get("conversation_id"), metadata.get("conversation_id"))
    intent = _first(headers, "intent", metadata.get("intent"))
    labels = _labels(headers, metadata)
    traceparent = headers.get(trace.HEADER, "")
    if not (user or conversation or intent or labels or traceparent):
        return caller
    return evolve(
        caller, user=user, conversation_id=conversation, intent=intent, labels=labels, traceparent=traceparent
    )


def _first(headers: Mapping[str, str], name: str, *values: Any) -> str | None:
    given: Any = headers.get(HEADER + name)
    for value in values:
        if given not in (None, ""):
            break
        given = value
    if given in (None, ""):
        return None
    if not isinstance(given, str) or len(given) > MAX_CHARS:
        raise BadRequest(f"{name} must be a text of at most {MAX_CHARS} characters", field=name)
    return clean(given, name)


def _labels(headers: Mapping[str, str], metadata: Mapping[str, Any]) -> dict[str, str]:
    listed = headers.get(HEADER + "labels", "")
    if not (listed or metadata):
        return {}
    found = {str(key)[:MAX_CHARS]: str(value)[:MAX_CHARS] for key, value in metadata.items() if key not in _OWN}
    for part in listed.split(","):
        name, equals, value = part.partition("=")
        if equals and name.strip():
            found[name.strip()[:MAX_CHARS]] = value.strip()[:MAX_CHARS]
    if len(found) > MAX_LABELS:
        raise BadRequest(f"a request has at most {MAX_LABELS} labels", field="metadata")
    for name, value in found.items():
        clean(name + value, "metadata")
    return found

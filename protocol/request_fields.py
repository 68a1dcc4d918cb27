"""Typed access to the fields of a request's body, shared by all front doors; errors name the field."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from protocol.decode import load_json
from protocol.errors import BadRequest, MidstreamError, ProtocolError, Unsupported

MAX_BODY_BYTES = 8 << 20


def load_object(body: bytes | Mapping[str, Any]) -> Mapping[str, Any]:
    """The body as one JSON object. Raises BadRequest, TooLarge over MAX_BODY_BYTES."""
    if isinstance(body, bytes):
        try:
            body = load_json(body, what="the request body", max_bytes=MAX_BODY_BYTES, max_depth=64)
        except ProtocolError as err:
            raise BadRequest(err.message, next_step="send one JSON object in UTF-8") from err
    if not isinstance(body, Mapping):
        raise BadRequest("the request body must be a JSON object")
    return body


def clean(text: str, path: str) -> str:
    """The same text. Raises BadRequest: JSON can say half a surrogate pair (\\ud800), UTF-8 and tokenizers cannot."""
    if text.isascii():
        return text
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as err:
        raise BadRequest("text has half a surrogate pair", field=path) from err
    return text


class Fields:
    """Typed access to the fields of one object; `prefix` stands before the name in errors."""

    def __init__(self, raw: Mapping[str, Any], prefix: str = "") -> None:
        self.raw = raw
        self.prefix = prefix

    def _bad(self, name: str, expected: str, make: Callable[..., MidstreamError] = BadRequest) -> MidstreamError:
        return make(f"{name} must be {expected}", field=self.prefix + name)

    def text(self, name: str) -> str:
        value = self.raw.get(name)
        if not isinstance(value, str) or not 0 < len(value) <= 256:
            raise self._bad(name, "a text of 1 to 256 characters")
        return clean(value, self.prefix + name)

    def model(self, listed_at: str = "GET /v1/models") -> str:
        """The model's name; who leaves it out is told where the names are."""
        try:
            return self.text("model")
        except BadRequest as err:
            err.next_step = f"name one of {listed_at}, or auto"
            raise

    def optional_text(self, name: str) -> str | None:
        return None if self.raw.get(name) is None else self.text(name)

    def flag(self, name: str) -> bool:
        value = self.raw.get(name)
        if value is not None and not isinstance(value, bool):
            raise self._bad(name, "true or false")
        return bool(value)

    def integer(self, name: str, least: int, most: int, default: int) -> int:
        value = self.raw.get(name)
        if value is None:
            return default
        if type(value) is not int or not least <= value <= most:
            raise self._bad(name, f"an integer from {least} to {most}")
        return value

    def number(self, name: str, least: float, most: float, default: float, above: bool = False) -> float:
        value = self.raw.get(name)
        if value is None:
            return default
        numeric = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not numeric or not least <= value <= most or (above and value == least):
            raise self._bad(
                name, f"a number {'above' if above else 'from'} {least:g} {'up ' if above else ''}to {most:g}"
            )
        return float(value)

    def mapping(self, name: str) -> Mapping[str, Any] | None:
        value = self.raw.get(name)
        if value is not None and not isinstance(value, Mapping):
            raise self._bad(name, "an object")
        return value

    def objects(self, name: str, most: int) -> tuple[Mapping[str, Any], ...]:
        value = self.raw.get(name)
        if value is None:
            return ()
        if not isinstance(value, list) or len(value) > most or not all(isinstance(item, Mapping) for item in value):
            raise self._bad(name, f"a list of at most {most} objects")
        return tuple(value)

    def only(self, name: str, harmless: tuple[Any, ...]) -> None:
        """Refuse the field unless it is absent or has a value that changes nothing."""
        value = self.raw.get(name)
        if value is None or any(type(value) is type(item) and value == item for item in harmless):
            return
        raise Unsupported(f"{name} is not supported", next_step=f"leave {name} out", field=self.prefix + name)

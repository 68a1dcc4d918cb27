"""Strict decoding of documents into attrs classes; errors name the field by its dotted path.

A wrong type is never converted: a bool is not a number, a number is not a string; only an integer may stand for a
float. Fields that the class does not know are ignored and can be listed, so that a newer minor version is readable.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin

import attrs

from protocol.errors import ProtocolError, TooLarge

T = TypeVar("T")

_ATOMS = frozenset({str, int, float, bool, type(None)})

MAX_DOCUMENT_BYTES = 64 << 10
"""A document larger than this is an accident or an attack; the largest of ours (a profile) has about 8 KiB."""

MAX_DEPTH = 32
"""Documents of ours nest five levels deep; parsers recurse, so depth is bounded before anything walks it."""


def load_json(
    data: bytes, *, what: str, max_bytes: int = MAX_DOCUMENT_BYTES, max_depth: int = MAX_DEPTH, bulk: bool = False
) -> Any:
    """Parse UTF-8 JSON as RFC 8259 has it: no NaN or Infinity, no duplicate keys, bounded size and depth.

    bulk: long arrays of numbers; depth is then bounded by the parser only and 1e999 is not looked for.
    Raises TooLarge over `max_bytes` (before parsing) and ProtocolError for everything else; `what` names the document.
    """
    if len(data) > max_bytes:
        raise TooLarge(f"{what} has {len(data)} bytes, at most {max_bytes} are taken")
    try:
        found = (_BULK if bulk else _STRICT).decode(data.decode("utf-8"))
    except UnicodeDecodeError as err:
        raise ProtocolError(f"{what} is not UTF-8 at byte {err.start}") from err
    except RecursionError as err:
        raise ProtocolError(f"{what} nests more than {max_depth} levels deep") from err
    except ValueError as err:
        reason = "a number has too many digits" if "set_int_max_str_digits" in str(err) else str(err)
        raise ProtocolError(f"{what} is not JSON: {reason}") from err
    # What opens no more boxes than that cannot be deeper; brackets in texts only make the look needless.
    if not bulk and data.count(b"{") + data.count(b"[") > max_depth:
        _check_depth(found, what, max_depth)
    return found


def decode(cls: type[T], data: bytes | Mapping[str, Any], *, what: str, max_bytes: int = MAX_DOCUMENT_BYTES) -> T:
    """Build `cls` from JSON bytes or a parsed mapping. Raises ProtocolError with `field` "a.b[2].c", or TooLarge."""
    return decode_listing(cls, data, what=what, max_bytes=max_bytes)[0]


def decode_listing(
    cls: type[T], data: bytes | Mapping[str, Any], *, what: str, max_bytes: int = MAX_DOCUMENT_BYTES
) -> tuple[T, tuple[str, ...]]:
    """As `decode`, with the dotted paths of fields that were ignored because `cls` does not know them."""
    raw = load_json(data, what=what, max_bytes=max_bytes) if isinstance(data, bytes) else data
    walk = _Walk(what)
    return typing.cast(T, walk.record(cls, raw, "")), tuple(walk.unknown)


def encode(document: Any, keep_order: frozenset[str] = frozenset()) -> bytes:
    """Compact UTF-8 JSON with sorted keys: equal documents give equal bytes. Bytes become base64, sets sorted lists.

    keep_order: fields whose values keep the order of their keys, at any depth below, because it means something.
    """
    found = plain(document)
    text = _AS_IS.encode(_sorted(found, keep_order)) if keep_order else _BY_KEY.encode(found)
    return text.encode("utf-8")


_AS_IS = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False, allow_nan=False)
_BY_KEY = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False, allow_nan=False, sort_keys=True)


def _sorted(value: Any, keep_order: frozenset[str]) -> Any:
    if isinstance(value, dict):
        return {
            key: item if type(item) in _ATOMS or key in keep_order else _sorted(item, keep_order)
            for key, item in sorted(value.items())
        }
    return [_sorted(item, keep_order) for item in value] if isinstance(value, list) else value


@cache
def _names(cls: type) -> tuple[str, ...] | None:
    """Field names of an attrs class; None for any other."""
    return tuple(attribute.name for attribute in attrs.fields(cls)) if attrs.has(cls) else None


def plain(value: Any) -> Any:
    """`value` as JSON types only: attrs classes become dicts, bytes base64, tuples lists, sets sorted lists."""
    kind: type = type(value)
    if kind in _ATOMS:
        return value
    names = _names(kind)
    if names is not None:
        return {name: plain(getattr(value, name)) for name in names}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (bytes, bytearray, memoryview)):
        return base64.b64encode(value).decode("ascii")
    if isinstance(value, (frozenset, set)):
        return sorted(plain(item) for item in value)
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def check_schema(found: str, expected: str) -> None:
    """Raise ProtocolError unless `found` has the name and major version of `expected` ("name/major.minor")."""
    if _schema(found) is None or _schema(found) != _schema(expected):
        raise ProtocolError(
            f"schema is {found[:64]!r}, this release reads {expected!r} of any minor version",
            next_step="update the older side",
            field="schema",
        )


def _schema(text: str) -> tuple[str, int] | None:
    name, _, version = text.rpartition("/")
    major, dot, minor = version.partition(".")
    numeric = all(part.isascii() and part.isdigit() and len(part) <= 6 for part in (major, minor))
    return (name, int(major)) if name and dot and numeric else None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"key {twice[:64]!r} appears twice")
    return found


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a JSON number")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"number {text[:32]} is out of range")
    return number


_STRICT = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_no_constant, parse_float=_finite)
_BULK = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_no_constant)


def _check_depth(value: Any, what: str, max_depth: int) -> None:
    level: list[Any] = [value]
    for _ in range(max_depth + 1):
        level = [
            item
            for box in level
            if isinstance(box, (dict, list))
            for item in (box.values() if isinstance(box, dict) else box)
            if isinstance(item, (dict, list))
        ]
        if not level:
            return
    raise ProtocolError(f"{what} nests more than {max_depth} levels deep")


@cache
def _hints(cls: type) -> dict[str, Any]:
    """Resolved annotations of an attrs class, by field name."""
    return typing.get_type_hints(cls)


_Field = tuple[str, Any, frozenset[type], bool]
"""Name, type, types whose values stand as they are, and whether the field may be missing."""


@cache
def _fields(cls: type) -> tuple[_Field, ...]:
    hints = _hints(cls)
    return tuple(
        (one.name, hints[one.name], _standing(hints[one.name]), one.default is not attrs.NOTHING)
        for one in attrs.fields(cls)
    )


def _standing(kind: Any) -> frozenset[type]:
    """What most fields hold, which needs no walk: one type comparison tells that a value is right."""
    kinds = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    return frozenset(one for one in kinds if one in (bool, int, str, float, type(None)))


def _stands(value: Any) -> bool:
    """A text without surrogates, or a finite number, a boolean or null."""
    return value.isascii() if type(value) is str else type(value) is not float or math.isfinite(value)


class _Walk:
    """One decoding; collects unknown paths on the way."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.unknown: list[str] = []

    def wrong(self, path: str, expected: str, value: Any) -> ProtocolError:
        got = {
            type(None): "null", bool: "a boolean", int: "an integer", float: "a number", str: "a string",
            list: "a list", dict: "an object",
        }.get(type(value), type(value).__name__)  # fmt: skip
        where = f"field {path!r} of {self.what}" if path else self.what
        return ProtocolError(f"{where} must be {expected}, got {got}", field=path or None)

    def record(self, cls: type, value: Any, path: str) -> Any:
        if not isinstance(value, Mapping):
            raise self.wrong(path, "an object", value)
        hints = _hints(cls)
        taken: dict[str, Any] = {}
        for name, kind, standing, may_miss in _fields(cls):
            if name in value:
                item = value[name]
                stands = type(item) in standing and _stands(item)
                taken[name] = item if stands else self.value(kind, item, _join(path, name))
            elif not may_miss:
                here = _join(path, name)
                raise ProtocolError(f"field {here!r} of {self.what} is missing", field=here)
        if not value.keys() <= hints.keys():
            self.unknown.extend(_join(path, str(key)) for key in value if key not in hints)
        try:
            return cls(**taken)
        except (ValueError, TypeError) as err:  # a validator of the class
            raise ProtocolError(f"{self.what} is not valid: {err}", field=path or None) from err

    def value(self, kind: Any, value: Any, path: str) -> Any:
        if kind is Any:
            return value
        if attrs.has(kind):
            return self.record(kind, value, path)
        origin, args = get_origin(kind), get_args(kind)
        if origin is Literal:
            return self.literal(args, value, path)
        if origin in (Union, types.UnionType):
            return self.union(args, value, path)
        if origin in (tuple, list, frozenset, set, Sequence):
            return self.items(origin, args, value, path)
        if origin in (Mapping, dict):
            return self.mapping(args, value, path)
        return self.scalar(kind, value, path)

    def literal(self, choices: tuple[Any, ...], value: Any, path: str) -> Any:
        for choice in choices:
            if type(choice) is type(value) and choice == value:
                return value
        listed = ", ".join("null" if choice is None else str(choice) for choice in choices)
        if isinstance(value, str):
            raise ProtocolError(
                f"field {path!r} of {self.what} is {value[:64]!r}, not one of: {listed}",
                field=path,
            )
        raise self.wrong(path, f"one of: {listed}", value)

    def union(self, members: tuple[Any, ...], value: Any, path: str) -> Any:
        if value is None and type(None) in members:
            return None
        rest = [member for member in members if member is not type(None)]
        first: ProtocolError | None = None
        known = len(self.unknown)
        for member in rest:
            try:
                return self.value(member, value, path)
            except ProtocolError as err:
                first = first or err
                del self.unknown[known:]
        assert first is not None, "a union has members"
        raise first

    def items(self, origin: Any, args: tuple[Any, ...], value: Any, path: str) -> Any:
        if not isinstance(value, (list, tuple)):
            raise self.wrong(path, "a list", value)
        if origin is tuple and args and args[-1] is not Ellipsis:
            if len(value) != len(args):
                raise ProtocolError(
                    f"field {path!r} of {self.what} must have {len(args)} items, got {len(value)}", field=path
                )
            kinds: Sequence[Any] = args
        else:
            kinds = [args[0]] * len(value)
        found = [
            self.value(kind, item, f"{path}[{at}]") for at, (kind, item) in enumerate(zip(kinds, value, strict=True))
        ]
        make: Callable[[list[Any]], Any] = tuple if origin is Sequence else origin
        return make(found)

    def mapping(self, args: tuple[Any, ...], value: Any, path: str) -> dict[Any, Any]:
        if not isinstance(value, Mapping):
            raise self.wrong(path, "an object", value)
        return {
            self.key(args[0], key, path): self.value(args[1], item, _join(path, key)) for key, item in value.items()
        }

    def key(self, kind: Any, key: Any, path: str) -> Any:
        if kind is not int:
            return self.scalar(str, key, path)
        text = str(key)
        if not (text.lstrip("-").isascii() and text.lstrip("-").isdigit() and len(text) <= 20):
            raise ProtocolError(f"key {text[:64]!r} in {path!r} of {self.what} must be an integer", field=path)
        return int(text)

    def scalar(self, kind: Any, value: Any, path: str) -> Any:
        if kind is bool and isinstance(value, bool):
            return value
        if kind is int and isinstance(value, int) and not isinstance(value, bool):
            return value
        if kind is float and isinstance(value, (int, float)) and not isinstance(value, bool):
            return self.number(value, path)
        if kind is str and isinstance(value, str):
            return self.text(value, path)
        if kind is bytes and isinstance(value, str):
            return self.base64(value, path)
        if kind is Path and isinstance(value, str) and "\0" not in value:
            return Path(value)
        names = {bool: "true or false", int: "an integer", float: "a number", str: "a string", bytes: "base64 text"}
        raise self.wrong(path, names.get(kind, getattr(kind, "__name__", str(kind))), value)

    def number(self, value: float, path: str) -> float:
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            raise ProtocolError(f"field {path!r} of {self.what} is out of range", field=path)
        return number

    def text(self, value: str, path: str) -> str:
        if not value.isascii():
            try:
                value.encode("utf-8")
            except UnicodeEncodeError as err:
                raise ProtocolError(f"field {path!r} of {self.what} has half a surrogate pair", field=path) from err
        return value

    def base64(self, value: str, path: str) -> bytes:
        try:
            return base64.b64decode(value.encode("ascii", "replace"), validate=True)
        except binascii.Error as err:
            raise ProtocolError(f"field {path!r} of {self.what} is not base64", field=path) from err


def _join(path: str, name: str) -> str:
    return f"{path}.{name[:64]}" if path else name[:64]

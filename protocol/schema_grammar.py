"""JSON schemas as GBNF grammars, for answers under a schema that go on where another engine left them. Pure.

Properties come in the schema's order; blanks are allowed wherever JSON allows them, as whoever wrote the beginning may
have set them. Keywords that narrow values in other ways are refused: ignoring one would let wrong values through.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from attrs import define, field

from protocol.errors import Unsupported

MAX_RULES = 2000
_WS = r"ws ::= [ \t\n\r]*"
_BASE = {
    "any": "object | array | string | number | boolean | null",
    "object": r'"{" ws (string ws ":" ws any ws ("," ws string ws ":" ws any ws)*)? "}"',
    "array": r'"[" ws (any ws ("," ws any ws)*)? "]"',
    "string": r'"\"" char* "\""',
    "char": r'[^"\\\x00-\x1F] | "\\" (["\\/bfnrt] | "u" [0-9a-fA-F]{4})',
    "number": r'integer ("." [0-9]+)? ([eE] [-+]? [0-9]+)?',
    "integer": r'"-"? ("0" | [1-9] [0-9]*)',
    "boolean": '"true" | "false"',
    "null": '"null"',
}
_ANNOTATIONS = frozenset(
    {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$schema", "$id", "$comment"}
)
_STRUCTURE = frozenset({"$ref", "$defs", "definitions", "type", "enum", "const", "anyOf", "oneOf", "allOf"})
_OF_TYPE = {
    "object": frozenset({"properties", "required", "additionalProperties"}),
    "array": frozenset({"items", "minItems", "maxItems"}),
    "string": frozenset({"minLength", "maxLength"}),
}
_KNOWN = _ANNOTATIONS | _STRUCTURE | frozenset().union(*_OF_TYPE.values())


def schema_grammar(schema: Mapping[str, Any]) -> str:
    """GBNF of the JSON documents that fit. Raises Unsupported for keywords that it cannot honour."""
    return _Writer(schema).grammar()


@define
class _Writer:
    schema: Mapping[str, Any]
    rules: dict[str, str] = field(factory=dict)
    refs: dict[str, str] = field(factory=dict)

    def grammar(self) -> str:
        root = self._value(self.schema)
        lines = [f"root ::= ws {root} ws", _WS]
        lines += [f"{name} ::= {body}" for name, body in {**_BASE, **self.rules}.items()]
        return "\n".join(lines) + "\n"

    def _rule(self, body: str) -> str:
        name = self._reserve()
        self.rules[name] = body
        return name

    def _reserve(self) -> str:
        if len(self.rules) >= MAX_RULES:
            raise Unsupported(f"a schema that needs more than {MAX_RULES} rules", field="response_format")
        name = f"s{len(self.rules)}"
        self.rules[name] = ""
        return name

    def _value(self, schema: Any) -> str:
        """Name of the rule for a schema."""
        if schema is True or schema == {}:
            return "any"
        if not isinstance(schema, Mapping):
            raise Unsupported("a schema that allows nothing", field="response_format")
        unknown = sorted(set(schema) - _KNOWN)
        if unknown:
            raise Unsupported(f"the schema keyword {unknown[0]!r}", field="response_format")
        if "$ref" in schema:
            return self._referred(str(schema["$ref"]))
        if "const" in schema:
            return self._rule(_literal(schema["const"]))
        if "enum" in schema:
            return self._rule(" | ".join(_literal(one) for one in schema["enum"]))
        for either in ("anyOf", "oneOf"):
            if either in schema:
                return self._rule(" | ".join(self._value(one) for one in schema[either]))
        if "allOf" in schema:
            return self._only(schema["allOf"])
        return self._typed(schema)

    def _only(self, schemas: Sequence[Any]) -> str:
        if len(schemas) != 1:
            raise Unsupported("the schema keyword 'allOf' with several schemas", field="response_format")
        return self._value(schemas[0])

    def _referred(self, ref: str) -> str:
        if ref in self.refs:
            return self.refs[ref]
        found: Any = self.schema
        for step in ref.removeprefix("#").strip("/").split("/") if ref != "#" else ():
            found = found.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
        if not ref.startswith("#") or found is None:
            raise Unsupported(f"the reference {ref!r}", field="response_format")
        self.refs[ref] = name = self._reserve()
        self.rules[name] = self._value(found)
        return name

    def _typed(self, schema: Mapping[str, Any]) -> str:
        kinds = schema.get("type")
        if kinds is None:
            kinds = [kind for kind, keywords in _OF_TYPE.items() if keywords & set(schema)] or ["any"]
        makers: dict[str, Callable[[Mapping[str, Any]], str]] = {
            "object": self._object,
            "array": self._array,
            "string": self._string,
        }
        names = []
        for kind in [kinds] if isinstance(kinds, str) else kinds:
            if kind not in _BASE:
                raise Unsupported(f"the type {kind!r} in a schema", field="response_format")
            names.append(makers[kind](schema) if kind in makers else kind)
        return names[0] if len(names) == 1 else self._rule(" | ".join(names))

    def _string(self, schema: Mapping[str, Any]) -> str:
        least, most = int(schema.get("minLength", 0)), schema.get("maxLength")
        if not least and most is None:
            return "string"
        return self._rule(rf'"\"" char{{{least},{"" if most is None else int(most)}}} "\""')

    def _array(self, schema: Mapping[str, Any]) -> str:
        item = self._value(schema.get("items", True))
        least, most = int(schema.get("minItems", 0)), schema.get("maxItems")
        if most == 0:
            return self._rule('"[" ws "]"')
        more = f'("," ws {item} ws){{{max(0, least - 1)},{"" if most is None else int(most) - 1}}}'
        body = f"{item} ws {more}"
        return self._rule(f'"[" ws {body} "]"' if least else f'"[" ws ({body})? "]"')

    def _object(self, schema: Mapping[str, Any]) -> str:
        properties = schema.get("properties", {})
        required = set(schema.get("required", ()))
        if required - set(properties):
            raise Unsupported("a required property that the schema does not describe", field="response_format")
        others = schema.get("additionalProperties", True)
        more = None if others is False else f'string ws ":" ws {self._value(others)} ws'
        # From the last to the first: what may follow when something stands before it, and when nothing does.
        behind = self._rule(f'("," ws {more})*' if more else '""')
        alone = self._rule(f'({more} ("," ws {more})*)?' if more else '""')
        for name, inner in reversed(list(properties.items())):
            pair = f'{_literal(name)} ws ":" ws {self._value(inner)} ws'
            first, following = f"{pair} {behind}", f'"," ws {pair} {behind}'
            if name not in required:
                first, following = f"{first} | {alone}", f"{following} | {behind}"
            behind, alone = self._rule(following), self._rule(first)
        return self._rule(f'"{{" ws {alone} "}}"')


def _literal(value: Any) -> str:
    """A JSON value as a GBNF literal."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'

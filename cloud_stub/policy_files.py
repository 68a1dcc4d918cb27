"""Policy files as people write them: TOML, JSON or YAML; and the routing file, whose sections stand under `route`."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

from cloud_stub.policy_yaml import load_yaml
from gateway.intents import default_model
from protocol.decode import load_json
from protocol.errors import BadRequest, ProtocolError
from protocol.policy import Policy
from protocol.policy_routing import is_edge, unarmed

Form = Literal["toml", "json", "yaml"]
FORMS: tuple[Form, ...] = get_args(Form)

_FORMS: Mapping[str, Form] = {".json": "json", ".yaml": "yaml", ".yml": "yaml"}

_LISTS = ("intent", "estimated_complexity", "tenants")
"""Conditions that may be written as one word."""


def form_of(file: Path) -> Form:
    """By the end of the file's name; TOML unless it says otherwise."""
    return _FORMS.get(file.suffix.lower(), "toml")


def parsed(data: bytes, form: Form) -> dict[str, Any]:
    """The file's sections, `route` as `routing`. Raises BadRequest that names the line or the field."""
    raw = _raw(data, form)
    if not isinstance(raw, dict):
        raise BadRequest("the policy must be a table of sections")
    if "route" in raw:
        if "routing" in raw:
            raise BadRequest("the file has both `route` and `routing`", next_step="keep one of them", field="route")
        raw["routing"] = raw.pop("route")
    return _listed(raw)


def check_armed(policy: Policy) -> None:
    """Raise BadRequest for a route to the edge with nothing behind it: the fallback goes live before the routing."""
    edge = [(rule.strict, at) for at, rule in enumerate(policy.routing.rules) if is_edge(rule.target)]
    at = max(edge)[1] if edge else None
    why = None if at is None else unarmed(policy.routing, policy.privacy.local_only)
    if why is not None:
        raise BadRequest(
            f"routing.rules[{at}] goes to the edge without an armed fallback: {why}",
            next_step="set fallback to { enable: true, upgrade_target: cloud } first",
            field="routing.fallback",
        )
    if at is not None and policy.routing.rules[at].strict:
        raise BadRequest(
            f"routing.rules[{at}] is strict and goes to the edge, so its fallback has nowhere to go",
            next_step="leave `strict` out; to keep requests on the device use privacy.local_only_labels",
            field=f"routing.rules[{at}].strict",
        )


def remarks(policy: Policy) -> list[str]:
    """What a file says that will not do what its writer may think."""
    model = default_model()
    unknown = sorted({name for rule in policy.routing.rules for name in rule.when.intent} - set(model.names))
    found = [
        f"intent {name!r} is not one that the classifier tells ({', '.join(model.names)}): only clients can say it"
        for name in unknown
    ]
    encoder = policy.routing.intent.encoder
    if encoder and encoder != model.id:
        found.append(
            f"routing.intent.threshold was chosen for {encoder!r}; this release has {model.id!r} and ignores it"
        )
    return found


def _raw(data: bytes, form: Form) -> Any:
    try:
        if form == "json":
            return load_json(data, what="the policy")
        text = data.decode("utf-8")
        return load_yaml(text) if form == "yaml" else tomllib.loads(text)
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as err:
        raise BadRequest(f"the policy is not {form.upper()}: {err}", next_step="correct the line it names") from err
    except ProtocolError as err:
        raise BadRequest(err.message, next_step="correct the file", field=err.field) from err


def _listed(raw: dict[str, Any]) -> dict[str, Any]:
    """`intent: summarize` means `intent: [summarize]`; anything else that is odd is left for the decoder to name."""
    routing = raw.get("routing")
    rules = routing.get("rules") if isinstance(routing, dict) else None
    for rule in rules if isinstance(rules, list) else ():
        when: Any = rule.get("when") if isinstance(rule, dict) else None
        for name in _LISTS if isinstance(when, dict) else ():
            if isinstance(when.get(name), str):
                when[name] = [when[name]]
    return raw

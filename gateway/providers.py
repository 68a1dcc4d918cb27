"""Providers as the operator writes them: who they are, and which model is at which of them. One line moves a model.

    [[provider]]
    name = "deepseek"                      # kind = name unless given

    [provider_models]
    chat = "deepseek/deepseek-chat"        # our name = "provider/name there"
    big = ["anthropic/claude-sonnet-4-5", "openai/gpt-4o"]      # in this order
    cheap = { at = "qwen/qwen-flash", usd_per_million_prompt_tokens = 0.05, usd_per_million_completion_tokens = 0.4 }

The keys stand in the vault, never in a configuration file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from attrs import evolve, frozen

from gateway.prices import FREE, Price, check_price
from protocol.decode import decode_listing
from protocol.errors import ConfigError, ProtocolError
from protocol.provider_kinds import KINDS, base_url_of

MAX_PROVIDERS = 64
MAX_MODELS = 1024
MAX_PLACES = 8
_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]{0,63}$")


@frozen
class ProviderSettings:
    """One provider. kind: its wire form, see protocol.provider_kinds; the name unless given.

    base_url: empty for the vendor's own address. keyless: it asks for no key. max_open: requests at once.
    context_tokens: what its models hold where it does not say. attempts: of one request, the first one included.
    The seconds bound the phases of a request.
    """

    name: str
    kind: str = ""
    base_url: str = ""
    keyless: bool = False
    max_open: int = 256
    context_tokens: int = 128_000
    attempts: int = 3
    connect_s: float = 5.0
    first_byte_s: float = 60.0
    between_s: float = 30.0
    total_s: float = 600.0


@frozen
class Place:
    """A model at a provider, under the name it has there."""

    provider: str
    model: str
    price: Price = FREE


@frozen
class Providers:
    """models: places of each model in the order in which they are asked."""

    providers: Mapping[str, ProviderSettings]
    models: Mapping[str, tuple[Place, ...]]


NO_PROVIDERS = Providers({}, {})


def read_providers(providers: Any, models: Any) -> Providers:
    """From the tables `[[provider]]` and `[provider_models]` as TOML gives them. Raises ConfigError with the field."""
    listed = providers or []
    if not isinstance(listed, list) or len(listed) > MAX_PROVIDERS:
        raise _wrong("provider", f"is a list of up to {MAX_PROVIDERS} tables", "write [[provider]]")
    known: dict[str, ProviderSettings] = {}
    for number, table in enumerate(listed):
        one = _provider(table, f"provider[{number}]")
        if one.name in known:
            raise _wrong(f"provider[{number}].name", f"{one.name!r} is there twice", "give each its own name")
        known[one.name] = one
    routes = models or {}
    if not isinstance(routes, Mapping) or len(routes) > MAX_MODELS:
        raise _wrong("provider_models", f"is a table of up to {MAX_MODELS} models", "write [provider_models]")
    places = {str(name): _places(value, f"provider_models.{name}", known) for name, value in routes.items()}
    return Providers(known, places)


def _provider(table: Any, where: str) -> ProviderSettings:
    try:
        one, unknown = decode_listing(ProviderSettings, table, what=where)
    except ProtocolError as err:
        raise ConfigError(err.message, next_step="correct the field", field=f"{where}.{err.field or ''}") from err
    if unknown:
        raise _wrong(f"{where}.{unknown[0]}", "is no setting of a provider", "see docs/providers.md")
    if not _NAME.match(one.name):
        raise _wrong(f"{where}.name", f"is {one.name[:80]!r}", "use a-z, 0-9, dots, dashes and underscores")
    one = evolve(one, kind=one.kind or one.name)
    if one.kind not in KINDS:
        raise _wrong(f"{where}.kind", f"{one.kind[:80]!r} is not known", f"one of {', '.join(KINDS)}")
    url = (one.base_url or base_url_of(one.kind)).rstrip("/")
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.query:
        raise _wrong(f"{where}.base_url", f"is {url[:80]!r}", "write http(s)://host[:port], without a key or a query")
    for name, low, high in (
        ("max_open", 1, 65_536), ("context_tokens", 64, 1 << 24), ("attempts", 1, 10), ("connect_s", 0.05, 60.0),
        ("first_byte_s", 0.05, 3600.0), ("between_s", 0.05, 3600.0), ("total_s", 0.1, 86_400.0),
    ):  # fmt: skip
        if not low <= getattr(one, name) <= high:
            raise _wrong(f"{where}.{name}", f"is {getattr(one, name)}", f"choose from {low} to {high}")
    return evolve(one, base_url=url)


def _places(value: Any, where: str, known: Mapping[str, ProviderSettings]) -> tuple[Place, ...]:
    price = FREE
    if isinstance(value, Mapping):
        fields = dict(value)
        value = fields.pop("at", None)
        try:
            price, unknown = decode_listing(Price, fields, what=where)
        except ProtocolError as err:
            raise ConfigError(err.message, next_step="correct the field", field=f"{where}.{err.field or ''}") from err
        if unknown:
            raise _wrong(f"{where}.{unknown[0]}", "is no setting of a model", "see docs/providers.md")
        check_price(price, where)
    listed: Sequence[Any] = [value] if isinstance(value, str) else value
    if not isinstance(listed, list) or not 0 < len(listed) <= MAX_PLACES:
        raise _wrong(where, f"names 1 to {MAX_PLACES} places", 'write "provider/model" or a list of them')
    return tuple(_place(text, where, known, price) for text in listed)


def _place(text: Any, where: str, known: Mapping[str, ProviderSettings], price: Price) -> Place:
    provider, slash, model = text.partition("/") if isinstance(text, str) else ("", "", "")
    if not slash or not model or len(model) > 256:
        raise _wrong(where, f"{str(text)[:80]!r} names no place", 'write it as "provider/model"')
    if provider not in known:
        listed = ", ".join(known) or "none"
        raise _wrong(
            where, f"there is no provider {provider[:80]!r}", f"add a [[provider]] with this name; known: {listed}"
        )
    return Place(provider, model, price)


def _wrong(field: str, what: str, next_step: str) -> ConfigError:
    return ConfigError(f"{field}: {what}", next_step=next_step, field=field)

"""Tenants and what each may take: models, requests a second, tokens a minute, requests at once, money a day and month.

A limit that is None does not exist; a limit of 0 admits nothing. Money is given in US dollars and counted in whole
billionths of one (`nano_usd`), so that sums are exact on every store.
"""

from __future__ import annotations

import math
import re
from typing import Literal

from attrs import field, frozen

from protocol.errors import BadRequest

NANO_PER_USD = 1_000_000_000
MAX_USD = 1_000_000.0
"""Of one budget. Redis counts exactly up to 9,007,199 dollars; nobody means more than this."""

MAX_REQUESTS_PER_S = 100_000.0
MAX_TOKENS_PER_MIN = 10_000_000_000
MAX_CONCURRENT = 100_000
MAX_MODELS = 256

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")

DEFAULT_ALERT_RATIOS = (0.5, 0.8, 0.95)


@frozen
class Quota:
    """The most that a tenant may take. None: no such limit.

    requests_per_s: may be below 1 (0.1 is one in ten seconds). tokens_per_min: prompt and answer together, in any 60 s.
    max_concurrent: requests under way at once. usd_per_day, usd_per_month: calendar windows, UTC.
    """

    requests_per_s: float | None = None
    tokens_per_min: int | None = None
    max_concurrent: int | None = None
    usd_per_day: float | None = None
    usd_per_month: float | None = None


@frozen
class Tenant:
    """Who pays for a key's requests.

    models: those that its keys may name; None means every model. on_budget: what a request gets that costs money when
    the budget is used up: an answer of this machine's own models (`degrade`), or 429 (`refuse`). alert_ratios: shares
    of a budget at which an alert goes out, once per window.
    """

    name: str
    models: tuple[str, ...] | None = None
    quota: Quota = field(factory=Quota)
    on_budget: Literal["degrade", "refuse"] = "refuse"
    alert_ratios: tuple[float, ...] = DEFAULT_ALERT_RATIOS
    note: str = ""


def check_tenant(tenant: Tenant) -> Tenant:
    """The tenant, when every field makes sense. Raises BadRequest that names the field."""
    check_name(tenant.name, "name")
    for name, most in _MOST.items():
        _check_number(getattr(tenant.quota, name), most, f"quota.{name}")
    for ratio in tenant.alert_ratios:
        if not 0.0 < ratio <= 1.0:
            raise BadRequest(f"alert_ratios has {ratio}", next_step="shares lie between 0 and 1", field="alert_ratios")
    if len(tenant.alert_ratios) > 8 or len(tenant.note) > 200:
        raise BadRequest("at most 8 alert_ratios and 200 characters of note", field="alert_ratios")
    if tenant.models is not None and (len(tenant.models) > MAX_MODELS or any(len(m) > 256 for m in tenant.models)):
        raise BadRequest(f"models has more than {MAX_MODELS} names, or long ones", field="models")
    return tenant


def check_name(name: str, where: str) -> str:
    """Raises BadRequest for a name that cannot stand in a path or a key of a store."""
    if not _NAME.fullmatch(name):
        raise BadRequest(f"{where} is {name[:64]!r}", next_step="use [a-z0-9._-], 1 to 63 of them", field=where)
    return name


_MOST: dict[str, float] = {
    "requests_per_s": MAX_REQUESTS_PER_S,
    "tokens_per_min": MAX_TOKENS_PER_MIN,
    "max_concurrent": MAX_CONCURRENT,
    "usd_per_day": MAX_USD,
    "usd_per_month": MAX_USD,
}


def _check_number(value: float | None, most: float, where: str) -> None:
    if value is None:
        return
    if not math.isfinite(value) or value < 0 or value > most:
        next_step = f"give a number from 0 to {most:g}, or leave it out"
        raise BadRequest(f"{where} is {value}", next_step=next_step, field=where)


def nano_usd(usd: float) -> int:
    """Dollars in billionths, rounded up: what is charged is never less than what was spent.

    >>> nano_usd(0.15), nano_usd(0.0), nano_usd(1e-10)
    (150000000, 0, 1)
    """
    if not math.isfinite(usd):
        raise BadRequest(f"an amount of money is {usd}", field="money")
    return max(0, math.ceil(round(usd * NANO_PER_USD, 3)))

"""`midstream keys`, `midstream tenants` and `midstream audit`."""

from __future__ import annotations

import argparse
import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

from cloud_stub.admin_client import AdminClient
from cloud_stub.config import load_config, local_environment
from protocol.errors import ConfigError

_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
AUDIT_FOLDER = "audit"


def keys(argv: list[str]) -> int:
    """List, add, rotate or revoke the keys of this coordinator."""
    parser = argparse.ArgumentParser(prog="midstream keys", description="API keys of the coordinator on this machine")
    verbs = parser.add_subparsers(dest="verb", required=True)
    listing = verbs.add_parser("list", help="all keys, without their texts")
    add = verbs.add_parser("add", help="make a key; it is shown once")
    add.add_argument("--tenant", help="who pays (default: default)")
    add.add_argument("--admin", action="store_true", help="a key that manages and cannot ask models")
    add.add_argument("--life", type=seconds, help="how long it lives: 90d, 12h, 30m (default: until it is revoked)")
    add.add_argument("--network", action="append", default=[], help="where it may come from, as 10.0.0.0/8; repeatable")
    add.add_argument("--note", default="", help="a word for the list")
    rotate = verbs.add_parser("rotate", help="make its successor; the old one works on for the overlap")
    rotate.add_argument("id")
    rotate.add_argument("--overlap", type=seconds, default=0.0, help="as 24h (default: the old key ends now)")
    revoke = verbs.add_parser("revoke", help="end a key now")
    revoke.add_argument("id")
    for verb in (listing, add, rotate, revoke):
        add_state_flags(verb)
    options = parser.parse_args(argv)
    return asyncio.run(_keys(options))


def tenants(argv: list[str]) -> int:
    """List, show, set or remove tenants and their limits."""
    parser = argparse.ArgumentParser(prog="midstream tenants", description="who may take how much of which models")
    verbs = parser.add_subparsers(dest="verb", required=True)
    listing = verbs.add_parser("list", help="all tenants and their limits")
    show = verbs.add_parser("show", help="one tenant with its bill")
    put = verbs.add_parser("set", help="add a tenant, or replace its limits by those that are given")
    remove = verbs.add_parser("rm", help="forget a tenant without live keys")
    for verb in (show, put, remove):
        verb.add_argument("name")
    put.add_argument("--requests-per-s", type=float)
    put.add_argument("--tokens-per-min", type=int)
    put.add_argument("--max-concurrent", type=int)
    put.add_argument("--usd-per-day", type=float)
    put.add_argument("--usd-per-month", type=float)
    put.add_argument("--model", action="append", help="a model that its keys may name; repeatable (default: all)")
    put.add_argument("--on-budget", choices=("refuse", "degrade"), default="refuse", help="what happens at a cost cap")
    put.add_argument("--alert", type=float, action="append", help="tell when this share of a budget is spent")
    put.add_argument("--note", default="")
    for verb in (listing, show, put, remove):
        add_state_flags(verb)
    options = parser.parse_args(argv)
    return asyncio.run(_tenants(options))


def audit(argv: list[str]) -> int:
    """Verify the chain of the audit; 1 when it is broken. Works while the coordinator runs and without it."""
    parser = argparse.ArgumentParser(prog="midstream audit", description="the record of requests and of management")
    verbs = parser.add_subparsers(dest="verb", required=True)
    verify = verbs.add_parser("verify", help="check every line and the chain over all files; prints its head")
    verify.add_argument("--head", default="", help="a head that was printed earlier: it must still be there")
    verify.add_argument("--folder", type=Path, help="the audit's folder (default: STATE_DIR/audit)")
    add_state_flags(verify)
    options = parser.parse_args(argv)
    return _verify(options)


def seconds(text: str) -> float:
    """`90d`, `12h`, `30m`, `45s` or plain seconds.

    >>> seconds("1.5h"), seconds("20")
    (5400.0, 20.0)
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text.strip())
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no duration: write 90d, 12h, 30m or seconds")
    return float(found[1]) * _UNITS_S[found[2] or "s"]


async def _keys(options: argparse.Namespace) -> int:
    client = _client(options)
    if options.verb == "list":
        found = await client.ask("GET", "/keys")
        _show(options, found, key_table(found["keys"]))
    elif options.verb == "revoke":
        found = await client.ask("DELETE", f"/keys/{quote(options.id, safe='')}")
        _show(options, found, [f"{found['id']} is revoked"])
    else:
        if options.verb == "add":
            wish = {
                "kind": "admin" if options.admin else "invoke", "tenant": options.tenant, "life_s": options.life,
                "networks": options.network, "note": options.note,
            }  # fmt: skip
            found = await client.ask("POST", "/keys", _given(wish))
        else:
            path = f"/keys/{quote(options.id, safe='')}/rotate"
            found = await client.ask("POST", path, _given({"overlap_s": options.overlap}))
        _show(options, found, [f"{found['id']}  {found['key']}", "shown this once, kept hashed"])
    return 0


async def _tenants(options: argparse.Namespace) -> int:
    client = _client(options)
    if options.verb == "list":
        found = await client.ask("GET", "/tenants")
        _show(options, found, [tenant_line(tenant) for tenant in found["tenants"]] or ["no tenant is described yet"])
        return 0
    path = f"/tenants/{quote(options.name, safe='')}"
    if options.verb == "show":
        found = await client.ask("GET", path)
        _show(options, found, bill_lines(found))
    elif options.verb == "rm":
        found = await client.ask("DELETE", path)
        _show(options, found, [f"{options.name} is forgotten"])
    else:
        found = await client.ask("PUT", path, _given(_wish(options)))
        _show(options, found, [tenant_line(found)])
    return 0


def _wish(options: argparse.Namespace) -> dict[str, Any]:
    names = ("requests_per_s", "tokens_per_min", "max_concurrent", "usd_per_day", "usd_per_month")
    quota = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    return {
        "quota": quota, "models": options.model, "on_budget": options.on_budget, "alert_ratios": options.alert,
        "note": options.note,
    }  # fmt: skip


def _verify(options: argparse.Namespace) -> int:
    from gateway.audit import verify

    found = verify(options.folder or state_dir(options) / AUDIT_FOLDER, options.head)
    missing = bool(options.head) and not found.seen
    document = {
        "lines": found.lines, "first": found.first_seq, "last": found.head.seq, "head": found.head.hash,
        "fault": None if found.fault is None else f"{found.fault.file}:{found.fault.line}: {found.fault.what}",
        "head_found": None if not options.head else found.seen,
    }  # fmt: skip
    lines = [f"{found.lines} lines, {found.first_seq} to {found.head.seq}, head {found.head.hash}"]
    if found.fault is not None:
        lines.append(f"broken at {document['fault']}")
    elif missing:
        lines.append("the given head is not there: lines were cut off, or it is older than what is kept")
    else:
        lines.append("the chain is whole")
    _show(options, document, lines)
    return 1 if found.fault is not None or missing else 0


def key_table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """One line per key."""
    cells = [("KEY", "KIND", "TENANT", "STATE", "MADE", "ENDS", "NETWORKS", "NOTE")]
    for row in rows:
        ends_s = row["revoked_s"] or row["expires_s"]
        state = "alive" if row["alive"] else "revoked" if row["revoked_s"] else "expired"
        cells.append(
            (
                row["id"], row["kind"], row["tenant"], state, _date(row["created_s"]), _date(ends_s),
                ",".join(row["networks"]) or "any", row["note"],
            )
        )  # fmt: skip
    widths = [max(len(row[at]) for row in cells) for at in range(len(cells[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]


def tenant_line(tenant: Mapping[str, Any]) -> str:
    """One tenant and its limits."""
    limits = [f"{name}={value:g}" for name, value in tenant["quota"].items() if value is not None]
    models = "all models" if tenant["models"] is None else ",".join(tenant["models"]) or "no model"
    return f"{tenant['name']}  {' '.join(limits) or 'no limits'}  {models}  at the cost cap: {tenant['on_budget']}"


def bill_lines(tenant: Mapping[str, Any]) -> list[str]:
    """One tenant and what it took."""
    lines = [tenant_line(tenant)]
    for name in ("today", "month"):
        bill = tenant[name]
        lines.append(
            f"  {name:<6} {bill['requests']:>9} requests {bill['prompt_tokens']:>12} + "
            f"{bill['completion_tokens']} tokens  {bill['usd']:.6f} USD"
        )
    return lines


def _date(unix_s: float | None) -> str:
    return "-" if unix_s is None else datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%d %H:%MZ")


def _given(wish: Mapping[str, Any]) -> bytes:
    return json.dumps({name: value for name, value in wish.items() if value is not None}).encode()


def _show(options: argparse.Namespace, document: Mapping[str, Any], lines: Sequence[str]) -> None:
    print(json.dumps(document) if options.json else "\n".join(lines))


def add_state_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, help="the coordinator's configuration file")
    parser.add_argument("--state-dir", type=Path, help="the coordinator's state folder")
    parser.add_argument("--json", action="store_true")


def state_dir(options: argparse.Namespace) -> Path:
    flags = {"config": options.config, "state_dir": str(options.state_dir) if options.state_dir else None}
    folder = load_config(flags, local_environment()).state_dir
    if not folder.is_dir():
        raise ConfigError(
            f"no coordinator keeps its state in {folder}",
            next_step="start `midstream coordinator` first, or name its folder with --state-dir",
            field="state_dir",
        )
    return folder


def _client(options: argparse.Namespace) -> AdminClient:
    return AdminClient(state_dir(options))

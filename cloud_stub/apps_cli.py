"""`midstream apps`: apps that hold the control channel of this coordinator."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

from cloud_stub.admin_client import AdminClient
from cloud_stub.tenants_cli import add_state_flags, state_dir


def apps(argv: list[str]) -> int:
    """List them, read what they told, or tell them something."""
    parser = argparse.ArgumentParser(prog="midstream apps", description="apps that hold the control channel")
    verbs = parser.add_subparsers(dest="verb", required=True)
    listing = verbs.add_parser("list", help="who is there")
    results = verbs.add_parser("results", help="what one session told")
    results.add_argument("session")
    results.add_argument("--tenant", default="local")
    results.add_argument("--after", type=int, default=0, help="only results after this number")
    warm = verbs.add_parser("warm", help="let apps load a model; their results have cold_ttft_ms and warm_ttft_ms")
    switch = verbs.add_parser("switch", help="let apps use a model where they name none")
    for verb in (warm, switch):
        verb.add_argument("model")
    route = verbs.add_parser("route", help="let apps ask this engine first")
    warm.add_argument("--target", default="", help="engine that shall load it (default: the one in use)")
    route.add_argument("target")
    for verb in (warm, switch, route):
        verb.add_argument("--tenant", help="only apps of this tenant")
        verb.add_argument("--session", help="only the app of one session")
    for verb in (listing, results, warm, switch, route):
        add_state_flags(verb)
    return asyncio.run(_apps(parser.parse_args(argv)))


async def _apps(options: argparse.Namespace) -> int:
    client = AdminClient(state_dir(options))
    if options.verb == "list":
        found = await client.ask("GET", "/apps")
        lines = [app_line(app) for app in found["apps"]] or ["no app holds the channel"]
    elif options.verb == "results":
        path = f"/apps/{quote(options.session, safe='')}/results"
        found = await client.ask("GET", path, query={"tenant": options.tenant, "after": str(options.after)})
        lines = [f"{r['seq']:6}  {r['kind']:7} {r['of']:20} {json.dumps(r['body'])}" for r in found["results"]]
    else:
        wish = {name: getattr(options, name, None) for name in ("target", "model", "tenant", "session")}
        body = {"do": options.verb, **{name: value for name, value in wish.items() if value}}
        found = await client.ask("POST", "/apps/instruct", json.dumps(body).encode())
        lines = [f"{found['id']} given to {found['apps']} apps"]
    _show(options, found, lines)
    return 0


def app_line(app: dict[str, Any]) -> str:
    """One app for a person."""
    state = "connected" if app["connected"] else "away"
    names = f"engines {', '.join(app['engines']) or '-'}; models {', '.join(app['models']) or '-'}"
    line = f"{app['session']}  {app['tenant']:12} {app['device'] or '-':16} {state:9} {names}; {app['waiting']} waiting"
    return f"{line}, {app['lost']} lost" if app.get("lost") else line


def _show(options: argparse.Namespace, document: dict[str, Any], lines: Sequence[str]) -> None:
    print(json.dumps(document) if options.json else "\n".join(lines))

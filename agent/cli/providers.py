"""`midstream providers keys|add-key|remove-key`: the sealed keys of providers on this machine."""

from __future__ import annotations

import argparse
import getpass
import json
import sys
from collections.abc import Callable
from pathlib import Path

from agent.compose_providers import PROVIDERS_DIR
from agent.config import load
from engines.key_vault import KeyVault
from protocol.clock import wall_now
from protocol.errors import ConfigError


def providers(argv: list[str]) -> int:
    """One sub-command, `keys` without one."""
    options = _parser().parse_args(argv or ["keys"])
    folder = Path(options.state_dir).expanduser() if options.state_dir else load().state_dir
    run: Callable[[KeyVault, argparse.Namespace], int] = options.run
    return run(KeyVault(folder / PROVIDERS_DIR), options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="midstream providers", description="keys of providers, sealed on disk")
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--state-dir", help="the house's state folder (default: the agent's)")
    shared.add_argument("--json", action="store_true", help="machine-readable output")
    verbs = parser.add_subparsers(required=True, metavar="keys|add-key|remove-key")
    verbs.add_parser("keys", help="which keys there are, by id", parents=[shared]).set_defaults(run=_keys)
    add = verbs.add_parser("add-key", help="seal a key; it is read from standard input", parents=[shared])
    add.add_argument("provider", help="name of the [[provider]]")
    add.add_argument("--tenant", default="", help="whose it is (default: everybody's without keys of their own)")
    add.set_defaults(run=_add)
    remove = verbs.add_parser("remove-key", help="forget a key", parents=[shared])
    remove.add_argument("provider")
    remove.add_argument("id", help="as `keys` shows it")
    remove.add_argument("--tenant", help="whose (default: everybody's)")
    remove.set_defaults(run=_remove)
    return parser


def _keys(vault: KeyVault, options: argparse.Namespace) -> int:
    rows = [
        {"provider": one.provider, "tenant": one.tenant, "id": one.id, "added_unix_s": one.added_unix_s}
        for one in vault.listed()
    ]
    if options.json:
        print(json.dumps(rows))
        return 0
    for row in rows:
        print(f"{row['provider']:<20} {row['id']}  {row['tenant'] or '(house)'}")
    if not rows:
        print("no keys; `midstream providers add-key NAME` seals one")
    return 0


def _add(vault: KeyVault, options: argparse.Namespace) -> int:
    # A command line shows in the process list, so the key never stands there.
    key = getpass.getpass("key: ") if sys.stdin.isatty() else sys.stdin.readline()
    if not key.strip():
        raise ConfigError("no key came on standard input", next_step="pipe it in, or type it when asked")
    key_id = vault.add(options.provider, key.strip(), options.tenant, int(wall_now().unix_s))
    print(json.dumps({"provider": options.provider, "id": key_id}) if options.json else f"sealed as {key_id}")
    return 0


def _remove(vault: KeyVault, options: argparse.Namespace) -> int:
    vault.remove(options.provider, options.id, options.tenant)
    print(json.dumps({"removed": options.id}) if options.json else f"removed {options.id}")
    return 0

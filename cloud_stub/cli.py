"""`midstream coordinator`, `midstream policy` and `midstream fleet`."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from cloud_stub.admin_client import AdminClient
from cloud_stub.config import CoordinatorConfig, add_flags, check_address, flags_of, load_config, local_environment
from cloud_stub.policy_files import form_of, remarks
from links.event_loop import run_on, settle
from protocol.errors import ConfigError
from protocol.held_folder import hold_folder

if TYPE_CHECKING:
    from cloud_stub.compose import CoordinatorHouse

STOP_S = 15.0
"""Longer than any part's own grace; what has not ended by then ends with the process."""


def coordinator(argv: list[str]) -> int:
    """Run until SIGTERM or Ctrl-C; `token` and `mosquitto-conf` are verbs of their own. 2: wrong configuration."""
    verbs = {"token": _token, "mosquitto-conf": _mosquitto_conf}
    if argv and argv[0] in verbs:
        return verbs[argv[0]](argv[1:])
    parser = argparse.ArgumentParser(
        prog="midstream coordinator",
        description="run the coordinator",
        epilog="also: midstream coordinator token, midstream coordinator mosquitto-conf",
    )
    add_flags(parser)
    parser.add_argument("--json", action="store_true", help="one JSON line per event on standard output")
    options = parser.parse_args(argv)
    config = load_config(flags_of(options), local_environment())
    _log_to_stderr(config.log_level)
    return run_on(config.event_loop, _run(config, options.json))


def policy(argv: list[str]) -> int:
    """Publish, show, list or roll back the fleet's policy, through the coordinator of this machine."""
    parser = argparse.ArgumentParser(prog="midstream policy", description="publish policy to the fleet")
    verbs = parser.add_subparsers(dest="verb", required=True)
    check = verbs.add_parser("check", help="check a policy or routing file; sends nothing, needs no coordinator")
    check.add_argument("file", type=Path)
    publish = verbs.add_parser("publish", help="check, sign and send a policy file (TOML, JSON or YAML)")
    publish.add_argument("file", type=Path)
    publish.add_argument("--note", default="", help="a word for the history")
    show = verbs.add_parser("show", help="the newest policy, or one version")
    show.add_argument("version", nargs="?", type=int)
    history = verbs.add_parser("history", help="all versions, newest first")
    rollback = verbs.add_parser("rollback", help="publish an earlier version again")
    rollback.add_argument("version", type=int)
    for verb in (publish, show, history, rollback):
        _add_state_flags(verb)
    options = parser.parse_args(argv)
    if options.verb == "check":
        print("\n".join(checked(options.file)))
        return 0
    return asyncio.run(_policy(options))


def fleet(argv: list[str]) -> int:
    """List the devices, forget one (its id is free again), or revoke one (refused from now on)."""
    parser = argparse.ArgumentParser(prog="midstream fleet", description="the fleet's devices")
    verbs = parser.add_subparsers(dest="verb", required=True)
    listing = verbs.add_parser("list", help="all devices with their state and policy")
    forget = verbs.add_parser("forget", help="drop a device; its id may join again with another key")
    revoke = verbs.add_parser("revoke", help="refuse a device from now on")
    for verb in (forget, revoke):
        verb.add_argument("device_id")
    for verb in (listing, forget, revoke):
        _add_state_flags(verb)
    options = parser.parse_args(argv)
    return asyncio.run(_fleet(options))


async def _run(config: CoordinatorConfig, as_json: bool) -> int:
    from cloud_stub.compose import CoordinatorHouse

    def tell(record: Mapping[str, Any]) -> None:
        if as_json:
            print(json.dumps(record), flush=True)

    ending = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ending.set)
    with hold_folder(config.state_dir, "coordinator"):
        house = CoordinatorHouse(config, tell)
        await house.start()
        try:
            settle()
            if as_json:
                tell(_ready(house))
            else:
                print("\n".join(welcome(house)), flush=True)
            await ending.wait()
        finally:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STOP_S):
                    await house.stop()
            tell({"event": "stopped"})
    return 0


def _ready(house: CoordinatorHouse) -> dict[str, Any]:
    record = {
        "event": "ready",
        "host": house.addresses[0],
        "port": house.port,
        "broker_port": house.broker_port,
        "fleet": house.config.fleet,
        "state_dir": str(house.config.state_dir),
        "notes": house.notes,
    }
    key = house.authority.new_client_key
    secrets = {"client_key": key} if key else {}
    return record | secrets | ({"join": house.join_string()} if _is_first(house) else {})


def _is_first(house: CoordinatorHouse) -> bool:
    """Whether this start shows secrets; later ones keep them out of the logs of whatever starts the process."""
    return house.authority.new_client_key is not None and not house.registry.ids()


def welcome(house: CoordinatorHouse) -> list[str]:
    """What a person needs after a start; the first one shows the key that it made and a join string."""
    config, authority = house.config, house.authority
    broker = config.broker if config.broker_url else f"embedded (MQTT 3.1.1, TLS, port {house.broker_port})"
    lines = [
        f"midstream coordinator, fleet {config.fleet}",
        f"  API        https://{house.addresses[0]}:{house.port}",
        f"  broker     {broker}",
        f"  state      {config.state_dir}",
        f"  models     {config.models_dir}",
        *(f"  note       {note}" for note in house.notes),
    ]
    if authority.new_client_key:
        lines += [f"  API key    {authority.new_client_key}", "             shown this once, kept hashed"]
    if _is_first(house):
        hours = config.join_ttl_s / 3600
        lines += [
            "",
            f"join a device (once, within {hours:.0f} h; `midstream coordinator token` makes another):",
            f"  midstream join {house.join_string()}",
        ]
    elif not house.registry.ids():
        lines.append("  devices    none yet; `midstream coordinator token` makes a join string")
    return lines


def _token(argv: list[str]) -> int:
    """Print a new join string of the running coordinator."""
    parser = argparse.ArgumentParser(prog="midstream coordinator token", description="make a new join string")
    parser.add_argument("--life-s", type=float, help="seconds for which it can be used")
    _add_state_flags(parser)
    options = parser.parse_args(argv)
    query = f"?life_s={options.life_s}" if options.life_s is not None else ""
    found = asyncio.run(_client(options).ask("POST", f"/token{query}"))
    print(json.dumps(found) if options.json else found["join"])
    return 0


def _mosquitto_conf(argv: list[str]) -> int:
    """Write mosquitto's configuration with certificates of this fleet."""
    from cloud_stub.authority import open_authority, take_back_client_key
    from cloud_stub.mosquitto import write_mosquitto
    from protocol.clock import wall_now

    parser = argparse.ArgumentParser(
        prog="midstream coordinator mosquitto-conf",
        description="write mosquitto.conf, access rules and a broker certificate of this fleet",
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    parser.add_argument("--names", default="localhost,127.0.0.1", help="host names and addresses of the broker")
    parser.add_argument("--listen", default="", help="address to listen on (default: all)")
    parser.add_argument("--listen-port", type=int, default=8883)
    _add_state_flags(parser)
    options = parser.parse_args(argv)
    names = [name.strip() for name in options.names.split(",") if name.strip()] or [""]  # refused below
    for name in names:
        check_address("--names", name, names_allowed=True)
    config = _config(options)
    now_s = wall_now().unix_s
    authority = open_authority(config.state_dir, config.fleet, now_s)
    take_back_client_key(authority)  # it was not shown; the coordinator's first start makes and shows one
    files = write_mosquitto(authority, options.out, names, options.listen_port, now_s, options.listen)
    if options.json:
        print(json.dumps({"conf": str(files.conf)}))
    else:
        print(f"start the broker:      mosquitto -c {files.conf}")
        print(f"then the coordinator:  midstream coordinator --broker mqtts://{names[0]}:{options.listen_port}")
    return 0


async def _policy(options: argparse.Namespace) -> int:
    client = _client(options)
    if options.verb == "publish":
        form = form_of(options.file)
        found = await client.ask("POST", "/policy", _read(options.file), {"form": form, "note": options.note})
        _show(options, found, [sent_line(found)])
    elif options.verb == "rollback":
        found = await client.ask("POST", f"/policy/{options.version}/rollback")
        _show(options, found, [f"version {found['version']}: the content of {options.version} again"])
    elif options.verb == "show" and options.version is not None:
        print(json.dumps(await client.ask("GET", f"/policy/{options.version}"), indent=2))
    else:
        await _history(client, options)
    return 0


def checked(file: Path) -> list[str]:
    """What `midstream policy check` says of a good file. Raises BadRequest that names the field of a bad one."""
    from cloud_stub.publishing import compile_policy

    policy = compile_policy(_read(file), form_of(file))
    rules, fallback = policy.routing.rules, policy.routing.fallback
    behind = f"to {fallback.upgrade_target} under {fallback.confidence_threshold:g}" if fallback.enable else "off"
    lines = [f"{file}: good; {len(rules)} routing rule{'' if len(rules) == 1 else 's'}, fallback {behind}"]
    return [*lines, *(f"note: {remark}" for remark in remarks(policy))]


def sent_line(found: Mapping[str, Any]) -> str:
    """Who got a published policy; when nobody did, why."""
    count = len(found["devices"])
    line = f"version {found['version']} sent to {count} device{'' if count == 1 else 's'}"
    if count:
        return line
    wanted = ",".join(f"{name}={value}" for name, value in sorted(found["policy"]["selector"].items()))
    if wanted:
        return f"{line}: none has the labels {wanted} ([labels] in agent.toml)"
    return f"{line}: none is registered yet; each gets it when it registers"


async def _history(client: AdminClient, options: argparse.Namespace) -> None:
    policies = (await client.ask("GET", "/policy"))["policies"]
    if options.verb == "show":
        if not policies:
            raise ConfigError("no policy was published yet", next_step="midstream policy publish FILE")
        print(json.dumps(policies[0], indent=2))
        return
    rows = [f"{p['version']:>6}  {_when(p['published_s'])}  {p['note']}".rstrip() for p in policies]
    _show(options, {"policies": policies}, rows or ["no policy was published yet"])


async def _fleet(options: argparse.Namespace) -> int:
    client = _client(options)
    if options.verb == "forget":
        found = await client.ask("DELETE", f"/devices/{quote(options.device_id, safe='')}")
        _show(options, found, [f"{options.device_id} is forgotten; its id may join again"])
    elif options.verb == "revoke":
        found = await client.ask("POST", f"/devices/{quote(options.device_id, safe='')}/revoke")
        _show(options, found, [f"{options.device_id} is refused from now on"])
    else:
        found = await client.ask("GET", "/devices")
        _show(options, found, table(found["devices"]))
    return 0


def table(devices: Sequence[Mapping[str, Any]]) -> list[str]:
    """One line per device."""
    if not devices:
        return ["no device has joined yet; `midstream coordinator token` makes a join string"]
    rows = [("DEVICE", "STATE", "POLICY", "SOC", "MODELS")]
    for device in devices:
        policy_text = "-" if device["policy"] is None else f"{device['policy']} ({device['policy_code']})"
        models = ",".join(device["models"]) or "-"
        rows.append((device["device_id"], device["state"], policy_text, device["soc"] or "-", models))
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _show(options: argparse.Namespace, document: Mapping[str, Any], lines: Sequence[str]) -> None:
    print(json.dumps(document) if options.json else "\n".join(lines))


def _add_state_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, help="the coordinator's configuration file")
    parser.add_argument("--state-dir", type=Path, help="the coordinator's state folder")
    parser.add_argument("--json", action="store_true")


def _config(options: argparse.Namespace) -> CoordinatorConfig:
    flags = {"config": options.config, "state_dir": str(options.state_dir) if options.state_dir else None}
    return load_config(flags, local_environment())


def _client(options: argparse.Namespace) -> AdminClient:
    return AdminClient(_config(options).state_dir)


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as err:
        raise ConfigError(f"cannot read {file}: {err.strerror}", next_step="check the path", field="file") from err


def _when(unix_s: float) -> str:
    from datetime import UTC, datetime

    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def _log_to_stderr(level: str) -> None:
    logging.basicConfig(
        stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=logging.WARNING
    )
    logging.getLogger("midstream").setLevel(level.upper())

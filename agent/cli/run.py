"""`midstream agent`, `status`, `doctor` and `join`."""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import logging
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent.config import AgentConfig, load
from agent.settings_table import SETTINGS
from protocol.errors import ConfigError
from protocol.held_folder import hold_folder

if TYPE_CHECKING:
    from agent.house import House
    from agent.reload import Changes

FLAGS = tuple(setting for setting in SETTINGS if not setting.secret)
"""A secret on the command line would show in the process list."""

IMPORT_THRESHOLD = (5000, 1000, 1000)
"""Of the garbage collector during imports: none of the older generations, whose walks cost a tenth of the start."""

STATUS_PATH = "/midstream/v1/status"
RUNNING_S = 2.0
"""A running agent on this machine answers at once, or something is wrong with it."""


def agent(argv: list[str]) -> int:
    """Run the agent until SIGTERM or Ctrl-C; drains first. 2 when the configuration or the port is wrong."""
    from engines.thread_priority import hand_over_soon

    parser = argparse.ArgumentParser(prog="midstream agent", description="run the agent on this device")
    _add_settings(parser)
    parser.add_argument("--json", action="store_true", help="one JSON line per state change and seam move")
    parser.add_argument("--events", type=Path, help="append one JSON line per finished request, switch and handoff")
    options = parser.parse_args(argv)
    config = _config(options)
    _log_to_stderr(config.bounds.log_level or "info")
    hand_over_soon()
    return asyncio.run(_run(config, options))


def join(argv: list[str]) -> int:
    """Enrol this device, or renew its certificate; harmless with a token that it has used already."""
    from agent.compose_control import join_fleet

    parser = argparse.ArgumentParser(prog="midstream join", description="enrol this device with a coordinator")
    parser.add_argument("token", help="the token that the coordinator printed; - reads standard input")
    parser.add_argument("--replace", action="store_true", help="leave the present fleet for the token's")
    _add_settings(parser)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    token = sys.stdin.readline().strip() if options.token == "-" else options.token
    joined = asyncio.run(join_fleet(_config(options), token, replace=options.replace))
    enrolment = joined.enrolment
    found = {
        "device_id": enrolment.device_id, "fleet": enrolment.fleet, "coordinator": enrolment.coordinator_host,
        "outcome": joined.outcome,
    }  # fmt: skip
    done = {
        "joined": "joined fleet {} as {}",
        "moved": "moved to fleet {} as {}; restart a running agent",
        "renewed": "renewed the certificate in fleet {} of {}; a running agent takes it at its next start",
        "unchanged": "fleet {} has {} already, by this join string",
    }[joined.outcome].format(enrolment.fleet, enrolment.device_id)
    print(json.dumps(found) if options.json else done)
    return 0


def status(argv: list[str]) -> int:
    """What the running agent says of itself. 1 when none answers."""
    from agent.cli.ask import agent_url, get_json

    parser = argparse.ArgumentParser(prog="midstream status", description="what the running agent is doing")
    parser.add_argument("--url", help="the agent's address (default: from the configuration)")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    found = asyncio.run(get_json(agent_url(options.url), STATUS_PATH))
    print(json.dumps(found, indent=2) if options.json else "\n".join(status_lines(found)))
    return 0


def doctor(argv: list[str]) -> int:
    """Run all checks. 0 all well, 1 something will not work, 3 something could be better."""
    from agent.cli.ask import get_json, local_url
    from agent.compose_control import coordinator_checks
    from agent.doctor import check_running, exit_code, run, standard_checks
    from agent.doctor_board import board_checks

    parser = argparse.ArgumentParser(
        prog="midstream doctor",
        description="check this device; exit code 0: all well, 1: something will not work, 3: could be better",
    )
    _add_settings(parser)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    config = _config(options)
    ask = partial(get_json, local_url(config), STATUS_PATH, deadline_s=RUNNING_S)

    def status() -> dict[str, Any]:
        return asyncio.run(ask())

    checks = [("agent", lambda: check_running(status))]
    findings = run([*board_checks(), *standard_checks(config, status), *checks, *coordinator_checks(config)])
    if options.json:
        print(json.dumps([{"check": f.check, "level": f.level, "text": f.text, "next": f.next_step} for f in findings]))
    else:
        for finding in findings:
            print(f"{finding.level:<8} {finding.check:<12} {finding.text}")
            if finding.next_step:
                print(f"{'':<21} next: {finding.next_step}")
    return exit_code(findings)


def status_lines(found: dict[str, Any]) -> list[str]:
    """The status document for people."""
    life = found.get("life", {})
    where = found.get("coordinator") or "none"
    place = " (cloud only)" if found.get("text_place") == "cloud" else ""
    kind = found.get("device_class", {})
    provisional = "" if kind.get("trusted") else " (it begins on the device until its models are measured)"
    lines = [
        f"device       {found.get('device_id')}, up {found.get('uptime_s', 0):.0f} s, {found.get('version')}",
        f"serving      {life.get('serving')} on {found.get('url')}",
        f"coordinator  {life.get('connected')}: {where}",
        f"profile      {life.get('profiled')}",
        f"class        {kind.get('title', 'unknown')}: {kind.get('why', '')}{provisional}",
        f"policy       version {found.get('policy', {}).get('version', 0)}",
        f"tensors      {', '.join(found.get('tensor_models', [])) or 'none'}",
        f"text         {found.get('text_model') or 'none'}{place}",
    ]
    lines += [f"link         {name}: {_link_text(way)}" for name, way in found.get("links", {}).items()]
    for warning in found.get("warnings", []):
        step = f" - {warning['next_step']}" if warning.get("next_step") else ""
        lines.append(f"warning      {warning['text']}{step}")
    return lines


def _link_text(way: dict[str, Any]) -> str:
    """State, speed and round trip of one way to the coordinator."""
    parts = [str(way.get("state")) + (f" ({way['path']})" if way.get("path") else "")]
    if way.get("state") == "down":  # what it was like last says nothing now
        return parts[0]
    if way.get("bytes_per_s"):
        parts.append(f"{way['bytes_per_s'] * 8 / 1e6:.1f} Mbit/s up")
    if way.get("rtt_ms") is not None:
        parts.append(f"{way['rtt_ms']:.0f} ms")
    return ", ".join(parts)


def _add_settings(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, help="agent.toml (default: the user's, then /etc/midstream)")
    for setting in FLAGS:
        flag = "--" + setting.name.replace("_", "-")
        text = setting.help.replace("%", "%%")
        parser.add_argument(flag, dest=f"set_{setting.name}", metavar=setting.form, help=text)


def _config(options: argparse.Namespace) -> AgentConfig:
    flags = {setting.name: getattr(options, f"set_{setting.name}") for setting in FLAGS}
    if options.config is not None and not options.config.is_file():
        raise ConfigError(f"no configuration file at {options.config}", next_step="check --config", field="config")
    return load(flags, file=options.config)


def _log_to_stderr(level: str) -> None:
    logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("midstream").setLevel(level.upper())


@contextmanager
def _importing() -> Iterator[None]:
    """What imports make stays, but for the classes that attrs makes anew: looking among the youngest objects finds
    them, and without it they take 4 MB.
    """
    usual = gc.get_threshold()
    gc.set_threshold(*IMPORT_THRESHOLD)
    yield
    gc.freeze()
    gc.set_threshold(*usual)


async def _run(config: AgentConfig, options: argparse.Namespace) -> int:
    with _importing():
        from agent.console import Console
        from agent.house import House
        from agent.model_names import check_text_model
        from agent.notify import notifier_from, watchdog_s
        from agent.service import Service

    check_text_model(config)
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _ask_to_stop, stopping)
    service = Service(notifier_from(os.environ), watchdog_s(os.environ, os.getpid()))
    service.step("opening the state folder")
    with hold_folder(config.state_dir, "agent"):
        console = Console(json_lines=options.json, events_file=options.events)
        try:
            whole = House(config, console)
            service.step("opening the local API")
            await whole.supervisor.start()
            try:
                whole.tell_ready()
                # From a terminal that goes away the signal means the end, as for every program.
                if not os.isatty(0):
                    read = partial(_read_again, whole, options)
                    loop.add_signal_handler(signal.SIGHUP, service.reload, read, whole.health)
                service.begin(whole.line, whole.pulses)
                await stopping.wait()
            finally:
                service.end()
                await whole.supervisor.stop()
        finally:
            await service.close()
            console.close()
    return 0


def _read_again(whole: House, options: argparse.Namespace) -> Changes:
    """Flags and environment stay as they were; the file may be another one."""
    return whole.reconfigure(_config(options))


def _ask_to_stop(stopping: asyncio.Event) -> None:
    """The first signal drains; a second one means now."""
    if stopping.is_set():
        os._exit(1)
    stopping.set()

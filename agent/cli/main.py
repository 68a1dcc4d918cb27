"""`midstream VERB …`: a table of verbs; each function is imported only when its verb is called."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import cast

from protocol.errors import ConfigError, MidstreamError
from protocol.extras import install_step

VERBS: dict[str, tuple[str, str]] = {
    "agent": ("agent.cli.run:agent", "run the agent on this device"),
    "infer": ("agent.cli.ask:infer", "run an image model through the running agent"),
    "chat": ("agent.cli.ask:chat", "ask the text model; shows which side made each token"),
    "route": ("agent.cli.calibrate:route", "calibrate how sure answers of the device are"),
    "split": ("agent.cli.split:split", "where a model is cut and why; replay a network over it"),
    "dispatch": ("agent.cli.dispatch:dispatch", "where text answers begin; replay recorded requests"),
    "status": ("agent.cli.run:status", "what the running agent is doing"),
    "doctor": ("agent.cli.run:doctor", "check this device, with a next step for each finding"),
    "models": ("agent.cli.models:models", "pull, add, analyse, list, rm or verify models"),
    "providers": ("agent.cli.providers:providers", "add, list or remove keys of model providers"),
    "join": ("agent.cli.run:join", "enrol this device with a coordinator's token"),
    "coordinator": ("cloud_stub.cli:coordinator", "run the coordinator"),
    "policy": ("cloud_stub.cli:policy", "publish policy to the fleet"),
    "tails": ("cloud_stub.tails_cli:tails", "export tails for another inference server"),
    "keys": ("cloud_stub.tenants_cli:keys", "list, add, rotate or revoke API keys"),
    "tenants": ("cloud_stub.tenants_cli:tenants", "who may take how much of which models, and their bills"),
    "audit": ("cloud_stub.tenants_cli:audit", "verify the record of requests and management"),
    "report": ("cloud_stub.report_cli:report", "what requests took, and what that saved"),
    "apps": ("cloud_stub.apps_cli:apps", "apps that hold the control channel: list, warm, switch, route"),
    "fleet": ("cloud_stub.cli:fleet", "list the fleet's devices"),
}

GROUPS = frozenset({"route", "split", "dispatch", "policy", "tails", "keys", "tenants", "audit", "apps", "fleet"})
"""Verbs that need another verb: alone they show their help."""

EXIT_FAILED = 1
EXIT_CONFIG = 2
EXIT_INTERRUPTED = 130
EXIT_PIPE = 141


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return its exit code: 0 done, 1 failed, 2 wrong use or configuration, 130 interrupted."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if arguments else EXIT_CONFIG
    if arguments[0] in ("-V", "--version", "version"):
        print(version())
        return 0
    return _call(arguments[0], arguments[1:])


def usage() -> str:
    """The text of `midstream --help`."""
    width = max(map(len, VERBS))
    verbs = "\n".join(f"  {name:<{width}}  {text}" for name, (_, text) in VERBS.items())
    return (
        "usage: midstream VERB [options]\n\n"
        "Moves inference between a device and the cloud while it runs.\n\n"
        f"verbs:\n{verbs}\n\n"
        "`midstream VERB --help` lists the options of a verb.\n"
        "exit codes: 0 done, 1 failed, 2 wrong use or configuration, 3 could be better (doctor), 130 interrupted"
    )


def version() -> str:
    """`midstream X.Y.Z`; says so when run from sources that were never installed."""
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as installed

    try:
        return f"midstream {installed('midstream')}"
    except PackageNotFoundError:
        return "midstream (not installed, run from sources)"


def _call(verb: str, arguments: list[str]) -> int:
    if verb not in VERBS:
        print(f"midstream: unknown verb {verb!r}; `midstream --help` lists them", file=sys.stderr)
        return EXIT_CONFIG
    try:
        if verb in GROUPS and not arguments:
            return _shown_help(verb)
        return _load(VERBS[verb][0])(arguments)
    except MidstreamError as err:
        print(f"midstream {verb}: {describe(err)}", file=sys.stderr)
        return EXIT_CONFIG if isinstance(err, ConfigError) else EXIT_FAILED
    except KeyboardInterrupt:
        # Below the terminal's own ^C, or the line that was being written.
        print(f"{chr(10) if sys.stderr.isatty() else ''}midstream {verb}: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of our output left (`| head`); keep the interpreter from complaining about it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_PIPE


def _shown_help(verb: str) -> int:
    """The verb's own help, where errors go."""
    with contextlib.redirect_stdout(sys.stderr), contextlib.suppress(SystemExit):
        _load(VERBS[verb][0])(["--help"])
    return EXIT_CONFIG


def _load(target: str) -> Callable[[list[str]], int]:
    module, _, name = target.partition(":")
    try:
        return cast("Callable[[list[str]], int]", getattr(importlib.import_module(module), name))
    except ModuleNotFoundError as err:
        if err.name and err.name.partition(".")[0] in ("agent", "cloud_stub"):
            raise
        raise ConfigError(
            f"the Python package {err.name!r} is missing", next_step=install_step(_extra(err.name))
        ) from err


def _extra(package: str | None) -> str:
    """Which extra of midstream brings a package, by what it is called there; `all` where that cannot be told."""
    from importlib.metadata import PackageNotFoundError, requires

    wanted = re.sub(r"[-_.]+", "-", (package or "").partition(".")[0]).lower()
    with contextlib.suppress(PackageNotFoundError):
        for line in requires("midstream") or ():
            name, found = re.match(r"[\w.-]+", line), re.search(r"extra == ['\"]([\w-]+)['\"]", line)
            if name and found and re.sub(r"[-_.]+", "-", name[0]).lower() == wanted and found[1] not in ("all", "dev"):
                return found[1]
    return "all"


def describe(error: MidstreamError) -> str:
    """One line: what happened, and the next step after a dash."""
    line = error.message if not error.next_step else f"{error.message} - {error.next_step}"
    return " ".join(line.split())


if __name__ == "__main__":
    sys.exit(main())

"""`midstream doctor`: what may be wrong with this device, each finding with its next step.

Exit code: 0 all well, 1 something will not work, 3 something works less well than it could.
"""

from __future__ import annotations

import importlib.metadata
import shutil
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

from attrs import frozen

from agent.config import AgentConfig
from agent.model_names import unknown_step
from links.webrtc_settings import installed, missing
from protocol.clock import WallClock, wall_now
from protocol.errors import MidstreamError
from protocol.extras import install_step

Level = Literal["ok", "warning", "error"]

ROOMS = ("agent", "cloud_stub", "engines", "gateway", "links", "netprobe", "profiles", "protocol", "split_models")
DISTRIBUTION = "midstream"
LOW_DISK_BYTES = 500 << 20
MAX_NAMED = 20
USUAL_TEXT_MODEL = "smollm2-135m"
EXIT_OK, EXIT_BROKEN, EXIT_COULD_BE_BETTER = 0, 1, 3


@frozen
class Finding:
    """One result. `next_step` is empty when all is well."""

    check: str
    level: Level
    text: str
    next_step: str = ""


Checker = Callable[[], Iterable[Finding]]
Status = Callable[[], Mapping[str, object]]
"""The running agent's status document; raises MidstreamError when none answers."""


def run(checks: Sequence[tuple[str, Checker]]) -> list[Finding]:
    """All findings, in order; a check that itself fails is a finding."""
    found: list[Finding] = []
    for name, check in checks:
        try:
            found.extend(check())
        except (MidstreamError, OSError, ValueError, ImportError) as err:
            found.append(Finding(name, "error", f"the check failed: {err}", "report this with the text above"))
    return found


def exit_code(findings: Iterable[Finding]) -> int:
    """0, 1 or 3, as the module says."""
    levels = {finding.level for finding in findings}
    if "error" in levels:
        return EXIT_BROKEN
    return EXIT_COULD_BE_BETTER if "warning" in levels else EXIT_OK


def standard_checks(config: AgentConfig, status: Status) -> list[tuple[str, Checker]]:
    """The checks that need no network; `status` asks the agent on this machine."""
    return [
        ("packages", lambda: check_packages(importlib.metadata.packages_distributions())),
        ("clock", lambda: check_clock(wall_now)),
        ("state", lambda: check_folder(config.state_dir)),
        ("disk", lambda: check_disk(config.models_dir)),
        ("port", lambda: check_port(config.host, config.port, status)),
        ("engines", check_engines),
        ("models", lambda: check_models(config, status)),
        ("webrtc", lambda: check_webrtc(config.webrtc, bool(config.webrtc_servers), installed())),
    ]


def check_webrtc(mode: str, servers: bool, here: bool) -> Iterable[Finding]:
    """Whether what the settings ask for can be done; silent where nothing is asked."""
    if mode != "off" and (mode == "always" or servers) and not here:
        error = missing()
        yield Finding("webrtc", "warning", error.message, error.next_step)


def check_packages(owners: dict[str, list[str]] | object) -> Iterable[Finding]:
    """Our folders have plain names, so another distribution may have overwritten one of them."""
    assert isinstance(owners, dict)
    wrong = {room: set(owners.get(room, ())) - {DISTRIBUTION} for room in ROOMS}
    foreign = {room: sorted(who) for room, who in wrong.items() if who}
    if foreign:
        named = "; ".join(f"{room} also comes from {', '.join(who)}" for room, who in foreign.items())
        yield Finding("packages", "error", named, "install midstream into a virtual environment of its own")
    elif not any(DISTRIBUTION in owners.get(room, ()) for room in ROOMS):
        yield Finding("packages", "ok", "running from sources; nothing is installed over them")
    else:
        yield Finding("packages", "ok", "all top-level packages belong to midstream alone")


def check_clock(wall: WallClock) -> Iterable[Finding]:
    """A clock in the past makes every certificate look not yet valid."""
    if wall().trusted:
        yield Finding("clock", "ok", "the clock is set")
    else:
        yield Finding("clock", "error", "the clock shows a time before this release was made", "start NTP, or set it")


def check_folder(folder: Path) -> Iterable[Finding]:
    """State must be writable."""
    place = next((p for p in (folder, *folder.parents) if p.exists()), folder)
    probe = place / f".midstream-doctor-{socket.gethostname()[:32]}"
    try:
        probe.touch()
        probe.unlink()
    except OSError as err:
        yield Finding(
            "state", "error", f"{place} is not writable: {err.strerror}", "set state_dir to a writable folder"
        )
        return
    yield Finding("state", "ok", f"{folder} can be written")


def check_disk(folder: Path) -> Iterable[Finding]:
    """Models are large."""
    place = next((p for p in (folder, *folder.parents) if p.exists()), Path("/"))
    free = shutil.disk_usage(place).free
    if free < LOW_DISK_BYTES:
        yield Finding(
            "disk", "warning", f"{free >> 20} MiB free for {folder}", "`midstream models rm` what is not used"
        )
    else:
        yield Finding("disk", "ok", f"{free >> 20} MiB free for {folder}")


def check_port(host: str, port: int, status: Status) -> Iterable[Finding]:
    """The API's port is free, or ours already."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.settimeout(1.0)
        taken = port != 0 and probe.connect_ex((host, port)) == 0
    if not taken:
        yield Finding("port", "ok", f"{host}:{port} is free")
    elif _running(status) is not None:
        yield Finding("port", "ok", f"the agent listens on {host}:{port}")
    else:
        yield Finding(
            "port", "warning", f"something listens on {host}:{port} and does not answer as the agent",
            "`midstream status` tells more; if it is not the agent, end it or set another `port` in agent.toml",
        )  # fmt: skip


def _running(status: Status) -> Mapping[str, object] | None:
    try:
        return status()
    except MidstreamError:
        return None


def check_running(status: Status) -> Iterable[Finding]:
    """What the running agent warns of, for example a queue that grows while the CPU is idle. `status` may fail."""
    found = _running(status)
    if found is None:
        yield Finding("agent", "ok", "no agent runs here now, so nothing is known of its queues")
        return
    warnings = found.get("warnings")
    listed = [w for w in warnings if isinstance(w, Mapping)] if isinstance(warnings, list) else []
    for warning in listed:
        yield Finding("agent", "warning", str(warning.get("text", "")), str(warning.get("next_step", "")))
    if not listed:
        yield Finding("agent", "ok", "the running agent warns of nothing")


def check_engines() -> Iterable[Finding]:
    """Installed engines, each imported in a child process, for a wheel built for another CPU dies by SIGILL."""
    from engines.registry import ENGINES, installed_engines, probe_import, repair_step

    installed = installed_engines()
    if not installed:
        yield Finding("engines", "warning", "no inference engine is installed", install_step("onnx,llama"))
    for name, version in installed.items():
        probes = [probe_import(module, version=version) for module in ENGINES[name].modules]
        if any(probe.works for probe in probes):
            yield Finding("engines", "ok", f"{name} {version} can be imported")
        else:
            problem = probes[0].problem if probes else "no module is known for it"
            step = repair_step(problem, install_step(ENGINES[name].extra, again=True))
            yield Finding("engines", "error", problem, step)


def check_models(config: AgentConfig, status: Status) -> Iterable[Finding]:
    """Configured models are in the store; without `tensor_models` every pulled one is served.

    A text model may come from a flag of the running agent, which its status knows and `config` does not.
    """
    wanted = [*config.tensor_models, *([config.text_model] if config.text_model else [])]
    if not wanted:
        if config.models_dir.exists() and not config.models_dir.is_dir():
            yield Finding("models", "error", f"{config.models_dir} is no folder", "name a folder with `models_dir`")
            return
        pulled = sorted(entry.parent.name for entry in config.models_dir.glob("*/entry.json"))
        if pulled:
            yield Finding("models", "ok", f"pulled: {', '.join(pulled[:MAX_NAMED])}")
        else:
            yield Finding("models", "warning", f"no model is in {config.models_dir}", "`midstream models list`, `pull`")
    if config.text_model is None and not _serves_text(_running(status)):
        yield from _unused_text(config.models_dir)
    for name in wanted:
        folder = config.models_dir / name
        if folder.is_dir() and any(folder.iterdir()):
            yield Finding("models", "ok", f"{name} is in the store")
        else:
            unknown = unknown_step(config, name) if name == config.text_model else ""
            step = unknown or f"`midstream models pull {name}`"
            yield Finding("models", "error", f"{name} is not in {config.models_dir}", step)


def _serves_text(found: Mapping[str, object] | None) -> bool:
    return found is not None and bool(found.get("text_model")) and found.get("text_place") != "cloud"


def _unused_text(models_dir: Path) -> Iterable[Finding]:
    """Tensor models are served unasked, a text model only when it is named."""
    found = sorted(file.parent.name for file in models_dir.glob("*/*.gguf") if (file.parent / "entry.json").is_file())
    if found:
        name = USUAL_TEXT_MODEL if USUAL_TEXT_MODEL in found else found[0]
        yield Finding(
            "models", "warning", f"no text_model is set; here and not served: {', '.join(found[:MAX_NAMED])}",
            f'text_model = "{name}" in agent.toml, or `midstream agent --text-model {name}`',
        )  # fmt: skip

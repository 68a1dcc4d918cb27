"""The systemd unit: clean, hardened, and without the settings that break what runs inside."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from agent.settings_table import SETTINGS

ROOT = Path(__file__).resolve().parents[3]
UNIT = ROOT / "firmware_scripts" / "midstream.service"
MAX_EXPOSURE = 1.5
TARGETS = ("sysinit", "basic", "shutdown", "network-online", "time-sync", "multi-user")


def systemd_analyze() -> str:
    """The system's tool or the one that `make setup` unpacked; skips (fails in CI) without one."""
    unpacked = ROOT / ".setup" / "bin" / "systemd-analyze"
    found = shutil.which("systemd-analyze") or (str(unpacked) if unpacked.exists() else None)
    if found is None:
        message = "systemd-analyze is not installed; run `make setup`"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)
    return found


def directives() -> dict[str, list[str]]:
    """Values by key in the order of the file; a later line of the same key adds to it."""
    found: dict[str, list[str]] = {}
    for line in UNIT.read_text().splitlines():
        key, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            found.setdefault(key, []).append(value)
    return found


def test_every_secret_may_be_a_credential() -> None:
    secrets = {setting.name for setting in SETTINGS if setting.secret}
    assert set(directives()["LoadCredential"]) == {f"{name}:midstream.{name}" for name in secrets}
    assert f"for secret in {' '.join(sorted(secrets))}; do" in (UNIT.parent / "install.sh").read_text()


def verify(root: Path) -> subprocess.CompletedProcess[str]:
    """`systemd-analyze verify` of the unit as it is installed, in a root that has nothing else."""
    for name, text in {
        **{f"usr/lib/systemd/system/{t}.target": f"[Unit]\nDescription={t}\n" for t in TARGETS},
        "opt/midstream/bin/midstream": "#!/bin/sh\n",
        "bin/kill": "#!/bin/sh\n",
    }.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        file.chmod(0o755 if file.parent.name == "bin" else 0o644)
    command = [systemd_analyze(), "verify", "--man=no", f"--root={root}", "midstream.service"]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)


def install(root: Path, text: str) -> None:
    folder = root / "etc" / "systemd" / "system"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "midstream.service").write_text(text)


def test_systemd_finds_nothing_wrong_with_the_unit(tmp_path: Path) -> None:
    install(tmp_path, UNIT.read_text())
    done = verify(tmp_path)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_a_misspelt_setting_would_be_found(tmp_path: Path) -> None:
    install(tmp_path, UNIT.read_text().replace("ProtectHome=", "ProtectHomes="))
    assert "Unknown key 'ProtectHomes'" in verify(tmp_path).stderr


def test_the_exposure_stays_low() -> None:
    command = [systemd_analyze(), "security", "--offline=true", "--no-pager", str(UNIT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    verdict = next(line for line in done.stdout.splitlines() if "Overall exposure level" in line)
    assert float(verdict.split(":")[1].split()[0]) <= MAX_EXPOSURE, verdict


def test_interfaces_can_be_listed_inside() -> None:
    (families,) = directives()["RestrictAddressFamilies"]
    assert {"AF_NETLINK", "AF_INET", "AF_INET6", "AF_UNIX"} == set(families.split())


def test_nothing_forbids_the_memory_that_ctypes_closures_and_engines_need() -> None:
    assert "MemoryDenyWriteExecute" not in directives()


def test_cpuinfo_and_the_programs_of_the_system_stay_visible() -> None:
    found = directives()
    assert "ProcSubset" not in found
    hidden = [path for key in ("InaccessiblePaths", "TemporaryFileSystem") for path in found.get(key, [])]
    assert hidden == [] and "RootDirectory" not in found


def test_engines_may_pin_threads_and_stand_back() -> None:
    assert not [line for line in directives()["SystemCallFilter"] if "@resources" in line and line.startswith("~")]


def test_start_and_watchdog_leave_a_pi_its_time() -> None:
    found = directives()
    assert found["Type"] == ["notify"]
    assert int(found["WatchdogSec"][0]) >= 30
    assert int(found["TimeoutStartSec"][0]) >= 120


def test_network_and_clock_are_wanted_and_never_required() -> None:
    found = directives()
    assert not {"Requires", "BindsTo", "Requisite", "AssertPathExists"} & set(found)
    assert found["Wants"] == ["network-online.target"]
    assert "time-sync.target" in found["After"][0]

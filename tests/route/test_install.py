"""The installer in a clean Debian: from a bundle without a network, again, from a clone, and away again.

Slow, as root only (chroot, namespaces), and it needs Debian's archive once: debootstrap's default mirror, or the URL in
MIDSTREAM_DEBIAN_MIRROR. Nothing outside the test's folder is touched.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil
import pytest
from attrs import frozen

from tests.unit.agent.managers import FakeManager

ROOT = Path(__file__).resolve().parents[2]
SUITES = {(3, 11): "bookworm", (3, 13): "trixie"}
EXTRAS = "onnx"
PACKAGES = ("python3", "python3-venv", "systemd", "systemd-sysv", "dbus", "procps")
ACCOUNTS = ("passwd", "group", "shadow", "gshadow")
PROGRAM = "/opt/midstream/bin/midstream"

pytestmark = pytest.mark.slow


def unavailable(why: str) -> None:
    """Skip, or fail where everything should be there."""
    if os.environ.get("CI"):
        pytest.fail(why)
    pytest.skip(why)


def debootstrap_binary() -> str:
    unpacked = ROOT / ".setup" / "bin" / "debootstrap"
    found = shutil.which("debootstrap") or (str(unpacked) if unpacked.exists() else None)
    if found is None:
        unavailable("debootstrap is not installed; run `make setup` as root")
    assert found is not None
    return found


@frozen
class Clean:
    """A Debian root folder and a bundle inside it."""

    root: Path
    bundle: str

    def run(self, *command: str, network: bool = False, **environ: str) -> subprocess.CompletedProcess[str]:
        """In the root, with a /proc of its own; without `network` there is none at all."""
        spaces = ["--mount", "--pid", "--fork", f"--mount-proc={self.root / 'proc'}"]
        spaces += [] if network else ["--net"]
        clean = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root", "LANG": "C.UTF-8", **environ}
        whole = ["unshare", *spaces, "chroot", str(self.root), *command]
        return subprocess.run(whole, capture_output=True, text=True, check=False, env=clean, timeout=600)

    def install(self, *options: str, network: bool = False, **environ: str) -> str:
        """Run the installer from the bundle's folder; its output. AssertionError when it fails."""
        done = self.run("/bin/sh", "/src/firmware_scripts/install.sh", *options, network=network, **environ)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def tree(self) -> dict[str, str]:
        """Every path with its kind, rights, owner and content, volatile places left out."""
        found: dict[str, str] = {}
        for folder, folders, files in os.walk(self.root):
            inside = "/" + str(Path(folder).relative_to(self.root)).removeprefix(".")
            if inside in ("/proc", "/sys", "/dev", "/tmp", "/run", "/src", "/var/log", "/root"):
                folders.clear()
                continue
            for name in [*folders, *files]:
                path = Path(folder) / name
                found[f"{inside.rstrip('/')}/{name}"] = _identity(path)
        backups = {f"/etc/{name}-" for name in ACCOUNTS} | {"/etc/.pwd.lock"}
        return {name: what for name, what in found.items() if name not in backups}


def _identity(path: Path) -> str:
    info = path.lstat()
    text = f"{stat.filemode(info.st_mode)} {info.st_uid}:{info.st_gid}"
    if stat.S_ISREG(info.st_mode):
        text += " " + hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    return text


def difference(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """Paths that came, went or changed; folders whose contents changed do not count by themselves."""
    return sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))


@pytest.fixture(scope="module")
def debian(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clean]:
    if os.getuid() != 0:
        pytest.skip("a chroot needs root")
    if subprocess.run(["unshare", "--mount", "--pid", "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("this root may not make namespaces (no CAP_SYS_ADMIN, as in many containers)")
    suite = SUITES.get(sys.version_info[:2])
    if suite is None:
        pytest.skip(f"no Debian release has Python {sys.version_info[0]}.{sys.version_info[1]}")
    place = tmp_path_factory.mktemp("debian")
    root = place / "root"
    command = [debootstrap_binary(), "--variant=minbase", f"--include={','.join(PACKAGES)}", suite, str(root)]
    command += [mirror] if (mirror := os.environ.get("MIDSTREAM_DEBIAN_MIRROR")) else []
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    if done.returncode != 0:
        unavailable(f"debootstrap failed: {(done.stdout + done.stderr)[-500:]}")
    bundle = make_bundle(place)
    source = root / "src"
    source.mkdir()
    shutil.copy(bundle, source)
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    for name in filter(None, tracked.decode().split("\0")):
        if not name.startswith(("tests/", "benchmarks/")) and (ROOT / name).exists():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, source / name)
    shutil.copy("/etc/resolv.conf", root / "etc" / "resolv.conf")
    yield Clean(root, f"/src/{bundle.name}")
    shutil.rmtree(place, ignore_errors=True)


def make_bundle(place: Path) -> Path:
    script = ROOT / "firmware_scripts" / "bundle.sh"
    command = [str(script), "--extras", EXTRAS, "--out", str(place / "dist")]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=os.environ | {"PYTHON": sys.executable}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return next((place / "dist").glob("midstream-*.tar"))


def test_offline_again_repaired_and_away(debian: Clean) -> None:
    before = debian.tree()
    said = debian.install("--offline", debian.bundle, "--dry-run")
    assert "would run: useradd" in said and "would make /opt/midstream/venv" in said
    assert difference(before, debian.tree()) == [], "a dry run changes nothing"

    assert "installed midstream" in debian.install("--offline", debian.bundle)
    config = debian.root / "etc/midstream/agent.toml"
    assert (debian.root / "etc/systemd/system/midstream.service").is_file()
    assert stat.S_IMODE((debian.root / "var/lib/midstream").stat().st_mode) == 0o700
    assert debian.run("/usr/local/bin/midstream", "--version").stdout.startswith("midstream ")
    doctor = debian.run("setpriv", "--reuid=midstream", "--regid=midstream", "--clear-groups", PROGRAM, "doctor")
    assert "onnx 1" in doctor.stdout and "/var/lib/midstream can be written" in doctor.stdout, doctor.stdout

    # Again: what is there is kept, the tree does not grow, and a damaged environment is whole afterwards.
    config.write_text(config.read_text() + 'log_level = "debug"\n')
    identity = debian.root / "var/lib/midstream/identity"
    identity.mkdir()
    link = debian.root / "usr/local/bin/midstream"
    link.unlink()
    link.symlink_to("/bin/true")  # somebody else's
    own = debian.root / "etc/systemd/system/midstream.service.d/own.conf"
    own.parent.mkdir()
    own.write_text("[Service]\nNice=5\n")
    once = debian.tree()
    lost = next(debian.root.glob("opt/midstream/venv/lib/python3*/site-packages/agent/house.py"))
    lost.unlink()
    assert "midstream is not ours and stays" in debian.install("--offline", debian.bundle)
    changed = [n for n in difference(once, debian.tree()) if "__pycache__" not in n and ".dist-info" not in n]
    assert changed == []
    assert 'log_level = "debug"' in config.read_text() and identity.is_dir()

    debian.install("--uninstall", "--keep-state")
    assert config.exists() and identity.is_dir() and not (debian.root / "opt/midstream").exists()
    assert own.exists() and not (debian.root / "etc/systemd/system/midstream.service").exists()
    debian.install("--uninstall")
    assert link.readlink() == Path("/bin/true")
    link.unlink()
    assert difference(before, debian.tree()) == []
    debian.install("--uninstall")  # nothing is there, and that is no error


def test_the_installed_agent_runs_as_its_user_and_says_ready(debian: Clean) -> None:
    debian.install("--offline", debian.bundle)
    manager = FakeManager(str(debian.root / "run" / "notify"))
    (debian.root / "run" / "notify").chmod(0o777)
    command = ["unshare", "--mount", "--pid", "--fork", f"--mount-proc={debian.root / 'proc'}"]
    command += ["chroot", str(debian.root), "setpriv", "--reuid=midstream", "--regid=midstream", "--clear-groups"]
    command += [PROGRAM, "agent", "--config", "/etc/midstream/agent.toml", "--port", "0", "--mdns", "no"]
    clean = {"PATH": "/usr/sbin:/usr/bin:/bin", "NOTIFY_SOCKET": "/run/notify", "WATCHDOG_USEC": "4000000"}
    process = subprocess.Popen(command, env=clean, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        manager.until(lambda m: "READY" in m, 60)
        manager.until_fed()
        assert next((debian.root / "var/lib/midstream").iterdir()).exists()
    finally:
        # unshare's --kill-child ends with the change of user: the first process inside is ended by hand, all with it.
        for child in psutil.Process(process.pid).children():
            child.kill()
        process.kill()
        process.wait()
        manager.close()
        (debian.root / "run" / "notify").unlink()
        debian.install("--uninstall")


def test_a_damaged_or_foreign_bundle_is_refused_before_anything_changes(debian: Clean) -> None:
    before = debian.tree()
    broken = debian.root / "src" / "broken.tar"
    whole = (debian.root / debian.bundle.removeprefix("/")).read_bytes()
    middle = len(whole) // 2
    broken.write_bytes(whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :])
    for bundle, code, words in (
        ("/src/broken.tar", 1, "damaged"),
        ("/src/pyproject.toml", 1, "cannot be unpacked"),
        ("/nowhere.tar", 2, "no bundle at"),
    ):
        done = debian.run("/bin/sh", "/src/firmware_scripts/install.sh", "--offline", bundle)
        assert (done.returncode, words in done.stderr) == (code, True), done.stderr
    broken.unlink()
    assert difference(before, debian.tree()) == []


# Runs inside as a unit of its own, writes what it sees, and switches the machine off.
CHECK = """
show() { echo "$1: $(systemctl show midstream -p "$2" --value)"; }
until [ "$(systemctl show midstream -p ActiveState --value)" = active ]; do sleep 0.2; done
show status StatusText
printf 'log_level = "debug"\\ntensor_threads = 1\\n' >>/etc/midstream/agent.toml
systemctl reload midstream
read_again() { journalctl -u midstream --no-pager -o cat | grep -m1 "configuration read"; }
until read_again >/dev/null; do sleep 0.2; done  # the status text may be another one again by now
echo "reloaded: $(read_again)"
show state ActiveState
main=$(systemctl show midstream -p MainPID --value)
tr '\\0' '\\n' <"/proc/$main/environ" | grep -q NOTIFY_SOCKET && echo "manager: told"
echo "credential: $(cat /run/credentials/midstream.service/text_key)"
kill -STOP "$main"
until [ "$(systemctl show midstream -p NRestarts --value)" != 0 ]; do sleep 0.2; done
until [ "$(systemctl show midstream -p ActiveState --value)" = active ]; do sleep 0.2; done
echo "journal: $(journalctl -u midstream --no-pager -o cat | grep -m1 "Failed with result")"
show restarts NRestarts
systemctl stop midstream
show result Result
"""


def systemd_nspawn() -> str:
    unpacked = ROOT / ".setup" / "bin" / "systemd-nspawn"
    found = shutil.which("systemd-nspawn") or (str(unpacked) if unpacked.exists() else None)
    if found is None:
        unavailable("systemd-nspawn is not installed; run `make setup` as root")
    assert found is not None
    return found


def test_under_a_real_systemd_it_starts_reloads_and_is_restarted_by_the_watchdog(debian: Clean) -> None:
    """The whole sandbox, booted with systemd as PID 1; a stopped main process is what a hang looks like."""
    debian.install("--offline", debian.bundle)
    units = debian.root / "etc/systemd/system"
    (units / "midstream.service.d").mkdir()
    (units / "midstream.service.d/quick.conf").write_text("[Service]\nWatchdogSec=4\nRestartSec=1\n")
    (units / "check.service").write_text(
        "[Unit]\nAfter=midstream.service\nSuccessAction=poweroff-force\nFailureAction=poweroff-force\n"
        "[Service]\nType=oneshot\nTimeoutStartSec=120\n"
        "ExecStart=/bin/sh -c '/bin/sh /src/check.sh >/src/seen.txt 2>&1'\n"
    )
    wants = units / "multi-user.target.wants"
    wants.mkdir(exist_ok=True)
    for name in ("midstream", "check"):
        (wants / f"{name}.service").symlink_to(f"/etc/systemd/system/{name}.service")
    (debian.root / "etc/credstore").mkdir(exist_ok=True)
    (debian.root / "etc/credstore/midstream.text_key").write_text("sesame")
    (debian.root / "src/check.sh").write_text(CHECK)
    command = [systemd_nspawn(), "-D", str(debian.root), "--boot", "--register=no", "--keep-unit", "--private-network"]
    try:
        done = subprocess.run(
            [*command, "--console=pipe"],
            capture_output=True,
            text=True,
            check=False,
            timeout=240,
            stdin=subprocess.DEVNULL,
        )
        file = debian.root / "src/seen.txt"
        assert file.exists(), (done.stdout + done.stderr)[-2000:]
        seen = dict(line.split(": ", 1) for line in file.read_text().splitlines() if ": " in line)
    finally:
        (units / "check.service").unlink()
        (wants / "check.service").unlink()
        debian.install("--uninstall")
    assert seen["status"].startswith("ready at http://127.0.0.1:8790")
    assert seen["reloaded"].endswith("in force now: log_level; at the next start: tensor_threads")
    assert (seen["state"], seen["manager"], seen["credential"]) == ("active", "told", "sesame")
    assert "'watchdog'" in seen["journal"] and seen["restarts"] == "1"
    assert seen["result"] == "success"


def test_from_a_clone_and_away(debian: Clean) -> None:
    """Builds and installs in the clean system; needs the package index as pip is set up here."""
    certificates = os.environ.get("PIP_CERT") or "/etc/ssl/certs/ca-certificates.crt"
    inside = debian.root / "src" / "certificates.pem"
    if Path(certificates).is_file():
        shutil.copy(certificates, inside)
    environ = {k: v for k, v in os.environ.items() if k.lower().startswith("pip_index") or k.lower().endswith("_proxy")}
    environ |= {"PIP_CERT": "/src/certificates.pem"} if inside.exists() else {}
    before = debian.tree()
    said = debian.install("--extras", "none", network=True, **environ)
    assert "installed midstream" in said
    assert debian.run(PROGRAM, "--version").returncode == 0
    debian.install("--uninstall")
    assert difference(before, debian.tree()) == []

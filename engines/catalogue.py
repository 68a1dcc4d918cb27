"""The catalogue: which models midstream knows by name, from the shipped file and the user's own."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from protocol.decode import decode_listing
from protocol.errors import ConfigError, ProtocolError
from protocol.models import CatalogueEntry

MAX_CATALOGUE_BYTES = 1 << 20
"""A few hundred entries with chat templates; a larger file is not a catalogue."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@+-]{0,127}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


def shipped_catalogue() -> dict[str, CatalogueEntry]:
    """The entries that come with this release."""
    text = resources.files("engines").joinpath("catalogue.toml").read_text(encoding="utf-8")
    return parse_catalogue(text, "catalogue.toml")


def load_catalogue(user_file: Path | None = None) -> dict[str, CatalogueEntry]:
    """Shipped entries with the user's merged over them, name by name; an absent user file is fine.

    Raises ConfigError naming the file and the field.
    """
    found = shipped_catalogue()
    if user_file is not None and user_file.exists():
        try:
            if user_file.stat().st_size > MAX_CATALOGUE_BYTES:
                raise ConfigError(f"{user_file} is larger than a catalogue of {MAX_CATALOGUE_BYTES} bytes")
            text = user_file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as err:
            raise ConfigError(f"{user_file} cannot be read: {err}", next_step="check the file") from err
        found |= parse_catalogue(text, str(user_file))
    return found


def parse_catalogue(text: str, what: str) -> dict[str, CatalogueEntry]:
    """Entries by name from TOML text with [models.<name>] tables. Raises ConfigError naming the field."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as err:
        raise ConfigError(f"{what} is not TOML: {err}", next_step="correct the line that it names") from err
    models = document.get("models", {})
    unknown = sorted(set(document) - {"models"})
    if unknown or not isinstance(models, dict):
        field = unknown[0] if unknown else "models"
        raise ConfigError(f"{what}: {field!r} is not a table of models", next_step="use [models.NAME]", field=field)
    return {name: _entry(name, table, what) for name, table in models.items()}


def check_name(name: str, field: str = "name") -> str:
    """`name` if it can stand in a URL, a topic and a folder. Raises ConfigError."""
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{name[:64]!r} cannot be a name", next_step="use letters, digits, dot, dash, at most 128", field=field
        )
    return name


def is_name(name: str) -> bool:
    """Whether `name`, which may come from a request, can stand for a folder of the store."""
    return _NAME.fullmatch(name) is not None


def check_filename(filename: str) -> str:
    """`filename` if it stays in its folder and collides with no file of ours. Raises ConfigError."""
    if filename in ("", ".", "..", "entry.json") or "/" in filename or "\\" in filename or filename.startswith("."):
        raise ConfigError(f"{filename[:64]!r} cannot be a model's file name", field="filename")
    return check_name(filename, "filename")


def _entry(name: str, table: Any, what: str) -> CatalogueEntry:
    where = f"{what}, model {name[:64]!r}"
    check_name(name)
    if not isinstance(table, Mapping):
        raise ConfigError(f"{where} is not a table", field=f"models.{name}")
    try:
        entry, unknown = decode_listing(CatalogueEntry, {**table, "name": name}, what=where)
    except ProtocolError as err:
        raise ConfigError(err.message, next_step=f"correct it in {what}", field=err.field) from err
    if unknown:
        raise ConfigError(f"{where}: unknown field {unknown[0]!r}", next_step="correct its spelling", field=unknown[0])
    check_filename(entry.filename)
    check_entry(entry, where)
    return entry


def check_entry(entry: CatalogueEntry, where: str) -> None:
    """Raise ConfigError unless digest, size and source are complete."""
    source = entry.source
    complete = {
        "wheel": bool(source.parts) or bool(source.package and source.member),
        "url": bool(source.url),
        "hub": bool(source.repo and source.file and source.url),
        "file": bool(source.file),
    }
    if not _SHA256.fullmatch(entry.sha256):
        raise ConfigError(f"{where}: sha256 must be 64 hexadecimal digits", field="sha256")
    if entry.size_bytes <= 0:
        raise ConfigError(f"{where}: size_bytes must be above 0", field="size_bytes")
    if entry.side_files and source.kind != "file":
        raise ConfigError(f"{where}: side files come with a source of kind file only", field="side_files")
    if not complete[source.kind]:
        raise ConfigError(f"{where}: a source of kind {source.kind} lacks a field", field="source")

"""Recorded requests and TTFTs for `midstream dispatch replay`: CSV files, or what an agent wrote with --events."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from math import inf, isfinite
from pathlib import Path

from gateway.replay import Asked
from protocol.errors import ConfigError

MAX_ROWS = 200_000
MAX_LINE_BYTES = 1 << 16

ARRIVAL = ("arrival_s", "TIMESTAMP", "Timestamp")
PROMPT = ("prompt_tokens", "ContextTokens", "Request tokens")
ANSWER = ("answer_tokens", "GeneratedTokens", "Response tokens")


def read_requests(file: Path) -> Sequence[Asked]:
    """A CSV with arrival (seconds or a time), prompt and answer tokens, in order of arrival; see ARRIVAL and so on.

    Raises ConfigError that names file, line and column.
    """
    found = []
    for number, row in _rows(file):
        at_s = _moment(_column(row, ARRIVAL, file), f"{file.name}, line {number}")
        sizes = [_count(_column(row, names, file), f"{file.name}, line {number}") for names in (PROMPT, ANSWER)]
        found.append(Asked(at_s, *sizes))
    return _ordered(found, file)


def read_ttfts(file: Path, service: str | None) -> Sequence[float]:
    """The column ttft_s of a CSV; empty or with an error_code: a failure. service: only rows with this `model`."""
    found = []
    for number, row in _rows(file):
        if service is not None and row.get("model") != service:
            continue
        text = _column(row, ("ttft_s",), file).strip()
        failed = not text or bool((row.get("error_code") or "").strip())
        found.append(inf if failed else _number(text, f"{file.name}, line {number}: ttft_s"))
    if not any(map(isfinite, found)):
        raise ConfigError(f"{file} has no TTFT{f' of {service}' if service else ''}", field="--ttfts")
    return found


def read_events(file: Path, device: str) -> tuple[Sequence[Asked], Sequence[float]]:
    """Requests of an agent's event file, and TTFTs of those that began elsewhere than on `device`."""
    requests, ttfts = [], []
    for number, line in _lines(file):
        try:
            event = json.loads(line)
        except ValueError as err:
            raise ConfigError(f"{file.name}, line {number} is not JSON", field="--events") from err
        if not isinstance(event, dict) or event.get("event") != "text_done" or not event.get("prompt_tokens"):
            continue
        try:
            begun_s = float(event["at_s"]) - float(event["total_s"])
            requests.append(Asked(begun_s, int(event["prompt_tokens"]), int(event["completion_tokens"])))
            sides, ttft_s = event.get("sides") or [], event.get("ttft_s")
            if ttft_s is not None and sides and sides[0][0] != device:
                ttfts.append(float(ttft_s))
        except (KeyError, TypeError, ValueError, IndexError) as err:
            raise ConfigError(
                f"{file.name}, line {number} is no text_done event of an agent", field="--events"
            ) from err
    return _ordered(requests, file), ttfts


def _rows(file: Path) -> Iterator[tuple[int, Mapping[str, str]]]:
    header: list[str] | None = None
    for number, line in _lines(file):
        cells = next(csv.reader([line]), [])
        if header is None:
            header = cells
        elif cells:
            yield number, dict(zip(header, cells, strict=False))


def _lines(file: Path) -> Iterator[tuple[int, str]]:
    try:
        with file.open(encoding="utf-8", errors="replace") as opened:
            for number in range(1, MAX_ROWS + 2):
                line = opened.readline(MAX_LINE_BYTES)
                if not line:
                    return
                yield number, line.rstrip("\r\n")
    except OSError as err:
        raise ConfigError(f"cannot read {file}: {err.strerror}", next_step="name another file") from err


def _column(row: Mapping[str, str], names: Sequence[str], file: Path) -> str:
    for name in names:
        if name in row:
            return row[name]
    raise ConfigError(f"{file} has no column {' or '.join(names)}", next_step="see docs/dispatch.md for the columns")


def _number(text: str, where: str) -> float:
    try:
        value = float(text)
    except ValueError as err:
        raise ConfigError(f"{where}: {text[:32]!r} is no number") from err
    if value < 0 or value != value:
        raise ConfigError(f"{where}: {text[:32]!r} must be 0 or more")
    return value


def _count(text: str, where: str) -> int:
    return max(1, int(_number(text, where)))


def _moment(text: str, where: str) -> float:
    """Seconds, or a time as Azure's traces have it (seven digits of a second)."""
    try:
        return float(text)
    except ValueError:
        pass
    try:
        return datetime.fromisoformat(text[:26]).timestamp()
    except ValueError as err:
        raise ConfigError(f"{where}: {text[:32]!r} is neither seconds nor a time") from err


def _ordered(found: Sequence[Asked], file: Path) -> Sequence[Asked]:
    if len(found) < 2:
        raise ConfigError(f"{file} has {len(found)} requests, a replay needs two or more")
    return sorted(found, key=lambda asked: asked.at_s)

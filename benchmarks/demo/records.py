"""The requests' own records, as the agent wrote them: read while they grow, and counted at the end."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

Record = dict[str, Any]


class Tail:
    """New whole lines of a file since the last look."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.at_bytes = 0

    def new(self) -> list[Record]:
        """Records that were finished since the last call; an unfinished last line is left for the next."""
        if not self.file.exists():
            return []
        with self.file.open("rb") as f:
            f.seek(self.at_bytes)
            data = f.read()
        whole = data[: data.rfind(b"\n") + 1]
        self.at_bytes += len(whole)
        return [json.loads(line) for line in whole.splitlines()]


def line_of(record: Record) -> str | None:
    """The line that the demo shows for a switch, a hand-over or a loss; None for other records."""
    kind = record.get("event")
    if kind == "switch":
        return f"switch: {record['source']} -> {record['target']}"
    if kind == "handoff":
        return f"handoff: {record['source']} -> {record['target']} at token {record['index']}"
    if kind == "cloud_lost":
        return f"cloud lost at token {record['index']}, {record['target']} continued"
    return None


def read(file: Path) -> list[Record]:
    """All records of a finished run."""
    return Tail(file).new()


def lines(records: list[Record]) -> Iterator[str]:
    """What the demo must have shown, rebuilt from the records alone."""
    for record in records:
        line = line_of(record)
        if line is not None:
            yield line


def played(records: list[Record]) -> list[Record]:
    """The records of the scenes: those after `demo_begin`, when the link had been learnt."""
    begin = next((i for i, r in enumerate(records) if r.get("event") == "demo_begin"), -1)
    return records[begin + 1 :]


def metric_growth(records: list[Record], names: Sequence[str]) -> dict[str, float]:
    """How much each metric grew between the two snapshots in the records."""
    texts = {str(r["event"]): str(r["metrics"]) for r in records if r.get("event") in ("demo_begin", "demo_end")}
    return {n: metric_total(texts["demo_end"], n) - metric_total(texts["demo_begin"], n) for n in names}


def counts(records: list[Record]) -> Counter[str]:
    """How many switches, hand-overs and losses the records tell of."""
    return Counter(str(r.get("event")) for r in records if line_of(r) is not None)


def metric_total(text: str, name: str) -> float:
    """Sum of one metric over its labels, from Prometheus text."""
    total = 0.0
    for row in text.splitlines():
        if row.startswith(name) and row[len(name) : len(name) + 1] in ("{", " "):
            total += float(row.rsplit(" ", 1)[1])
    return total

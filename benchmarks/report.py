"""What every benchmark shares: the command line, medians with their spread, and the JSON file with the keys."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path


def arguments(description: str) -> argparse.ArgumentParser:
    """A parser with the options that all benchmarks take."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", type=Path, help="write the keys to this file")
    parser.add_argument("--quick", action="store_true", help="a short run, within 45 s")
    return parser


def spread(values: Sequence[float]) -> str:
    """`median (min..max)` of a series."""
    return f"{statistics.median(values):.4g} ({min(values):.4g}..{max(values):.4g})"


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` (0..1) of the series lies, nearest rank."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, round(share * (len(ordered) - 1)))]


def publish(name: str, keys: Mapping[str, object], file: Path | None, notes: Sequence[str] = ()) -> None:
    """Print the keys, then write them with the machine's facts to `file`, if one is given."""
    print(f"\n{name}")
    for key, value in keys.items():
        print(f"  {key:32} {value:.5g}" if isinstance(value, float) else f"  {key:32} {value}")
    for note in notes:
        print(f"  note: {note}")
    if file is None:
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    machine = {"cpus": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version()}
    file.write_text(json.dumps({**keys, "machine": machine, "notes": list(notes)}, indent=2) + "\n")

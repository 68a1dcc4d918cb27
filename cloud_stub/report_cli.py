"""`midstream report`: statistics over the audit of a coordinator, in the terminal, as a page and as CSV."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from cloud_stub.tenants_cli import AUDIT_FOLDER, add_state_flags, seconds, state_dir
from protocol.errors import ConfigError

PER_MILLION = 1e-6
HERE = " - this is the coordinator's record; an agent keeps its own: --folder AGENT_STATE_DIR/audit"


def report(argv: list[str]) -> int:
    """Print the headline; write report.html and report.csv where a folder is given."""
    parser = argparse.ArgumentParser(prog="midstream report", description="what requests took, and what that saved")
    parser.add_argument("--folder", type=Path, help="the audit's folder (default: STATE_DIR/audit)")
    parser.add_argument("--since", type=seconds, help="only the last 30d, 12h, 45m")
    parser.add_argument("--every", type=seconds, default=3600.0, help="length of one period in the plots (1h)")
    parser.add_argument("--usd-per-million-in", type=float, help="price of prompt tokens for the all-cloud comparison")
    parser.add_argument("--usd-per-million-out", type=float, help="price of answer tokens for it")
    parser.add_argument("--out", type=Path, help="folder for report.html and report.csv")
    add_state_flags(parser)
    return _report(parser.parse_args(argv))


def _report(options: argparse.Namespace) -> int:
    from gateway.audit import records
    from gateway.report import Prices, summarise
    from gateway.report_page import as_csv, page, shadow_csv, text

    given = options.usd_per_million_in, options.usd_per_million_out
    prices = Prices(*(None if price is None else price * PER_MILLION for price in given))
    after_s = time.time() - options.since if options.since else 0.0
    folder = options.folder or state_dir(options) / AUDIT_FOLDER
    found = summarise((row for row in records(folder) if float(row["at_s"]) >= after_s), max(1.0, options.every))
    if not found.requests:
        print(f"no request is recorded in {folder}{HERE}", file=sys.stderr)
    if options.json:
        print(json.dumps(found.headline(prices)))
    else:
        print("\n".join(text(found, prices)))
    if options.out is not None:
        _write(options.out / "report.html", page(found, prices))
        _write(options.out / "report.csv", as_csv(found))
        print(f"written: {options.out / 'report.html'}, {options.out / 'report.csv'}")
        if found.shadow.total.requests:
            _write(options.out / "shadow.csv", shadow_csv(found))
            print(f"written: {options.out / 'shadow.csv'}")
    return 0


def _write(file: Path, content: str) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content, encoding="utf-8")
    except OSError as err:
        raise ConfigError(
            f"cannot write {file}: {err.strerror}", next_step="name another folder", field="--out"
        ) from err

"""`midstream tails export DIR`: this coordinator's tails for another inference server."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from cloud_stub.config import load_config, local_environment
from cloud_stub.tails_export import Exported, export_repository
from engines.registry import engine_class
from protocol.errors import NotFound
from split_models.bundle_files import MANIFEST


def tails(argv: list[str]) -> int:
    """Export the bundles of this machine's coordinator as a model repository."""
    parser = argparse.ArgumentParser(prog="midstream tails", description="tails for other inference servers")
    verbs = parser.add_subparsers(dest="verb", required=True)
    export = verbs.add_parser("export", help="write a Triton-style model repository")
    export.add_argument("dir", type=Path, help="the repository's folder; other models in it are left alone")
    export.add_argument("--model", action="append", default=[], help="only this model (repeatable)")
    export.add_argument("--config", type=Path, help="the coordinator's configuration file")
    export.add_argument("--state-dir", type=Path, help="the coordinator's state folder")
    export.add_argument("--json", action="store_true")
    return _export(parser.parse_args(argv))


def _export(options: argparse.Namespace) -> int:
    flags = {"config": options.config, "state_dir": str(options.state_dir) if options.state_dir else None}
    root = load_config(flags, local_environment()).state_dir / "bundles"
    folders = _folders(root, options.model)
    done = export_repository(folders, options.dir, engine_class("onnx")(), lambda text: print(text, file=sys.stderr))
    if options.json:
        print(json.dumps({"dir": str(options.dir), "models": [{"name": e.name, "new": e.new} for e in done]}))
    else:
        print("\n".join(_lines(options.dir, done)))
    return 0


def _folders(root: Path, wanted: Sequence[str]) -> Sequence[Path]:
    """Bundle folders by model name. Raises NotFound naming what there is."""
    found = {p.name: p for p in sorted(root.glob("[!.]*")) if (p / MANIFEST).is_file()} if root.is_dir() else {}
    if not found:
        raise NotFound(
            f"no bundle in {root}",
            next_step="let `midstream coordinator` cut its models once, or name its state folder with --state-dir",
        )
    missing = [name for name in wanted if name not in found]
    if missing:
        raise NotFound(f"no bundle of {missing[0]!r}", next_step="bundles: " + ", ".join(found), field="--model")
    return [found[name] for name in wanted or found]


def _lines(place: Path, done: Sequence[Exported]) -> list[str]:
    new = sum(one.new for one in done)
    return [
        *(f"{'new ' if one.new else 'kept'}  {one.name}" for one in done),
        f"{len(done)} models in {place}, {new} of them new",
        f"start a server on it, for example: tritonserver --model-repository={place}",
        "then tell the coordinator: midstream coordinator --tails-url http://HOST:8000",
    ]

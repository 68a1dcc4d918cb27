"""`midstream models pull|add|analyse|list|rm|verify`: the model store from the command line."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agent.cli.analysis import analysis_of, conditions_of, fixed_shapes
from agent.cli.analysis_table import document, table
from agent.cli.progress import ProgressBar
from agent.config import AgentConfig, load
from engines.catalogue import load_catalogue
from engines.store import ModelStore
from protocol.errors import ConfigError, MidstreamError
from split_models.recipes import RECIPES

MIB = 1 << 20
MAX_TEMPLATE_BYTES = 1 << 20


def models(argv: list[str]) -> int:
    """One sub-command, `list` without one. Exit code 1 when a model fails verification or a pull fails."""
    options = _parser().parse_args(argv or ["list"])
    config = load({"models_dir": options.models_dir})
    run: Callable[[ModelStore, argparse.Namespace], int] = options.run
    return run(open_store(config), options)


def open_store(config: AgentConfig) -> ModelStore:
    """The store of this configuration: shipped catalogue, with the user's `catalogue.toml` over it."""
    return ModelStore(config.models_dir, load_catalogue(config.models_dir / "catalogue.toml"))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="midstream models", description="the model store of this machine")
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--models-dir", help="folder of the store (default: MIDSTREAM_MODELS or the user's cache)")
    shared.add_argument("--json", action="store_true", help="machine-readable output")
    verbs = parser.add_subparsers(required=True, metavar="pull|add|analyse|list|rm|verify")
    pull = verbs.add_parser("pull", help="bring models of the catalogue here", parents=[shared])
    pull.add_argument("names", nargs="+")
    pull.set_defaults(run=_pull)
    looked = _analysis_options()
    add = verbs.add_parser("add", help="copy a model file of yours into the store", parents=[shared, looked])
    add.add_argument("file", type=Path)
    add.add_argument("--name")
    add.add_argument("--recipe", help=f"pre- and post-processing for encoded images: {' or '.join(RECIPES)}")
    add.add_argument("--chat-template", type=Path, help="file with a Jinja chat template, for GGUF files without one")
    add.add_argument("--no-analyse", action="store_true", help="only copy it, do not look for cuts")
    add.set_defaults(run=_add)
    analyse = verbs.add_parser("analyse", help="where a model can be cut", parents=[shared, looked])
    analyse.add_argument("name", help="a model that is here")
    analyse.set_defaults(run=_analyse)
    verbs.add_parser("list", help="what the catalogue knows and what is here", parents=[shared]).set_defaults(run=_list)
    rm = verbs.add_parser("rm", help="delete models from this machine", parents=[shared])
    rm.add_argument("names", nargs="+")
    rm.set_defaults(run=_rm)
    verify = verbs.add_parser("verify", help="compare files with their checksums", parents=[shared])
    verify.add_argument("names", nargs="*", help="default: every model that is here")
    verify.set_defaults(run=_verify)
    return parser


def _analysis_options() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(add_help=False)
    options.add_argument(
        "--input-shape", action="append", default=[], metavar="NAME=1x3x224x224", help="fix an input; may be repeated"
    )
    options.add_argument("--sample", type=Path, help="a .npz (by input name) or .npy file with one sample input")
    options.add_argument("--uplink-mbit", type=float, default=10.0, help="rank cuts for this way up (default 10)")
    options.add_argument("--rtt-ms", type=float, default=20.0, help="and this round trip (default 20)")
    options.add_argument("--server-speed", type=float, default=4.0, help="and a server so many times as fast (4)")
    options.add_argument("--no-measure", action="store_true", help="guess milliseconds, run nothing")
    options.add_argument("--all", action="store_true", help="list every cut")
    return options


def _pull(store: ModelStore, options: argparse.Namespace) -> int:
    pulled = []
    for name in options.names:
        with ProgressBar(f"pull {name}") as bar:
            path = store.pull(name, bar.update)
        pulled.append({"name": name, "path": str(path)})
        if not options.json:
            print(f"{name}: {path}")
    if options.json:
        print(json.dumps(pulled))
    return 0


def _add(store: ModelStore, options: argparse.Namespace) -> int:
    if options.recipe is not None and options.recipe not in RECIPES:
        raise ConfigError(
            f"there is no recipe {options.recipe!r}", next_step=f"one of {', '.join(RECIPES)}", field="recipe"
        )
    conditions_of(options)  # wrong ones are refused before anything is copied
    template = _read_template(options.chat_template) if options.chat_template else None
    with ProgressBar(f"add {options.file.name}") as bar:
        entry = store.add(
            options.file,
            name=options.name,
            recipe=options.recipe,
            chat_template=template,
            input_shapes=fixed_shapes(options.file, options.input_shape, options.sample),
            progress=bar.update,
        )
    analysis = None if options.no_analyse else analysis_of(store.path(entry.name), entry, options)
    if options.json:
        found = {"analysis": document(analysis)} if analysis is not None else {}
        print(json.dumps({"name": entry.name, "sha256": entry.sha256, **found}))
        return 0
    print(f"added {entry.name}")
    for line in table(analysis, options.all) if analysis is not None else ():
        print(line)
    return 0


def _analyse(store: ModelStore, options: argparse.Namespace) -> int:
    entry = store.entry(options.name)
    analysis = analysis_of(store.path(entry.name), entry, options)
    if analysis is None:
        raise ConfigError(
            f"{entry.name} is {entry.format}, which is not cut", next_step="ONNX and TFLite models are", field="name"
        )
    if options.json:
        print(json.dumps(document(analysis)))
    else:
        print("\n".join(table(analysis, options.all)))
    return 0 if not analysis.why_none else 1


def _read_template(path: Path) -> str:
    try:
        if path.stat().st_size > MAX_TEMPLATE_BYTES:
            raise ConfigError(f"{path} is larger than {MAX_TEMPLATE_BYTES >> 10} KiB", next_step="name a template file")
        return path.read_text(encoding="utf-8")
    except OSError as err:
        raise ConfigError(f"cannot read {path}: {err.strerror}", next_step="check the path") from err
    except UnicodeDecodeError as err:
        raise ConfigError(f"{path} is not text in UTF-8", next_step="name a file with a Jinja chat template") from err


def _list(store: ModelStore, options: argparse.Namespace) -> int:
    rows: list[dict[str, Any]] = [
        {
            "name": stored.entry.name,
            "format": stored.entry.format,
            "size_bytes": stored.entry.size_bytes,
            "here": stored.path is not None,
            "licence": stored.entry.licence,
            "description": stored.entry.description,
        }
        for stored in store.list()
    ]
    if options.json:
        print(json.dumps(rows))
        return 0
    width = max((len(row["name"]) for row in rows), default=4)
    for row in rows:
        mark = "here" if row["here"] else "-"
        size = f"{row['size_bytes'] / MIB:8.1f} MiB"
        print(f"{row['name']:<{width}}  {mark:<4}  {row['format']:<6} {size}  {row['description']}")
    return 0


def _rm(store: ModelStore, options: argparse.Namespace) -> int:
    for name in options.names:
        store.remove(name)
        if not options.json:
            print(f"removed {name}")
    if options.json:
        print(json.dumps({"removed": options.names}))
    return 0


def _verify(store: ModelStore, options: argparse.Namespace) -> int:
    names = options.names or [stored.entry.name for stored in store.list() if stored.path is not None]
    results: dict[str, str] = {}
    for name in names:
        try:
            store.verify(name)
            results[name] = "ok"
        except MidstreamError as err:
            results[name] = str(err)
        if not options.json:
            print(f"{name}: {results[name]}")
    if options.json:
        print(json.dumps(results))
    return 0 if all(result == "ok" for result in results.values()) else 1

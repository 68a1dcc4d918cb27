"""How long it takes from a model file to its ranked cuts: `python -m benchmarks.planner --json F [--quick]`.

DenseNet-121 comes from the onnx package's light models: 1,746 operators, weights made by ConstantOfShape. Each run is a
process of its own, so nothing is cached; `analyse_s` includes the import of onnx, onnxruntime and numpy. Minimum cuts,
which only bundles wait for, are timed apart, on graphs of the same package.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.report import arguments, publish, spread
from protocol.extras import install_step

MODEL = "light_densenet121.onnx"
OTHERS = ("light_inception_v2.onnx", "light_resnet50.onnx", "light_shufflenet.onnx")
RUNS, QUICK_RUNS = 9, 3


def light_models() -> Path:
    """The folder of the onnx package's light models; the package is not imported."""
    found = find_spec("onnx")
    if found is None or found.origin is None:
        raise SystemExit(f"the onnx package is not installed: {install_step('coordinator')}")
    return Path(found.origin).parent / "backend" / "test" / "data" / "light"


def child(file: Path, cuts_too: bool) -> Mapping[str, Any]:
    """Runs in a process of its own: seconds of the steps, operators and cuts."""
    started = time.perf_counter()
    import onnx
    import onnxruntime  # noqa: F401 - part of what a fresh process pays

    from split_models.analyse_file import Asked, analyse_file

    imported = time.perf_counter()
    found = analyse_file(file, "onnx", Asked(measure=False))
    done = time.perf_counter()
    result: dict[str, Any] = {
        "analyse_s": done - started,
        "without_imports_s": done - imported,
        "file_operators": len(onnx.load(str(file)).graph.node),
        "operators": found.operators,
        "cuts": len(found.cuts),
        "single_cuts": found.single_cuts,
    }
    return {**result, **_steps(file), **(_minimum_cuts(file) if cuts_too else {})}


def _steps(file: Path) -> Mapping[str, float]:
    """Where the time goes: reading, onnxruntime's folding, shape inference, everything after."""
    from split_models import onnx_files, onnx_session
    from split_models.analysis import Conditions, analyse

    marks = [time.perf_counter()]
    model = onnx_files.load_model(file)
    marks.append(time.perf_counter())
    basic = onnx_session.at_basic_level(model, file.name)
    marks.append(time.perf_counter())
    shaped = onnx_files.with_shapes(basic)
    marks.append(time.perf_counter())
    graph = onnx_files.graph_of(shaped)
    analyse(file.stem, "onnx", graph, Conditions())
    marks.append(time.perf_counter())
    names = ("read_s", "fold_s", "shapes_s", "graph_and_cuts_s")
    return {name: end - begin for name, begin, end in zip(names, marks, marks[1:], strict=False)}


def _minimum_cuts(file: Path) -> Mapping[str, Any]:
    """Seconds of one sharing, the median and the worst of the grid that a bundle walks."""
    from split_models.candidates import candidates, grid
    from split_models.min_cut import min_cut
    from split_models.prepare_onnx import prepare

    graph = prepare(file, {}).graph
    seconds = []
    for costs in grid(graph):
        started = time.perf_counter()
        min_cut(graph, costs)
        seconds.append(time.perf_counter() - started)
    extra = sum(cut.id.startswith("d") for cut in candidates(graph))
    return {"min_cut_median_s": statistics.median(seconds), "min_cut_worst_s": max(seconds), "only_by_min_cut": extra}


def in_a_fresh_process(file: Path, cuts_too: bool = False) -> dict[str, Any]:
    """`child` in a new interpreter."""
    command = [sys.executable, "-m", "benchmarks.planner", "--child", str(file), *(["--cuts"] if cuts_too else [])]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    if done.returncode != 0:
        raise SystemExit(f"{file.name}: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def measured(runs: int) -> tuple[dict[str, object], Sequence[str]]:
    """The keys and what to say about them."""
    folder = light_models()
    found = [in_a_fresh_process(folder / MODEL, cuts_too=number == 0) for number in range(runs)]
    seconds = [one["analyse_s"] for one in found]
    keys: dict[str, object] = {"analyse_s": statistics.median(seconds), "analyse_worst_s": max(seconds)}
    for name in ("without_imports_s", "read_s", "fold_s", "shapes_s", "graph_and_cuts_s"):
        keys[name] = statistics.median(one[name] for one in found)
    for name in ("file_operators", "operators", "cuts", "single_cuts", "min_cut_median_s", "min_cut_worst_s"):
        keys[name] = found[0][name]
    notes = [f"analyse_s in {runs} fresh processes: {spread(seconds)}"]
    for other in OTHERS:
        one = in_a_fresh_process(folder / other, cuts_too=True)
        notes.append(
            f"{other}: {one['analyse_s']:.2f} s, {one['operators']} operators, {one['cuts']} cuts,"
            f" minimum cut {one['min_cut_median_s']:.3f} s, {one['only_by_min_cut']} cuts that only it finds"
        )
    return keys, notes


def main() -> int:
    """Measure and publish, or be the fresh process."""
    parser = arguments("from a model file to its ranked cuts")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--cuts", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        print(json.dumps(child(options.child, options.cuts)))
        return 0
    keys, notes = measured(QUICK_RUNS if options.quick else RUNS)
    publish("planner", keys, options.json, notes)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Rules about the repository itself: folders, packages, cheap imports, public case map."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOMS = (
    "agent", "cloud_stub", "engines", "gateway", "links", "midstream_sdk", "netprobe", "profiles", "protocol",
    "split_models",
)  # fmt: skip
HEAVY = (
    "aiortc",
    "av",
    "numpy",
    "onnx",
    "onnxruntime",
    "xllamacpp",
    "llama_cpp",
    "ai_edge_litert",
    "tflite_runtime",
    "PIL",
    "psutil",
    "zeroconf",
    "cryptography",
    "amqtt",
    "redis",
    "asyncpg",
)
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60
UNITLESS = {"timeout", "delay", "size", "bandwidth", "duration", "interval"}


def _sources() -> list[Path]:
    return sorted(f for room in ROOMS for f in (ROOT / room).rglob("*.py"))


def _modules() -> list[str]:
    names = []
    for file in _sources():
        parts = file.relative_to(ROOT).with_suffix("").parts
        names.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return names


def test_whoever_is_told_to_install_an_extra_can_paste_the_command() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    known = set(project["optional-dependencies"])
    wrong = []
    for file in _sources():
        text = file.read_text(encoding="utf-8")
        named = re.findall(r"install_step\([\"']([^\"']+)", text)
        wrong += [f"{file.relative_to(ROOT)}: {names}" for names in named if not set(names.split(",")) <= known]
        # No index has midstream: only protocol/extras.py knows where it came from.
        wrong += [f"{file.relative_to(ROOT)}: {found}" for found in re.findall(r"midstream\[.*", text)]
    assert wrong == []


def test_every_test_folder_is_a_package() -> None:
    missing = [
        d
        for d in (ROOT / "tests").rglob("*")
        if d.is_dir() and list(d.glob("*.py")) and not (d / "__init__.py").exists()
    ]
    assert missing == []


def test_modules_import_alone_and_without_heavy_libraries() -> None:
    """One fresh interpreter per room; none of the heavy libraries may be loaded by an import."""
    script = (
        "import importlib, sys\n"
        "for name in sys.argv[1].split(','):\n"
        "    importlib.import_module(name)\n"
        f"print([h for h in {HEAVY!r} if h in sys.modules])\n"
    )
    for room in ROOMS:
        names = ",".join(n for n in _modules() if n == room or n.startswith(room + "."))
        done = subprocess.run(
            [sys.executable, "-c", script, names], capture_output=True, text=True, cwd=ROOT, check=False
        )
        assert done.returncode == 0, f"{room}: {done.stderr[-2000:]}"
        assert done.stdout.strip() == "[]", f"importing {room} loads {done.stdout.strip()}"


@pytest.mark.parametrize("file", _sources(), ids=lambda f: str(f.relative_to(ROOT)))
def test_files_and_functions_stay_short(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    assert text.count("\n") <= MAX_FILE_LINES
    tree = ast.parse(text)
    assert ast.get_docstring(tree), "a module says what it is for"
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            assert lines <= MAX_FUNCTION_LINES, f"{node.name} has {lines} lines"
            names = [a.arg for a in (*node.args.args, *node.args.kwonlyargs, *node.args.posonlyargs)]
            assert not UNITLESS & set(names), f"{node.name}: give {sorted(UNITLESS & set(names))} a unit"


def test_readme_shows_the_two_commands() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "make demo" in readme
    assert "make test" in readme
    assert "@@" not in readme, "a place that was to be filled"


def test_every_benchmark_that_the_makefile_names_is_there() -> None:
    text = (ROOT / "Makefile").read_text(encoding="utf-8").replace("\\\n", " ")
    named = re.findall(r"benchmarks\.(\w+)", text) + re.findall(r"for b in ([\w\s]+);", text)[0].split()
    assert len(named) >= 4
    missing = [n for n in named if not any((ROOT / "benchmarks" / f).exists() for f in (f"{n}.py", f"{n}/__main__.py"))]
    assert missing == []


def test_architecture_lists_every_file() -> None:
    """docs/architecture.md has one line per source file, and none for a file that is gone."""
    listed = set(
        re.findall(r"^- `([\w/]+\.py)`", (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8"), re.M)
    )
    there = {str(f.relative_to(ROOT)) for f in _sources() if f.name != "__init__.py"}
    assert there - listed == set()
    assert listed - there == set()


def test_every_public_case_names_a_test_that_exists() -> None:
    """tests/cases.toml maps public bug reports to tests; each test is really there and says what breaks it."""
    cases = tomllib.loads((ROOT / "tests" / "cases.toml").read_text(encoding="utf-8"))["case"]
    assert len(cases) >= 40
    for case in cases:
        assert case["source"] and case["breaks"], case["id"]
        path, _, name = case["test"].partition("::")
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        names = {n.name for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))}
        assert name.split("::")[-1].split("[")[0] in names, f"{case['id']}: {case['test']} does not exist"

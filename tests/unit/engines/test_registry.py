"""Engines that are installed, and imports that may kill a process."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from engines.registry import (
    ENGINES,
    ImportGuard,
    engine_class,
    import_native,
    installed_engines,
    probe_import,
    repair_step,
    use_guard,
)
from protocol.errors import ConfigError, EngineError


def fake_library(folder: Path, body: str, name: str = "nativelib") -> dict[str, str]:
    """An environment in which `import nativelib` does `body`."""
    (folder / f"{name}.py").write_text(body)
    return {**os.environ, "PYTHONPATH": str(folder)}


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGILL)", "instructions that this CPU does not have"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "keep /proc/cpuinfo, /bin and /usr/bin visible"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "SIGKILL"),
        ("raise ImportError('libfoo.so.1: cannot open')", "libfoo.so.1"),
        ("import time; time.sleep(60)", "did not finish importing within 0.5 s"),
    ],
)
def test_a_library_that_dies_at_import_becomes_a_sentence(tmp_path: Path, body: str, said: str) -> None:
    timeout_s = 0.5 if "sleep" in body else 20.0
    probe = probe_import("nativelib", version="1.21.0", environment=fake_library(tmp_path, body), timeout_s=timeout_s)
    assert not probe.works
    assert said in probe.problem
    assert "nativelib 1.21.0" in probe.problem


def test_a_library_that_imports_works(tmp_path: Path) -> None:
    assert probe_import("nativelib", environment=fake_library(tmp_path, "x = 1")).works


def test_an_interpreter_that_is_not_there_is_a_sentence() -> None:
    assert "could not be tried" in probe_import("json", python=("/nonexistent/python",)).problem


def test_a_success_is_remembered_per_version_and_cpu_and_a_failure_is_not(tmp_path: Path) -> None:
    file = tmp_path / "probes.json"
    assert ImportGuard(file, cpu="a").check("json", "1").works
    assert not ImportGuard(file, cpu="a").check("no_such_module_here", "1").works
    assert list(json.loads(file.read_text())["probes"]) == ["json 1 a"]
    # A guard that cannot start children knows only what it was told.
    known = ImportGuard(file, cpu="a", timeout_s=0.0)
    assert known.check("json", "1").works
    assert not known.check("json", "2").works
    assert not ImportGuard(file, cpu="b", timeout_s=0.0).check("json", "1").works


def test_garbage_in_the_cache_is_probed_again(tmp_path: Path) -> None:
    file = tmp_path / "probes.json"
    file.write_bytes(b"\xff garbage")
    assert ImportGuard(file, cpu="a").check("json", "1").works
    assert "json 1 a" in file.read_text()


def test_import_native_names_what_to_install_and_never_imports_a_killer() -> None:
    use_guard(ImportGuard())
    with pytest.raises(EngineError, match=r"\[x\]"):
        import_native("no_such_module_here", extra="x")


def test_engines_are_known_without_importing_them() -> None:
    code = (
        "import sys; from engines.registry import installed_engines; found = installed_engines();"
        "names = ('onnxruntime', 'ai_edge_litert', 'xllamacpp', 'llama_cpp', 'numpy');"
        "loaded = [m for m in names if m in sys.modules];"
        "print(sorted(found)); assert not loaded, loaded"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = installed_engines()
    assert found["onnx"] == importlib.metadata.version("onnxruntime")
    assert set(found) <= set(ENGINES)


def test_an_adapter_is_found_by_name_and_unknown_names_are_listed() -> None:
    assert engine_class("onnx").__name__ == "OnnxRuntime"
    with pytest.raises(ConfigError, match="onnx"):
        engine_class("tensorrt")


@pytest.mark.parametrize("name", ["onnx", "tflite"])
def test_every_tensor_adapter_names_a_class(name: str) -> None:
    runtime = engine_class(name)()
    assert runtime.name == name
    assert runtime.version == installed_engines()[name]


@pytest.mark.parametrize(
    ("problem", "step"),
    [
        ("ImportError: libgomp.so.1: cannot open shared object file: No such file", "apt-get install libgomp1"),
        ("libodd-2.so.7: cannot open shared object file", "install the system's package that has libodd-2.so.7"),
        ("xllamacpp cannot be imported: No module named 'xllamacpp'", "other"),
    ],
)
def test_a_library_that_the_system_lacks_is_named_with_its_package(problem: str, step: str) -> None:
    assert repair_step(problem, "other") == step

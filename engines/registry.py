"""Which engines there are, which are installed, and the first, guarded import of their native libraries.

A wheel built for another CPU kills the process with a signal at import (onnxruntime 1.21.0 on a Raspberry Pi 4:
microsoft/onnxruntime#24112), so the first import of each version happens in a child process that may die.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import os
import platform
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import field, frozen

from protocol.decode import decode, encode
from protocol.durable import read_durable, write_durable
from protocol.errors import ConfigError, EngineError
from protocol.extras import install_step

PROBE_TIMEOUT_S = 60.0
"""A cold import of the largest wheel from an SD card took under 20 s; past this the import hangs."""

SYSTEM_LIBRARIES = {"libgomp.so.1": "libgomp1", "libstdc++.so.6": "libstdc++6"}
"""Debian's packages of the libraries that wheels expect of the system."""

MAX_PROBES = 64
"""Remembered results: a few libraries in a few versions."""


@frozen
class Engine:
    """One adapter: where its class is, and what must be installed (any one of `distributions`)."""

    target: str
    distributions: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    extra: str = ""


ENGINES: Mapping[str, Engine] = {
    "onnx": Engine("engines.onnx:OnnxRuntime", ("onnxruntime",), ("onnxruntime",), "onnx"),
    "tflite": Engine(
        "engines.tflite:TfliteRuntime",
        ("ai-edge-litert", "tflite-runtime"),
        ("ai_edge_litert.interpreter", "tflite_runtime.interpreter"),
        "tflite",
    ),
    "llama_server": Engine("engines.llama_server:LlamaServerEngine", ("xllamacpp",), ("xllamacpp",), "llama"),
    "llama_cpp": Engine("engines.llama_cpp:LlamaCppEngine", ("llama-cpp-python",), ("llama_cpp",), "llama-native"),
    "onnx_genai": Engine(
        "engines.onnx_genai:OnnxGenaiEngine", ("onnxruntime-genai",), ("onnxruntime_genai",), "onnx-genai"
    ),
    "llama_server_url": Engine("engines.llama_server:LlamaServerUrlEngine"),
    "openai_compat": Engine("engines.upstream:UpstreamEngine"),
}


def installed_engines() -> dict[str, str]:
    """Version of the library behind each native engine that is installed; nothing is imported."""
    found: dict[str, str] = {}
    for name, engine in ENGINES.items():
        for distribution in engine.distributions:
            version = _version(distribution)
            if version is not None:
                found[name] = version
                break
    return found


def engine_class(name: str) -> type[Any]:
    """The adapter class of an engine. Raises ConfigError for an unknown name; imports the adapter only."""
    engine = ENGINES.get(name)
    if engine is None:
        raise ConfigError(f"there is no engine {name[:64]!r}", next_step=f"choose one of {', '.join(ENGINES)}")
    module, _, attribute = engine.target.partition(":")
    found: type[Any] = getattr(importlib.import_module(module), attribute)
    return found


@frozen
class Probe:
    """Result of one guarded import; `problem` is a sentence, empty when the import works."""

    problem: str = ""

    @property
    def works(self) -> bool:
        return not self.problem


@frozen
class _Remembered:
    probes: Mapping[str, str] = field(factory=dict)


def probe_import(
    module: str,
    *,
    version: str = "",
    python: Sequence[str] = (sys.executable,),
    timeout_s: float = PROBE_TIMEOUT_S,
    environment: Mapping[str, str] | None = None,
) -> Probe:
    """Import `module` in a child process and say in words how that went. Never raises for a failing library."""
    command = [*python, "-c", f"import importlib; importlib.import_module({module!r})"]
    label = f"{module.split('.')[0]} {version}".strip()
    try:
        done = subprocess.run(
            command,
            timeout=timeout_s,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=dict(environment) if environment is not None else None,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Probe(f"{label} did not finish importing within {timeout_s:g} s")
    except OSError as err:
        return Probe(f"{label} could not be tried: {err.strerror}")
    if done.returncode == 0:
        return Probe()
    if done.returncode < 0:
        return Probe(_signal_sentence(label, -done.returncode))
    lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
    return Probe(f"{label} cannot be imported: {lines[-1][:300] if lines else 'no message'}")


def _signal_sentence(label: str, number: int) -> str:
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    if name == "SIGILL":
        return (
            f"{label} uses instructions that this CPU does not have (SIGILL at import); install another version "
            "(onnxruntime 1.21.0 is known to do this on a Raspberry Pi 4)"
        )
    if name in ("SIGSEGV", "SIGBUS", "SIGABRT"):
        return (
            f"{label} crashes at import ({name}); in a sandbox, keep /proc/cpuinfo, /bin and /usr/bin visible, "
            "otherwise install another version"
        )
    return f"{label} was killed at import by {name}"


class ImportGuard:
    """Probes each (module, version, CPU) once and remembers the result in `file`, if one is given.

    Failures are not remembered on disk: what made the import fail may be repaired without a new version.
    """

    def __init__(self, file: Path | None = None, *, cpu: str | None = None, timeout_s: float = PROBE_TIMEOUT_S) -> None:
        self._file = file
        self._cpu = cpu
        self._timeout_s = timeout_s
        self._known: dict[str, Probe] = {}

    def check(self, module: str, version: str) -> Probe:
        """The remembered result, or that of a new guarded import."""
        if self._cpu is None:
            self._cpu = cpu_identity()
        key = f"{module} {version} {self._cpu}"
        if key not in self._known:
            if key in self._remembered():
                self._known[key] = Probe()
            else:
                self._known[key] = probe_import(module, version=version, timeout_s=self._timeout_s)
                if self._known[key].works:
                    self._remember(key)
        return self._known[key]

    def _remembered(self) -> dict[str, str]:
        if self._file is None:
            return {}
        found = read_durable(self._file, lambda data: decode(_Remembered, data, what="engine probes"))
        return dict(found.probes) if found is not None else {}

    def _remember(self, key: str) -> None:
        if self._file is None:
            return
        probes = {**self._remembered(), key: "works"}
        kept = dict(list(probes.items())[-MAX_PROBES:])
        write_durable(self._file, encode(_Remembered(kept)))


class Unguarded(ImportGuard):
    """For an agent that is a guest: no child process may be started, so libraries are imported without a trial."""

    def check(self, module: str, version: str) -> Probe:
        """Nothing is known against it."""
        return Probe()


_guard = ImportGuard()


def use_guard(guard: ImportGuard) -> None:
    """Set the process-wide guard; compositions call this once at start with a file in the cache folder."""
    global _guard
    _guard = guard


def import_native(module: str, *, extra: str) -> Any:
    """Import a native library, in a child process first unless it is already here. extra: of midstream, that brings it.

    Raises EngineError with the way to install it when it is absent, or with the reason when it would crash.
    """
    if module in sys.modules:
        return sys.modules[module]
    distribution = next((e for e in ENGINES.values() if module in e.modules), None)
    versions = [_version(d) for d in distribution.distributions] if distribution is not None else []
    version = next((v for v in versions if v), "")
    if sys.platform != "android":  # Python has no child processes there
        probe = _guard.check(module, version)
        if not probe.works:
            step = repair_step(probe.problem, f"{install_step(extra, again=True)}, or use another engine")
            raise EngineError(probe.problem, next_step=step)
    try:
        return importlib.import_module(module)
    except ImportError as err:
        problem = f"{module.split('.')[0]} cannot be imported: {err}"
        raise EngineError(problem, next_step=repair_step(problem, install_step(extra))) from err


def repair_step(problem: str, otherwise: str) -> str:
    """What helps: a wheel may want a library of the system that a small system does not have."""
    found = re.search(r"(lib[\w.+-]+\.so[\w.]*): cannot open shared object file", problem)
    if found is None:
        return otherwise
    package = SYSTEM_LIBRARIES.get(found.group(1))
    return f"apt-get install {package}" if package else f"install the system's package that has {found.group(1)}"


def cpu_identity() -> str:
    """Hash of what decides whether native code runs: architecture and the CPU's model and feature lines."""
    wanted = ("model name", "flags", "features", "cpu part", "cpu implementer", "cpu variant")
    lines: set[str] = set()
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        lines = {line for line in text.splitlines() if line.split(":")[0].strip().lower() in wanted}
    except OSError:
        lines = {platform.processor()}
    seed = "\n".join([platform.machine(), *sorted(lines), os.name])
    return hashlib.sha256(seed.encode()).hexdigest()[:16]


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None

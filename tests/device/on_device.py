"""What a device must be able to do, with the wheels it was given: one JSON line per step, exit 1 when one failed.

Usage: python on_device.py BUNDLE_FOLDER FAR_URL MODELS_FOLDER. Needs nothing but the installed distribution, and no
child processes: under user-mode emulation a child would be a program of the host.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

IMPORTS = (
    "aiohttp", "attrs", "paho.mqtt.client", "cryptography.hazmat.bindings._rust", "psutil", "zeroconf", "numpy",
    "PIL.Image", "onnxruntime", "ai_edge_litert.interpreter", "xllamacpp", "backports.zstd",
)  # fmt: skip
ROOMS = ("agent.house", "engines.local", "links.mqtt", "links.http_server", "split_models.runner", "gateway.pipeline")
PROMPT = "Name three colours."
ANSWER_TOKENS = 8


def imports() -> dict[str, Any]:
    """Version of every library, and our own modules."""
    found = {}
    for name in IMPORTS:
        module = importlib.import_module(name)
        parent = importlib.import_module(name.partition(".")[0])
        found[name] = str(getattr(module, "__version__", getattr(parent, "__version__", "")))
    for name in ROOMS:
        importlib.import_module(name)
    return {"libraries": found, "rooms": len(ROOMS)}


def facts() -> dict[str, Any]:
    """What the device says it is."""
    from profiles.facts import collect

    found = collect()
    return {
        "model": found.model, "soc": found.soc, "arch": found.arch, "features": sorted(found.cpu_features),
        "temperature_c": found.temperature_c, "throttled_now": sorted(found.throttle.now) if found.throttle else None,
        "page_bytes": found.page_bytes,
    }  # fmt: skip


def benchmark(models: Path) -> dict[str, Any]:
    """The agent's own benchmark of a small model and of the memory, with a short budget."""
    from engines.catalogue import shipped_catalogue
    from engines.measure import Effort, tensor_probes
    from engines.onnx import OnnxRuntime
    from profiles.benchmark import Basis, run_benchmark
    from profiles.timing import memory_probe

    entry = shipped_catalogue()["ppocr-v2-cls"]
    probes = tensor_probes(
        OnnxRuntime(), models / entry.name / entry.filename, entry.sha256, model=entry.name,
        input_shapes=entry.input_shapes, threads=(1,), effort=Effort(runs=3, budget_s=20.0),
    )  # fmt: skip
    basis = Basis(frozenset({entry.sha256}), {}, "virtual")
    done = run_benchmark([memory_probe(), *probes], None, basis, 120.0, time.monotonic)
    if done.failed or not done.complete:
        raise RuntimeError(f"not measured: {dict(done.failed)}")
    return {f"{m.what}_ms": round(m.median_s * 1000, 1) for m in done.measured}


def cut(bundle: Path, far_url: str) -> dict[str, Any]:
    """Head here, tail over there, and the whole model here for comparison; every offered cut."""
    return asyncio.run(_cut(bundle, far_url))


async def _cut(bundle: Path, far_url: str) -> dict[str, Any]:
    import numpy as np

    from engines.arrays import to_array, to_tensor
    from engines.onnx import OnnxRuntime
    from engines.remote_oip import RemoteEndpoint
    from links.http import HttpLink
    from protocol.models import tail_name
    from split_models.bundle_files import read_bundle

    manifest, runtime = read_bundle(bundle), OnnxRuntime()
    whole = runtime.load(bundle / manifest.whole_file, 1)
    (spec,) = whole.inputs
    image = np.random.default_rng(7).standard_normal([int(n) for n in spec.shape]).astype(np.float32)
    asked = [to_tensor(spec.name, image)]
    (expected,) = (to_array(t) for t in whole.run(asked))
    link = HttpLink("cloud", far_url)
    errors = {}
    try:
        far = RemoteEndpoint(link)
        for entry in manifest.cuts:
            head = runtime.load(bundle / entry.head_file, 1)
            crossing = head.run(asked)
            name = tail_name(manifest.model, manifest.digest, entry.id, entry.codec)
            answer = await far.infer(name, crossing, 60.0)
            (found,) = (to_array(t) for t in answer.outputs)
            if entry.answer_scale:
                found = (found.astype(np.float32) - entry.answer_zero) * entry.answer_scale
            errors[f"{entry.id}:{entry.codec}"] = round(float(np.abs(found - expected).max()), 6)
    finally:
        await link.close()
    if not errors or max(e for name, e in errors.items() if name.endswith(":raw")) > 1e-3:
        raise RuntimeError(f"a raw cut answers differently: {errors}")
    return {"model": manifest.model, "largest_error_by_cut": errors}


def chat(models: Path) -> dict[str, Any]:
    """One short greedy answer by the embedded engine."""
    return asyncio.run(_chat(models))


async def _chat(models: Path) -> dict[str, Any]:
    from engines.catalogue import shipped_catalogue
    from engines.llama_server import LlamaServerEngine
    from protocol.text import Message, Sampling, TextRequest

    entry = shipped_catalogue()["smollm2-135m"]
    engine = LlamaServerEngine(
        models / entry.name / entry.filename, model=entry.name, context_tokens=256, threads=1, slots=1, in_process=True,
        chat_template=entry.chat_template,
    )  # fmt: skip
    began_s = time.monotonic()
    data, count, first_s = b"", 0, 0.0
    try:
        request = TextRequest(entry.name, [Message("user", PROMPT)], Sampling(max_tokens=ANSWER_TOKENS))
        continuation = await engine.prepare(request, 600.0)
        try:
            async for token in continuation.start(0, ANSWER_TOKENS + 1):
                continuation.acknowledge(token.index)
                first_s = first_s or time.monotonic() - began_s
                data += token.data
                count += bool(token.data)
                if token.finish is not None:
                    break
        finally:
            await continuation.close()
    finally:
        await engine.close()
    if not data.strip():
        raise RuntimeError("the answer is empty")
    took_s = time.monotonic() - began_s
    text = data.decode("utf-8", "replace")
    return {"answer": text, "tokens": count, "first_token_s": round(first_s, 1), "seconds": round(took_s, 1)}


def main(bundle: Path, far_url: str, models: Path) -> int:
    """Run all steps; a step that fails ends none of the others."""
    steps: dict[str, Callable[[], dict[str, Any]]] = {
        "imports": imports,
        "facts": facts,
        "benchmark": lambda: benchmark(models),
        "cut": lambda: cut(bundle, far_url),
        "chat": lambda: chat(models),
    }
    failed = 0
    for name, step in steps.items():
        began_s = time.monotonic()
        try:
            found: dict[str, Any] = {"ok": True, **step()}
        except Exception as err:  # noqa: BLE001 - told, and the next step is tried
            found, failed = {"ok": False, "error": f"{type(err).__name__}: {err}"}, 1
        print(json.dumps({"step": name, "took_s": round(time.monotonic() - began_s, 1), **found}), flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])))

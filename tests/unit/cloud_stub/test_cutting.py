"""Bundles are cut in child processes: failures are told, cancelling ends the child, an orphan ends itself."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from onnx import TensorProto, helper

from cloud_stub.config import CoordinatorConfig
from cloud_stub.cutting import CutJob, Cutter
from cloud_stub.tails import ServedStore, cut_jobs
from engines.catalogue import shipped_catalogue
from protocol.decode import encode
from protocol.errors import ProtocolError
from protocol.models import CatalogueEntry, Source
from split_models import images
from split_models.bundle_files import read_bundle
from tests.conftest import ROOT


def entry(name: str, **changes: object) -> CatalogueEntry:
    values: dict[str, object] = {
        "name": name, "format": "onnx", "filename": "m.onnx", "sha256": "0" * 64, "size_bytes": 1,
        "source": Source("file"), "recipe": "ppocr-cls",
    }  # fmt: skip
    return CatalogueEntry(**(values | changes))  # type: ignore[arg-type]


async def never(model: str) -> None:
    raise AssertionError(f"{model} is not ready")


async def test_a_file_that_is_no_model_is_told_and_the_next_job_runs(tmp_path: Path) -> None:
    bad = tmp_path / "bad.onnx"
    bad.write_bytes(b"not a model" * 100)
    jobs = [CutJob(entry("bad"), bad), CutJob(entry("gone"), tmp_path / "gone.onnx")]
    cutter = Cutter(tmp_path / "out", jobs, never)
    await cutter.run()
    assert cutter.state["bad"].startswith("failed: ")
    assert "models pull" in cutter.state["gone"]
    assert not (tmp_path / "out" / "bad").exists(), "nothing half-written"
    assert not list(tmp_path.glob("bundle-*"))


async def test_an_error_of_any_length_or_a_bundle_that_is_refused_ends_its_own_job_only(
    tmp_path: Path, model_file: Callable[[str], Path]
) -> None:
    """The child's words name the model's input; the limit of one line must not end the cutter."""
    wordy = tmp_path / "wordy.onnx"
    x, y = (helper.make_tensor_value_info(name * 50_000, TensorProto.FLOAT, [1, None]) for name in ("long", "y"))
    graph = helper.make_graph([helper.make_node("Relu", [x.name], [y.name])], "g", [x], [y])
    wordy.write_bytes(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]).SerializeToString())
    cls = Path(shutil.copy(model_file("ppocr-v2-cls"), tmp_path))
    bad = tmp_path / "bad.onnx"
    bad.write_bytes(b"not a model")

    async def refuse(model: str) -> None:
        raise ProtocolError(f"{model} is torn")

    jobs = [CutJob(entry("wordy"), wordy), CutJob(entry("cls"), cls), CutJob(entry("bad"), bad)]
    cutter = Cutter(tmp_path / "out", jobs, refuse, threads=1)
    await cutter.run()
    assert all(state.startswith("failed: ") and len(state) < 600 for state in cutter.state.values())
    assert "longlong" in cutter.state["wordy"]
    assert cutter.state["cls"] == "failed: cls is torn"


async def test_cancelling_ends_the_child(tmp_path: Path, model_file: Callable[[str], Path]) -> None:
    shapes = {"x": (1, 3, 480, 480)}
    file = Path(shutil.copy(model_file("ppocr-v4-det"), tmp_path))
    job = CutJob(entry("det", recipe="ppocr-det", input_shapes=shapes), file)
    cutter = Cutter(tmp_path / "out", [job], never)
    task = asyncio.create_task(cutter.run())
    async with asyncio.timeout(20):
        while not cutter.state.get("det", "").startswith("building"):
            await asyncio.sleep(0.02)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert task.cancelled()
    assert not (tmp_path / "out" / "det").exists()


async def test_an_orphan_ends_itself(tmp_path: Path, model_file: Callable[[str], Path]) -> None:
    work = {
        "entry": json.loads(encode(entry("det", recipe="ppocr-det", input_shapes={"x": (1, 3, 480, 480)}))),
        "file": str(shutil.copy(model_file("ppocr-v4-det"), tmp_path)),
        "out": str(tmp_path / "out"),
        "threads": 1,
    }
    command = [sys.executable, "-m", "cloud_stub.cutting", json.dumps(work)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT) as child:
        assert child.stdin is not None and child.stdout is not None
        assert await asyncio.to_thread(child.stdout.readline)
        child.stdin.close()
        assert await asyncio.to_thread(child.wait, 10) == 3


async def test_a_finished_bundle_is_ready_at_once_for_the_next_coordinator(
    tmp_path: Path, model_file: Callable[[str], Path]
) -> None:
    sample = tmp_path / "sample.png"
    sample.write_bytes(images.encode(images.drawn_text(["a line"], 192, 48, 20, True)))
    job = CutJob(entry("cls"), Path(shutil.copy(model_file("ppocr-v2-cls"), tmp_path)))
    ready: list[str] = []

    async def on_ready(model: str) -> None:
        ready.append(model)

    for name in ("first", "second"):
        cutter = Cutter(tmp_path / name, [job], on_ready, threads=1, samples=[sample, tmp_path / "gone.png"])
        await cutter.run()
        assert cutter.state == {"cls": "ready"}
    assert ready == ["cls", "cls"]
    first, second = (read_bundle(tmp_path / name / "cls") for name in ("first", "second"))
    assert first == second, "a second build would have measured other seconds"


async def test_a_tflite_model_without_a_recipe_is_cut_too(tmp_path: Path, model_file: Callable[[str], Path]) -> None:
    face = shipped_catalogue()["face-short-range"]
    ready: list[str] = []

    async def on_ready(model: str) -> None:
        ready.append(model)

    job = CutJob(face, Path(shutil.copy(model_file(face.name), tmp_path)))
    cutter = Cutter(tmp_path / "out", [job], on_ready, threads=1)
    await cutter.run()
    assert cutter.state == {face.name: "ready"}
    manifest = read_bundle(tmp_path / "out" / face.name)
    assert (ready, manifest.format, manifest.recipe) == ([face.name], "tflite", None)
    assert manifest.cuts


def test_which_models_are_cut(tmp_path: Path, model_file: Callable[[str], Path]) -> None:
    """By default those with a recipe; by name any whose format can be cut."""
    catalogue = shipped_catalogue()
    for name in ("ppocr-v2-cls", "face-short-range", "sample-page"):
        (tmp_path / name).mkdir()
        shutil.copy(model_file(name), tmp_path / name / catalogue[name].filename)
    store = ServedStore(tmp_path, catalogue, lambda name: True)

    def chosen(**settings: Any) -> list[str]:
        config = CoordinatorConfig(state_dir=tmp_path, models_dir=tmp_path, **settings)
        return sorted(job.entry.name for job in cut_jobs(config, store))

    assert chosen() == ["ppocr-v2-cls"]
    assert chosen(bundles=("face-short-range", "sample-page")) == ["face-short-range"]
    assert chosen(cut=False) == []

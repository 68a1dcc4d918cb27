"""The tensor side of an agent over a real store: one bad model is a warning and takes nothing else with it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import onnx

from engines.catalogue import shipped_catalogue
from engines.store import ModelStore
from tests.unit.agent.houses import RunningHouse, config_for

CLS = "ppocr-v2-cls"


def unloadable(path: Path) -> Path:
    """An ONNX file that reads well and needs an operator that no runtime has."""
    helper, kind = onnx.helper, onnx.TensorProto.FLOAT
    ports = [helper.make_tensor_value_info(name, kind, [1, 4]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Nowhere", ["x"], ["y"])], "bad", [ports[0]], [ports[1]])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    path.write_bytes(model.SerializeToString())
    return path


def two_models(folder: Path, good: Path) -> ModelStore:
    """`a-bad` and `b-good`, both with a recipe and without input shapes, as after `models add`."""
    store = ModelStore(folder / "models", shipped_catalogue())
    store.add(unloadable(folder / "bad.onnx"), name="a-bad", recipe="ppocr-cls")
    store.add(good, name="b-good", recipe="ppocr-cls")
    return store


async def test_one_unloadable_model_leaves_the_others(tmp_path: Path, model_file: Callable[[str], Path]) -> None:
    store = await asyncio.to_thread(two_models, tmp_path, model_file(CLS))
    async with RunningHouse(config_for(tmp_path, models_dir=str(tmp_path / "models"))) as agent:
        tensors = agent.house.tensors
        async with asyncio.timeout(20):
            await tensors.heads_ready(expected=False)
        _, body = await agent.get("/v2/models")
        assert [model["name"] for model in json.loads(body)["models"]] == ["a-bad", "b-good"]
        assert set(tensors.status()["arms"]) == {"b-good"}
        assert [task.get_name() for task in asyncio.all_tasks() if task.get_name() == "split bundles"]
        assert [w.name for w in agent.house.health.warnings if "a-bad" in w.text] == ["tensor_model:a-bad"]

        await tensors._later.run(list)
        assert "later" in {pulse.name.partition("-")[0] for pulse in tensors.pulses()}

        await asyncio.to_thread(store.remove, "a-bad")
        await tensors.cloud_met()
        assert not [w for w in agent.house.health.warnings if "a-bad" in w.text]
        assert tensors.models == ("b-good",)


async def test_nobody_waits_for_ever_when_the_store_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "models").write_text("a file where the folder should be")
    async with RunningHouse(config_for(tmp_path, models_dir=str(tmp_path / "models"))) as agent:
        async with asyncio.timeout(20):
            await agent.house.tensors.heads_ready(expected=False)

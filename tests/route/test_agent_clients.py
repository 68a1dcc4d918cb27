"""Unmodified clients against a whole agent with real models: openai, triton, and our own command line."""

from __future__ import annotations

import asyncio
import importlib
import io
import json
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
from attrs import frozen
from PIL import Image

from agent.cli.ask import image_request
from agent.cli.main import main
from engines.arrays import to_array, to_tensor
from engines.onnx import OnnxRuntime
from protocol.oip import encode_request
from tests.route import openai_scenarios
from tests.unit.agent.houses import RunningHouse, config_for

TEXT, IMAGES = "smollm2-135m", "ppocr-v2-cls"
T = TypeVar("T")
pytestmark = pytest.mark.slow


@frozen
class Device:
    """An agent on a loop of its own thread."""

    url: str
    port: int
    running: RunningHouse
    loop: asyncio.AbstractEventLoop

    async def idle(self) -> bool:
        """Nothing generates."""
        engine = self.running.house.texts.device
        return engine is not None and engine.load().running == 0


def _on(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run_coroutine_threadsafe(work, loop).result(90)


def picture() -> bytes:
    """A white PNG in the size of the model."""
    out = io.BytesIO()
    Image.new("RGB", (192, 48), "white").save(out, "PNG")
    return out.getvalue()


@pytest.fixture(scope="module")
def device(model_file: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Device]:
    """A real text model and a real image model behind one port."""
    models_dir = model_file(TEXT).parent.parent
    model_file(IMAGES)
    config = config_for(
        tmp_path_factory.mktemp("agent"), models_dir=str(models_dir), tensor_models=IMAGES, text_model=TEXT,
        text_threads=1, tensor_threads=1, context_tokens=512,
    )  # fmt: skip
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="agent under test")
    thread.start()

    async def start() -> RunningHouse:
        running = RunningHouse(config)
        await running.__aenter__()
        await running.until(lambda: running.house.texts.settled.is_set(), 60)
        await running.until(lambda: bool(running.house.tensors.models), 60)
        # Workers start with the first work; the check for leaks counts per test.
        headers, body = encode_request(image_request(IMAGES, picture()))
        assert (await running.link.exchange(f"/v2/models/{IMAGES}/infer", headers, body, 60)).status == 200
        return running

    running = _on(loop, start())
    try:
        yield Device(running.house.url, running.house.supervisor.port, running, loop)
    finally:
        _on(loop, running.__aexit__())
        _on(loop, loop.shutdown_default_executor())
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@pytest.mark.parametrize(
    "scenario", (*openai_scenarios.SCENARIOS, *openai_scenarios.REAL_SCENARIOS), ids=lambda s: s.__name__
)
async def test_openai_client(device: Device, scenario: Callable[..., Coroutine[Any, Any, None]]) -> None:
    await scenario(device.url, None, TEXT)


async def test_openai_client_that_leaves_frees_the_engine(device: Device) -> None:
    async def idle() -> bool:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(device.idle(), device.loop))

    await openai_scenarios.cancelling_frees_the_engine(device.url, None, TEXT, idle)


async def test_triton_client_whole_model_and_fp16(device: Device, model_file: Callable[[str], Path]) -> None:
    triton = importlib.import_module("tritonclient.http")
    values = np.random.default_rng(7).normal(size=(1, 3, 48, 192)).astype(np.float32)
    model = OnnxRuntime().load(model_file(IMAGES), threads=1)
    expected = to_array(model.run([to_tensor("x", values)])[0])
    model.close()

    def ask() -> tuple[Any, Any, Any]:
        client = triton.InferenceServerClient(f"127.0.0.1:{device.port}")
        try:
            assert client.is_server_live() and client.is_model_ready(IMAGES)
            metadata = client.get_model_metadata(IMAGES)
            full = triton.InferInput("x", list(values.shape), "FP32")
            full.set_data_from_numpy(values, binary_data=True)
            half = triton.InferInput("x", list(values.shape), "FP16")
            half.set_data_from_numpy(values.astype(np.float16), binary_data=True)
            return metadata, client.infer(IMAGES, [full]), client.infer(IMAGES, [half])
        finally:
            client.close()

    metadata, full, half = await asyncio.to_thread(ask)
    output = metadata["outputs"][0]["name"]
    assert np.allclose(full.as_numpy(output), expected, rtol=1e-5, atol=1e-6)
    assert np.allclose(half.as_numpy(output), expected, atol=5e-3)


def test_our_own_command_line(device: Device, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "p.png"
    file.write_bytes(picture())
    assert main(["infer", IMAGES, str(file), "--json", "--url", device.url]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["arm"], len(found["labels"])) == ("device", 1)
    assert main(["chat", "Say hello.", "--max-tokens", "8", "--json", "--url", device.url]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["text"]
    assert answer["sides"][0][0] == "device"
    assert main(["infer", "nope", str(file), "--url", device.url]) == 1
    assert "no model 'nope'" in capsys.readouterr().err
    (tmp_path / "bad.png").write_bytes(b"not a picture")
    assert main(["infer", IMAGES, str(tmp_path / "bad.png"), "--url", device.url]) == 1
    assert "image" in capsys.readouterr().err
    assert main(["status", "--url", device.url]) == 0
    assert TEXT in capsys.readouterr().out

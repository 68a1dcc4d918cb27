"""Unmodified clients and our own twins against a coordinator with real models: openai, triton, handoff, tails."""

from __future__ import annotations

import asyncio
import importlib
import io
import ssl
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attrs import frozen

from cloud_stub.certificates import check_request
from cloud_stub.compose import CoordinatorHouse
from engines.arrays import to_array, to_tensor
from engines.onnx import OnnxRuntime
from engines.peer import PeerEngine
from engines.remote_oip import RemoteEndpoint
from engines.store import ModelStore
from links.http import HttpLink
from links.tls import client_context
from protocol.clock import wall_now
from protocol.models import BundleManifest, tail_name
from protocol.tensors import Tensor
from protocol.text import Message, Sampling, TextRequest
from split_models.bundle_client import BundleClient
from tests.route import openai_scenarios
from tests.route.coordinator_house import settings
from tests.unit.cloud_stub.device_side import new_device

TEXT, IMAGES = "smollm2-135m", "ppocr-v2-cls"
pytestmark = pytest.mark.slow


@frozen
class Cloud:
    """A coordinator on a loop of its own thread; a device's files and the client key open it."""

    port: int
    key: str
    ca_pem: str
    files: tuple[Path, Path]
    folder: Path
    running: Callable[[], int]

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    def context(self, *, certificate: bool = True) -> ssl.SSLContext:
        return client_context(self.ca_pem, *(self.files if certificate else (None, None)))

    def link(self) -> HttpLink:
        return HttpLink("cloud", self.url, ssl=self.context())


def picture() -> bytes:
    from PIL import Image, ImageDraw

    image = Image.new("RGB", (192, 48), "white")
    ImageDraw.Draw(image).text((10, 10), "HELLO 123", fill="black", font_size=24)
    held = io.BytesIO()
    image.save(held, "PNG")
    return held.getvalue()


async def see(cloud: Cloud) -> tuple[Tensor, ...]:
    """The answer for an encoded picture."""
    encoded, link = picture(), cloud.link()
    try:
        sent = Tensor("image", "BYTES", (1,), len(encoded).to_bytes(4, "little") + encoded)
        return tuple((await RemoteEndpoint(link).infer(IMAGES, [sent], 20)).outputs)
    finally:
        await link.close()


@pytest.fixture(scope="module")
def cloud(model_file: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cloud]:
    """Started once: cutting and loading take seconds."""
    models_dir = model_file(IMAGES).parent.parent
    assert model_file(TEXT).parent.parent == models_dir
    folder = tmp_path_factory.mktemp("cloud")
    config = settings(
        folder, models_dir=models_dir, models=(TEXT, IMAGES), bundles=(IMAGES,), text_engine="llama_server",
        text_threads=1, text_context_tokens=1024,
    )  # fmt: skip
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="asyncio_coordinator")
    thread.start()
    cut: asyncio.Future[None] = loop.create_future()

    def tell(record: Any) -> None:
        if record["event"] == "bundle" and not cut.done():
            cut.set_result(None)

    house = CoordinatorHouse(config, tell)

    async def start() -> Cloud:
        await house.start()
        await house.text.engine_for(TEXT).capabilities()
        await asyncio.wait_for(cut, 120)
        device = new_device()
        certificate = house.authority.issue(check_request(device.csr_pem, "pi-1"), wall_now().unix_s)
        key = house.authority.new_client_key
        assert key is not None
        files = device.write(folder, certificate)
        engine = house.text.engine_for(TEXT)
        found = Cloud(house.port, key, house.authority.ca_pem, files, folder, lambda: engine.load().running)
        await see(found)  # worker threads live as long as the module, so they begin before the first test
        return found

    yield asyncio.run_coroutine_threadsafe(start(), loop).result(150)
    asyncio.run_coroutine_threadsafe(house.stop(), loop).result(30)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.mark.parametrize(
    "scenario", (*openai_scenarios.SCENARIOS, *openai_scenarios.REAL_SCENARIOS), ids=lambda one: one.__name__
)
async def test_openai_client_with_a_certificate(cloud: Cloud, scenario: Callable[..., Awaitable[None]]) -> None:
    await scenario(cloud.url, openai_scenarios.HttpClient(verify=cloud.context()), TEXT)


async def test_openai_client_cancel(cloud: Cloud) -> None:
    async def idle() -> bool:
        return cloud.running() == 0

    client = openai_scenarios.HttpClient(verify=cloud.context())
    await openai_scenarios.cancelling_frees_the_engine(cloud.url, client, TEXT, idle)


async def test_openai_client_with_the_client_key(cloud: Cloud) -> None:
    import openai

    http = openai_scenarios.HttpClient(verify=cloud.context(certificate=False))
    async with openai.AsyncOpenAI(base_url=f"{cloud.url}/v1", api_key=cloud.key, http_client=http) as api:
        answer = await api.completions.create(model=TEXT, prompt="The sea is", max_tokens=4, temperature=0)
        assert answer.usage is not None and answer.usage.completion_tokens > 0
    http = openai_scenarios.HttpClient(verify=cloud.context(certificate=False))
    async with openai.AsyncOpenAI(base_url=f"{cloud.url}/v1", api_key="sk-wrong", http_client=http) as api:
        with pytest.raises(openai.AuthenticationError, match="the key is not known here"):
            await api.models.list()


async def test_triton_client_whole_model_binary_fp16_and_encoded(
    cloud: Cloud, model_file: Callable[[str], Path]
) -> None:
    triton = importlib.import_module("tritonclient.http")
    values = np.random.default_rng(7).normal(size=(1, 3, 48, 192)).astype(np.float32)
    model = OnnxRuntime().load(model_file(IMAGES), threads=1)
    expected = to_array(model.run([to_tensor("x", values)])[0])
    model.close()

    def ask() -> tuple[Any, Any, Any, Any]:
        client = triton.InferenceServerClient(
            f"127.0.0.1:{cloud.port}", ssl=True, ssl_context_factory=lambda: cloud.context(certificate=False)
        )
        headers = {"Authorization": f"Bearer {cloud.key}"}
        try:
            metadata = client.get_model_metadata(IMAGES, headers=headers)
            full = triton.InferInput("x", list(values.shape), "FP32")
            full.set_data_from_numpy(values, binary_data=True)
            half = triton.InferInput("x", list(values.shape), "FP16")
            half.set_data_from_numpy(values.astype(np.float16), binary_data=True)
            encoded = triton.InferInput("image", [1], "BYTES")
            encoded.set_data_from_numpy(np.array([picture()], dtype=np.object_), binary_data=True)
            return metadata, *(client.infer(IMAGES, [one], headers=headers) for one in (full, half, encoded))
        finally:
            client.close()

    metadata, full, half, encoded = await asyncio.to_thread(ask)
    assert metadata["name"] == IMAGES
    output = metadata["outputs"][0]["name"]
    assert np.allclose(full.as_numpy(output), expected, rtol=1e-5, atol=1e-6)
    assert np.allclose(half.as_numpy(output), expected, atol=5e-3)
    assert encoded.as_numpy("label").shape == (1,)


async def manifest_and_client(cloud: Cloud, link: HttpLink) -> tuple[BundleManifest, BundleClient]:
    client = BundleClient(ModelStore(cloud.folder / "device-models", {}))
    return await client.manifest(link, IMAGES), client


async def test_heads_are_fetched_and_their_tails_finish_the_work(cloud: Cloud) -> None:
    """For every cut of the bundle with the raw codec the answer is the whole model's."""
    values = np.random.default_rng(7).normal(size=(1, 3, 48, 192)).astype(np.float32)
    link, runtime = cloud.link(), OnnxRuntime()
    try:
        manifest, client = await manifest_and_client(cloud, link)
        whole = runtime.load(await client.whole(link, manifest), threads=1)
        expected = to_array(whole.run([to_tensor(whole.inputs[0].name, values)])[0])
        whole.close()
        raw = [cut for cut in manifest.cuts if cut.codec == "raw"]
        assert raw
        for cut in raw:
            head = runtime.load(await client.head(link, manifest, cut), threads=1)
            crossing = await asyncio.to_thread(head.run, [to_tensor(head.inputs[0].name, values)])
            head.close()
            name = tail_name(IMAGES, manifest.digest, cut.id, cut.codec)
            answer = await RemoteEndpoint(link).infer(name, list(crossing), 20)
            assert np.allclose(to_array(answer.outputs[0]), expected, rtol=1e-5, atol=1e-7), cut.id
    finally:
        await link.close()


async def test_bundle_files_by_range(cloud: Cloud) -> None:
    link = cloud.link()
    try:
        manifest, _ = await manifest_and_client(cloud, link)
        path = f"/midstream/v1/bundles/{IMAGES}/files/{manifest.whole_file}"
        size = manifest.whole_size_bytes

        async def get(wanted: str, **more: str) -> Any:
            headers = {"range": wanted} | {k.replace("_", "-"): v for k, v in more.items()}
            return await link.exchange(path, headers, b"", 10, method="GET")

        first, last = await get("bytes=0-99"), await get(f"bytes={size - 10}-")
        assert (first.status, len(first.body), first.headers["content-range"]) == (206, 100, f"bytes 0-99/{size}")
        assert (last.status, len(last.body)) == (206, 10)
        assert (await get(f"bytes={size}-")).status == 416
        assert (await get("bytes=0-99", if_range='"other"')).status == 200, "another file: all of it"
        for odd in ("bytes=9-5", "bytes=-5", "lines=1-2", "bytes=0-1,4-5"):
            reply = await get(odd)
            assert (reply.status, len(reply.body)) == (200, size)
        tail = await get("bytes=50-149")
        whole = (await link.exchange(path, {}, b"", 10, method="GET")).body
        assert whole[:100] == first.body and whole[50:150] == tail.body
        for wrong in ("ca.pem", "manifest.json", "..%2fmanifest.json"):
            found = await link.exchange(f"/midstream/v1/bundles/{IMAGES}/files/{wrong}", {}, b"", 10, method="GET")
            assert found.status == 404
    finally:
        await link.close()


async def test_a_text_answer_by_handoff(cloud: Cloud) -> None:
    link = cloud.link()
    engine = PeerEngine(lambda: link.open("/midstream/v1/handoff"), name="cloud")
    request = TextRequest(TEXT, (Message("user", "Count to three."),), Sampling(max_tokens=8))
    try:
        continuation = await engine.prepare(request, 20)
        tokens = []
        async for token in continuation.start(0, 8):
            tokens.append(token)
            continuation.acknowledge(token.index)
        await continuation.close()
        assert [token.index for token in tokens if token.data] == list(range(len([t for t in tokens if t.data])))
        assert tokens[-1].finish in ("length", "stop")
    finally:
        await engine.close()
        await link.close()

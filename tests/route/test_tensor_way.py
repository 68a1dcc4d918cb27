"""Whole tensor requests on loopback: real models, real engines, real HTTP, a shaped link and an unmodified client."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import pytest_asyncio
import tritonclient.http as triton
from attrs import evolve

from engines.arrays import to_array
from engines.onnx import OnnxRuntime
from engines.remote_oip import RemoteEndpoint
from engines.slowed import SlowedRuntime
from engines.store import ModelStore
from links.http import HttpLink
from protocol.errors import BadRequest, LinkError, MidstreamError, NotFound
from protocol.events import ArmSwitched
from protocol.models import CatalogueEntry, Source, tail_name
from protocol.oip import bytes_tensor
from protocol.policy import SplitPolicy
from split_models.boxes import iou
from tests.tensor_house import CLS, DET, Cloud, Device, bundle_root, cloud, device, manifest_of, store_with

pytestmark = pytest.mark.timeout(180)  # the first test builds a bundle of the real model

QUICK = SplitPolicy(period_s=0.05, explore_one_in=4)
PRIVATE = evolve(QUICK, raw_input_leaves=False)
HALF = "half-precision"
FACE = "face-short-range"
SLOW = 4.0


@pytest.fixture(scope="module")
def page(model_file: Callable[[str], Path]) -> bytes:
    return model_file("sample-page").read_bytes()


def half_model(path: Path) -> Path:
    """y = 2 x in FP16."""
    helper, kind = onnx.helper, onnx.TensorProto.FLOAT16
    two = helper.make_tensor("two", kind, (), np.array([2.0], dtype=np.float16).tobytes(), raw=True)
    ports = [helper.make_tensor_value_info(name, kind, [None, 4]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Mul", ["x", "two"], ["y"])], "half", [ports[0]], [ports[1]], [two])
    path.write_bytes(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8).SerializeToString()
    )
    return path


@pytest.fixture
def files(model_file: Callable[[str], Path], tmp_path: Path) -> dict[str, Path]:
    return {
        DET: model_file(DET),
        CLS: model_file(CLS),
        FACE: model_file(FACE),
        HALF: half_model(tmp_path / "half.onnx"),
    }


def stored(root: Path, files: dict[str, Path]) -> ModelStore:
    data = files[HALF].read_bytes()
    from hashlib import sha256

    entry = CatalogueEntry(HALF, "onnx", "half.onnx", sha256(data).hexdigest(), len(data), Source("file"))
    return store_with(root, files, {HALF: entry})


@pytest_asyncio.fixture
async def far(files: dict[str, Path], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cloud]:
    root = await asyncio.to_thread(bundle_root, [DET, CLS], files.__getitem__, tmp_path_factory.mktemp("bundles"))
    async with cloud(root, stored(tmp_path / "cloud", files)) as running:
        yield running


@pytest_asyncio.fixture
async def near(files: dict[str, Path], tmp_path: Path, far: Cloud) -> AsyncIterator[Device]:
    """A device four times slower than the server, so that the far end is worth it."""
    slowed = SlowedRuntime(OnnxRuntime(), SLOW)
    store = stored(tmp_path / "device", files)
    async with device(store, f"http://127.0.0.1:{far.proxy.port}", policy=QUICK, onnx=slowed) as running:
        for _ in range(200):
            if all(manifest_of(running.way, name).cuts for name in (DET, CLS)):
                break
            await asyncio.sleep(0.05)
        yield running


class Client:
    """A user of one house's front."""

    def __init__(self, port: int) -> None:
        self._link = HttpLink("user", f"http://127.0.0.1:{port}")
        self.endpoint = RemoteEndpoint(self._link)

    async def boxes(self, picture: bytes, model: str = DET, deadline_s: float = 30.0) -> np.ndarray:
        answer = await self.endpoint.infer(model, [bytes_tensor("image", [picture])], deadline_s)
        return to_array(answer.outputs[0])

    async def close(self) -> None:
        await self._link.close()


@pytest_asyncio.fixture
async def slow_near(files: dict[str, Path], tmp_path: Path, far: Cloud) -> AsyncIterator[Device]:
    """A device on which the small model takes about 0.1 s, so that many requests take little time."""
    slowed = SlowedRuntime(OnnxRuntime(), 80.0)
    store = stored(tmp_path / "slow", files)
    async with device(store, f"http://127.0.0.1:{far.proxy.port}", policy=QUICK, onnx=slowed) as running:
        for _ in range(200):
            if manifest_of(running.way, CLS).cuts:
                break
            await asyncio.sleep(0.05)
        yield running


@pytest_asyncio.fixture
async def slow_user(slow_near: Device) -> AsyncIterator[Client]:
    client = Client(slow_near.server.port)
    yield client
    await client.close()


@pytest_asyncio.fixture
async def user(near: Device) -> AsyncIterator[Client]:
    client = Client(near.server.port)
    yield client
    await client.close()


async def until(user: Client, near: Device, page: bytes, kind: str, limit: int = 40, model: str = DET) -> np.ndarray:
    """Ask until a request was answered by an arm of that kind."""
    for _ in range(limit):
        answer = await user.boxes(page, model)
        if near.done()[-1].arm.startswith(kind):
            return answer
    raise AssertionError(f"no {kind} in {[event.arm for event in near.done()]}; {near.way.status()[model]}")


def moves(near: Device) -> list[tuple[str, str]]:
    """Changes of the held arm so far."""
    return [(s.source, s.target) for s in near.events.events if isinstance(s, ArmSwitched)]


def alike(first: np.ndarray, second: np.ndarray) -> bool:
    return len(first) == len(second) and all(max(iou(box, other) for other in second) >= 0.99 for box in first)


async def test_three_arms_give_the_same_boxes(near: Device, far: Cloud, user: Client, page: bytes) -> None:
    on_device = await user.boxes(page)
    assert near.done()[-1].arm == "device"
    in_cloud = await until(user, near, page, "cloud")
    near.policy[0] = PRIVATE
    by_cut = await until(user, near, page, "cut")
    assert len(on_device) >= 6
    assert np.abs(on_device - in_cloud).max() < 1e-3
    assert alike(by_cut, on_device)
    assert near.done()[-1].up_bytes > 100_000, "a cut sends the activation"


async def test_the_stages_of_each_arm_are_its_whole_time(near: Device, user: Client, page: bytes) -> None:
    """What no stage names is the event loop's: a small part, for which a busy machine is given some room."""
    await user.boxes(page)
    await until(user, near, page, "cloud")
    near.policy[0] = PRIVATE
    await until(user, near, page, "cut")
    by_arm = {event.arm.partition(":")[0]: event for event in near.done()}
    for event in by_arm.values():
        rest_s = event.total_s - sum(event.stages().values())
        assert -0.001 <= rest_s <= 0.02 + 0.1 * event.total_s, event
    assert set(by_arm) == {"device", "cut", "cloud"}
    assert by_arm["device"].head_s > 0
    assert by_arm["device"].send_s == 0
    for arm in ("cut", "cloud"):
        event = by_arm[arm]
        assert min(event.encode_s, event.send_s, event.server_s, event.receive_s) > 0, event
    assert by_arm["cut"].head_s > 0
    assert by_arm["cut"].post_s > 0


async def test_the_private_policy_sends_no_picture(near: Device, far: Cloud, user: Client, page: bytes) -> None:
    near.policy[0] = PRIVATE
    await until(user, near, page, "cut")
    names = {event.model for event in far.events.events if hasattr(event, "model")}
    assert names, "the server saw no request"
    assert DET not in names, "the whole model, and with it the picture, was asked for"


async def test_the_seam_moves_when_the_rate_falls_and_comes_back(
    slow_near: Device, far: Cloud, slow_user: Client, page: bytes
) -> None:
    await until(slow_user, slow_near, page, "cloud", model=CLS)
    far.proxy.set_rate(5_000)
    for _ in range(60):  # a hedge may answer before the arm moves
        await slow_user.boxes(page, CLS)
        if moves(slow_near)[-1][1] == "device":
            break
    far.proxy.set_rate(float("inf"))
    await until(slow_user, slow_near, page, "cloud", limit=200, model=CLS)
    assert all(event.status == "ok" for event in slow_near.done())
    assert moves(slow_near)[0] == ("device", "cloud")
    # A cut may have been tried on the way.
    assert "device" in [new for _, new in moves(slow_near)[1:]] and "cloud" in [old for old, _ in moves(slow_near)]


async def test_a_constant_link_never_moves_it_back(
    slow_near: Device, far: Cloud, slow_user: Client, page: bytes
) -> None:
    await until(slow_user, slow_near, page, "cloud", model=CLS)
    for _ in range(30):
        await slow_user.boxes(page, CLS)
    assert [str(s.target) for s in slow_near.events.events if isinstance(s, ArmSwitched)] == ["cloud"]


async def test_a_link_that_dies_under_a_request_is_answered_by_the_device(
    slow_near: Device, far: Cloud, slow_user: Client, page: bytes
) -> None:
    before = await until(slow_user, slow_near, page, "cloud", model=CLS)
    far.proxy.cut()
    count = len(slow_near.done())
    after = await slow_user.boxes(page, CLS)
    assert after.tolist() == before.tolist()
    assert len(slow_near.done()) == count + 1
    assert (slow_near.done()[-1].arm, slow_near.done()[-1].status) == ("device", "ok")
    assert "failed" in slow_near.done()[-1].reason
    far.proxy.restore()
    await until(slow_user, slow_near, page, "cloud", limit=200, model=CLS)


async def test_concurrent_requests_are_answered_once_each(
    slow_near: Device, far: Cloud, slow_user: Client, page: bytes
) -> None:
    await until(slow_user, slow_near, page, "cloud", model=CLS)
    count = len(slow_near.done())
    answers = await asyncio.gather(*(slow_user.boxes(page, CLS) for _ in range(12)))
    assert all(labels.tolist() == answers[0].tolist() for labels in answers)
    assert len(slow_near.done()) == count + 12


async def test_bad_pictures_are_named_and_the_next_request_works(near: Device, user: Client, page: bytes) -> None:
    for bad in (b"", b"not a picture", page[:2000]):
        with pytest.raises(BadRequest, match="cannot be decoded"):
            await user.boxes(bad)
    assert len(await user.boxes(page)) >= 6


async def test_tails_answer_on_any_front_by_name(far: Cloud, files: dict[str, Path]) -> None:
    """Head here by hand, tail by its wire name: what another runtime's device would do."""
    manifest = far.way.bundles[DET]
    cut = next(cut for cut in manifest.cuts if cut.codec == "raw")
    client = Client(far.server.port)
    name, datatype, shape = cut.crossing[0]
    assert datatype == "FP32"
    try:
        from engines.arrays import to_tensor

        sent = to_tensor(name, np.zeros(shape, dtype=np.float32))
        answer = await client.endpoint.infer(tail_name(DET, manifest.digest, cut.id, "raw"), [sent], 10.0)
        assert answer.outputs[0].shape == manifest.outputs[0][2]
        assert answer.digest == manifest.digest
        with pytest.raises(NotFound):
            await client.endpoint.infer(tail_name(DET, "0" * 64, cut.id, "raw"), [sent], 10.0)
    finally:
        await client.close()


async def test_a_device_without_a_far_end_answers_alone(files: dict[str, Path], tmp_path: Path, page: bytes) -> None:
    async with device(stored(tmp_path / "alone", files), policy=QUICK) as alone:
        client = Client(alone.server.port)
        try:
            assert len(await client.boxes(page)) >= 6
            labels = await client.boxes(page, CLS)
            assert labels.tolist() in ([0], [180])
        finally:
            await client.close()
        assert {event.arm for event in alone.done()} == {"device"}


async def test_a_bundle_is_kept_for_a_start_without_a_link(
    files: dict[str, Path], tmp_path: Path, near: Device, page: bytes
) -> None:
    digest = manifest_of(near.way, DET).digest
    async with device(stored(tmp_path / "device", files), policy=QUICK) as again:
        assert manifest_of(again.way, DET).digest == digest
        client = Client(again.server.port)
        try:
            answer = await client.endpoint.infer(DET, [bytes_tensor("image", [page])], 30.0)
        finally:
            await client.close()
        assert answer.digest == digest


async def test_what_requests_taught_survives_a_restart(
    files: dict[str, Path], tmp_path: Path, near: Device, page: bytes
) -> None:
    """The first life is slowed, so that what it taught is far from what the bundle says."""
    store, slowed = stored(tmp_path / "device", files), SlowedRuntime(OnnxRuntime(), 40.0)
    async with device(store, policy=QUICK, onnx=slowed) as first:
        said_s = first.way.runners[CLS].table.seconds("device", "whole")
        client = Client(first.server.port)
        for _ in range(6):
            await client.boxes(page, CLS)
        await client.close()
        table = first.way.runners[CLS].table
    taught_s = table.learnt()["device"]["whole"]
    assert taught_s > 5 * said_s
    async with device(store, policy=QUICK, onnx=slowed) as again:
        # A warm run's slow-down may be on top.
        assert again.way.runners[CLS].table.seconds("device", "whole") == pytest.approx(taught_s, rel=0.4)


async def test_a_dead_far_end_never_stops_the_device(files: dict[str, Path], tmp_path: Path, page: bytes) -> None:
    async with device(stored(tmp_path / "dead", files), "http://127.0.0.1:9", policy=QUICK) as alone:
        client = Client(alone.server.port)
        try:
            for _ in range(3):
                assert len(await client.boxes(page)) >= 6
        finally:
            await client.close()


# -- the unmodified tritonclient -------------------------------------------------------------------------------------


def triton_session(port: int, page: bytes) -> dict[str, Any]:
    """What a user of the stock client does, in a thread of its own: gevent has its own idea of an event loop."""
    with triton.InferenceServerClient(f"127.0.0.1:{port}", concurrency=1) as client:
        found: dict[str, Any] = {
            "live": client.is_server_live(), "ready": client.is_server_ready(),
            "model_ready": client.is_model_ready(DET), "version_ready": client.is_model_ready(DET, "1"),
            "nobody": client.is_model_ready("nobody"),
            "metadata": client.get_model_metadata(DET), "server": client.get_server_metadata(),
        }  # fmt: skip
        found["raw"] = _ask(client, DET, "x", np.zeros((1, 3, 480, 480), np.float32), "FP32", "sigmoid_0.tmp_0")
        found["wide"] = _ask(client, DET, "x", np.zeros((1, 3, 480, 480), np.float16), "FP16", "sigmoid_0.tmp_0")
        found["half"] = _ask(client, HALF, "x", np.array([[1, 2, 3, 4]], np.float16), "FP16", "y")
        found["json"] = _ask(client, DET, "x", np.zeros((1, 3, 480, 480), np.float32), "FP32", "sigmoid_0.tmp_0", False)
        found["picture"] = _ask(client, DET, "image", np.array([page], dtype=object), "BYTES", "boxes")
        found["gzip"] = _ask(
            client, DET, "image", np.array([page], dtype=object), "BYTES", "boxes",
            request_compression_algorithm="gzip", response_compression_algorithm="gzip",
        )  # fmt: skip
        face = client.get_model_metadata(FACE)["inputs"][0]
        shape = [max(1, size) for size in face["shape"]]
        result = client.infer(FACE, [_input(face["name"], np.zeros(shape, np.float32), "FP32")])
        found["face"] = [output["name"] for output in result.get_response()["outputs"]]
        errors = []
        for name, array, datatype in (
            ("x", np.zeros((1, 3, 10), np.float32), "FP32"), ("x", np.zeros((1, 3, 480, 480), np.int64), "INT64"),
            ("nothing", np.zeros((1, 3, 480, 480), np.float32), "FP32"),
        ):  # fmt: skip
            with pytest.raises(triton.InferenceServerException) as raised:
                _ask(client, DET, name, array, datatype, "sigmoid_0.tmp_0")
            errors.append(str(raised.value))
        found["errors"] = errors
        return found


def _input(name: str, array: np.ndarray, datatype: str, binary: bool = True) -> Any:
    tensor = triton.InferInput(name, list(array.shape), datatype)
    tensor.set_data_from_numpy(array, binary_data=binary)
    return tensor


def _ask(
    client: Any, model: str, name: str, array: np.ndarray, datatype: str, output: str, binary: bool = True, **more: Any
) -> tuple[np.ndarray, dict[str, Any]]:
    wanted = [triton.InferRequestedOutput(output, binary_data=binary)]
    result = client.infer(model, [_input(name, array, datatype, binary)], outputs=wanted, request_id="mine", **more)
    return result.as_numpy(output), result.get_response()


@pytest.mark.parametrize("house", ["device", "server"])
async def test_the_unmodified_tritonclient_works(near: Device, far: Cloud, page: bytes, house: str) -> None:
    port = near.server.port if house == "device" else far.server.port
    found = await asyncio.to_thread(triton_session, port, page)
    assert found["live"] and found["ready"] and found["model_ready"] and found["version_ready"]
    assert not found["nobody"]
    assert "binary_tensor_data" in found["server"]["extensions"]
    assert found["metadata"]["inputs"][0] == {"name": "x", "datatype": "FP32", "shape": [1, 3, 480, 480]}
    values, response = found["raw"]
    assert values.shape == (1, 1, 480, 480)
    assert response["id"] == "mine"
    assert response["parameters"]["digest"] == manifest_of(near.way, DET).digest
    assert np.allclose(values, found["wide"][0])
    assert np.allclose(values, found["json"][0])
    assert found["half"][0].dtype == np.float16
    assert found["half"][0].tolist() == [[2, 4, 6, 8]]
    assert found["picture"][0].shape[1:] == (4, 2)
    assert len(found["picture"][0]) >= 6
    assert np.allclose(found["picture"][0], found["gzip"][0])
    assert found["face"], "a TFLite model answers through the same front"
    for text, field in zip(found["errors"], ("shape", "datatype", "x"), strict=True):
        assert "[400]" in text
        assert field in text


async def test_a_second_client_is_not_harmed_by_garbage(near: Device, page: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", near.server.port)
    writer.write(b"POST /v2/models/x/infer HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100000\r\n\r\nhalf a body")
    await writer.drain()
    writer.close()
    client = Client(near.server.port)
    try:
        assert len(await client.boxes(page)) >= 6
        with pytest.raises(MidstreamError):
            await client.endpoint.infer("../../etc", [bytes_tensor("x", [page])], 5.0)
    finally:
        await client.close()
    assert not isinstance(reader, LinkError)


async def test_a_transfer_that_stalls_in_its_middle_is_answered_by_the_device_once(
    slow_near: Device, far: Cloud, slow_user: Client, page: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """The rate falls to nothing while bytes are on their way; no connection breaks. No hedge comes first."""
    caplog.set_level(logging.INFO, "midstream.split")
    slow_near.policy[0] = evolve(QUICK, hedge_ratio=0.0)
    before = await until(slow_user, slow_near, page, "cloud", model=CLS)
    count, sent = len(slow_near.done()), far.proxy.up_bytes
    far.proxy.set_rate(len(page) / 4)
    asked = asyncio.create_task(slow_user.boxes(page, CLS))
    while far.proxy.up_bytes <= sent:
        await asyncio.sleep(0.005)
    far.proxy.set_rate(0.0)
    assert far.proxy.up_bytes < sent + len(page), "the picture had arrived before the link stalled"
    assert (await asked).tolist() == before.tolist()
    (done,) = slow_near.done()[count:]
    assert (done.arm, done.status) == ("device", "ok")
    assert "cloud given up: the device answers in" in done.reason
    await slow_user.boxes(page, CLS)
    assert sum("link slow: nothing moved any more" in record.getMessage() for record in caplog.records) == 1
    assert [event.arm for event in slow_near.done()[count:]] == ["device", "device"], "a stalled link was tried again"
    far.proxy.set_rate(float("inf"))


async def test_requests_during_a_switch_are_answered_once_each(
    slow_near: Device, far: Cloud, slow_user: Client, page: bytes
) -> None:
    before = await until(slow_user, slow_near, page, "cloud", model=CLS)
    count = len(slow_near.done())
    far.proxy.set_rate(len(page) / 2)
    asked = [asyncio.create_task(slow_user.boxes(page, CLS)) for _ in range(4)]
    await asyncio.sleep(0.1)
    slow_near.policy[0], changed_s = PRIVATE, time.monotonic()
    asked += [asyncio.create_task(slow_user.boxes(page, CLS)) for _ in range(4)]
    answers = await asyncio.gather(*asked)
    assert all(labels.tolist() == before.tolist() for labels in answers)
    done = slow_near.done()[count:]
    assert len(done) == len({event.request_id for event in done}) == 8
    assert {event.status for event in done} == {"ok"}
    later = [event for event in done if event.at_s - event.total_s >= changed_s]
    assert len(later) == 4 and all(event.arm != "cloud" for event in later)
    far.proxy.set_rate(float("inf"))

"""The front door over its handlers: statuses, names, encoded inputs, parameters."""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Mapping
from typing import Any

import pytest

from links.port import Request, Response
from protocol.clock import FakeClock
from protocol.errors import EngineError, Full
from protocol.events import RecordingEmit, TensorDone
from protocol.oip import InferRequest, bytes_tensor, decode_response, encode_request
from protocol.tensors import Tensor
from split_models.front import Front
from split_models.service import Service, Shown
from tests.unit.split_models.parts import Inline, Scripted, SlowWordRecipe, WordRecipe, floats

X = floats("x", 1, 2, 3, 4)
Y = floats("y", 1, 2)


class Door:
    """A front over scripted models: `plain` has no recipe, `word` has one, `tail` answers and is not listed."""

    def __init__(self) -> None:
        failing = {"broken": EngineError("dead"), "busy": Full("full", retry_after_s=7.0)}
        self.local = Scripted({"plain": Y, "word": Y, "tail": Y, **failing})
        self.emit = RecordingEmit()
        names = {name: Shown(name, "onnx_onnxv1", listed=name != "tail") for name in self.local.reactions}
        self.clock = FakeClock()
        self._names = names
        self.recipe(WordRecipe())
        self.front = Front(Service(self.local, Inline(), self.clock, lambda: names, emit=self.emit))

    def recipe(self, recipe: WordRecipe) -> None:
        """What `word` is served with."""
        self._names["word"] = Shown("word", "onnx_onnxv1", recipe, "x", (1, 4))

    async def ask(
        self, method: str, path: str, headers: Mapping[str, str] | None = None, body: bytes = b""
    ) -> Response:
        """Route by hand: what a house's router does."""
        for route in self.front.routes:
            params = match(route.path, path)
            if params is not None and route.method == method:
                return await route.handle(Request(method, path, headers or {}, params, body=body))
        raise AssertionError(f"no route {method} {path}")

    async def infer(self, model: str, *inputs: Tensor, **fields: Any) -> Response:
        headers, body = encode_request(InferRequest(model, inputs, binary=True, **fields))
        return await self.ask("POST", f"/v2/models/{model}/infer", headers, body)


def match(pattern: str, path: str) -> dict[str, str] | None:
    wanted, got = pattern.split("/"), path.split("/")
    if len(wanted) != len(got):
        return None
    params = {w[1:-1]: g for w, g in zip(wanted, got, strict=True) if w.startswith("{")}
    return params if all(w == g or w.startswith("{") for w, g in zip(wanted, got, strict=True)) else None


def parsed(response: Response) -> Any:
    assert isinstance(response.body, bytes)
    return json.loads(response.body)


@pytest.fixture
def door() -> Door:
    return Door()


async def test_server_health_and_listing(door: Door) -> None:
    assert "binary_tensor_data" in parsed(await door.ask("GET", "/v2"))["extensions"]
    for path in ("/v2/health/live", "/v2/health/ready", "/v2/models/plain/ready", "/v2/models/plain/versions/1/ready"):
        assert (await door.ask("GET", path)).status == 200
    listed = [model["name"] for model in parsed(await door.ask("GET", "/v2/models"))["models"]]
    assert "plain" in listed
    assert "tail" not in listed, "tails answer by name and are not listed"


async def test_metadata_names_shapes(door: Door) -> None:
    found = parsed(await door.ask("GET", "/v2/models/plain"))
    assert found["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [1, 4]}]
    assert found["platform"] == "onnx_onnxv1"


async def test_an_answer_tells_arm_and_digest(door: Door) -> None:
    response = await door.infer("plain", X)
    assert isinstance(response.body, bytes)
    answer = decode_response(response.headers, response.body)
    assert bytes(answer.outputs[0].data) == bytes(Y.data)
    assert answer.parameters["midstream_arm"] == "device"
    assert answer.parameters["digest"] == door.local.digest == response.headers["x-midstream-digest"]
    assert answer.parameters["compute_s"] == pytest.approx(0.01)


@pytest.mark.parametrize("name", ["x", "image"])
async def test_an_encoded_input_goes_through_the_recipe(door: Door, name: str) -> None:
    response = await door.infer("word", bytes_tensor(name, [b"good"]))
    assert isinstance(response.body, bytes)
    assert [tensor.name for tensor in decode_response(response.headers, response.body).outputs] == ["answer"]
    assert door.local.received[-1][0].datatype == "FP32"


async def test_raw_tensors_of_a_recipes_model_are_plain_inference(door: Door) -> None:
    response = await door.infer("word", X)
    assert isinstance(response.body, bytes)
    assert [tensor.name for tensor in decode_response(response.headers, response.body).outputs] == ["y"]


REFUSED = {
    "undecodable": (400, "word", (bytes_tensor("x", [b"bad"]),), "not the word"),
    "two pictures": (400, "word", (bytes_tensor("x", [b"good", b"good"]),), "one picture"),
    "another name": (400, "word", (bytes_tensor("picture", [b"good"]),), "'x' or 'image'"),
    "no recipe": (400, "plain", (bytes_tensor("x", [b"good"]),), "no encoded input"),
    "unknown model": (404, "nobody", (X,), "no model"),
    "engine failure": (500, "broken", (X,), "dead"),
    "over capacity": (503, "busy", (X,), "full"),
}


@pytest.mark.parametrize("kind", REFUSED)
async def test_refusals_have_a_status_and_a_text(door: Door, kind: str) -> None:
    status, model, inputs, text = REFUSED[kind]
    response = await door.infer(model, *inputs)
    assert response.status == status
    assert text in parsed(response)["error"]


async def test_over_capacity_says_when_to_come_back(door: Door) -> None:
    assert (await door.infer("busy", X)).headers["retry-after"] == "7"


GARBAGE = [
    b"", b"{", b"[]", b'{"inputs":[]}', b'{"inputs":[{"name":"x"}]}', b"\xff" * 100,
    b'{"inputs":[{"name":"x","shape":[1,4],"datatype":"FP99","data":[1]}]}',
]  # fmt: skip


@pytest.mark.parametrize("body", GARBAGE)
async def test_garbage_is_a_400_with_a_text(door: Door, body: bytes) -> None:
    response = await door.ask("POST", "/v2/models/plain/infer", {}, body)
    assert response.status == 400
    assert parsed(response)["error"]


async def test_unknown_names_and_versions_are_404(door: Door) -> None:
    for path in ("nobody", "nobody/ready", "plain/versions/9", "plain/versions/9/ready"):
        assert (await door.ask("GET", f"/v2/models/{path}")).status == 404


async def test_only_the_wanted_outputs_leave(door: Door) -> None:
    response = await door.infer("plain", X, outputs=("y",))
    assert response.status == 200
    missing = await door.infer("plain", X, outputs=("z",))
    assert missing.status == 400
    assert "'z'" in parsed(missing)["error"]


@pytest.mark.parametrize("field", ["timeout", "deadline_s"])
@pytest.mark.parametrize("value", [0, -1, "soon", True, pytest.param(10**400, id="huge")])
async def test_a_timeout_is_a_positive_number(door: Door, value: object, field: str) -> None:
    response = await door.infer("plain", X, parameters={field: value})
    assert response.status == 400
    assert f"parameters.{field}" in parsed(response)["error"]
    assert (await door.infer("plain", X, parameters={"timeout": 2_000_000})).status == 200


async def test_half_precision_is_widened_for_a_single_precision_input(door: Door) -> None:
    half = Tensor("x", "FP16", (1, 4), bytes.fromhex("003c004000420044"))
    assert (await door.infer("plain", half)).status == 200
    sent = door.local.received[-1][0]
    assert (sent.datatype, bytes(sent.data)) == ("FP32", bytes(X.data))


async def test_a_client_that_asks_for_gzip_gets_it(door: Door) -> None:
    door.local.reactions["plain"] = floats("y", *([0.0] * 4096))
    headers, body = encode_request(InferRequest("plain", (X,), binary=True))
    packed = await door.ask("POST", "/v2/models/plain/infer", headers | {"accept-encoding": "gzip"}, body)
    assert packed.headers["content-encoding"] == "gzip"
    assert isinstance(packed.body, bytes)
    assert len(packed.body) < 1000 < len(gzip.decompress(packed.body))
    plain = await door.ask("POST", "/v2/models/plain/infer", headers | {"accept-encoding": "gzip, deflate"}, body)
    assert "content-encoding" not in plain.headers


async def test_every_request_is_reported_once(door: Door) -> None:
    await door.infer("plain", X, id="mine")
    await door.infer("broken", X)
    done = [event for event in door.emit.events if isinstance(event, TensorDone)]
    assert [(event.model, event.status) for event in done] == [("plain", "ok"), ("broken", "engine_error")]
    assert done[0].request_id == "mine"
    assert done[1].request_id


async def test_the_recipes_work_is_not_reported_as_the_models(door: Door) -> None:
    door.recipe(SlowWordRecipe(door.clock, 0.25, 0.5))
    response = await door.infer("word", bytes_tensor("image", [b"good"]))
    done = next(event for event in door.emit.events if isinstance(event, TensorDone))
    assert (done.pre_s, done.head_s, done.post_s) == pytest.approx((0.25, 0.01, 0.5))
    assert decode_response(response.headers, response.body).parameters["compute_s"] == pytest.approx(0.76)


class Noted(dict[str, str]):
    """Headers that remember which of them were read outside of the test's own thread."""

    def __init__(self, headers: Mapping[str, str]) -> None:
        super().__init__(headers)
        self._home = threading.get_ident()
        self.aside: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        if threading.get_ident() != self._home:
            self.aside.add(key)
        return super().get(key, default)


@pytest.mark.parametrize(
    ("count", "coding", "aside"), [(4, "", False), (4, "gzip", True), (100_000, "", False), (100_000, "json", True)]
)
async def test_large_work_on_bodies_is_done_off_the_event_loop(
    door: Door, count: int, coding: str, aside: bool
) -> None:
    """The tensors of a binary body stay where they are: however many they are, there is nothing to do."""
    x = floats("x", *[1.0] * count)
    headers, body = encode_request(InferRequest("plain", (x,), binary=True))
    if coding == "json":
        entry = {"name": "x", "shape": [1, count], "datatype": "FP32", "data": [1.0] * count}
        headers, body, coding = {"accept": "*/*"}, json.dumps({"inputs": [entry]}).encode(), ""
    noted = Noted(headers | ({"content-encoding": coding} if coding else {}))
    response = await door.ask("POST", "/v2/models/plain/infer", noted, gzip.compress(body) if coding else body)
    assert response.status == 200
    assert bytes(door.local.received[0][0].data) == bytes(x.data)
    assert ("content-encoding" in noted.aside) is aside
    assert "accept-encoding" not in noted.aside, "the answer is small"


async def test_large_answers_are_made_off_the_event_loop(door: Door) -> None:
    door.local.reactions["plain"] = floats("y", *[1.0] * 100_000)
    headers, body = encode_request(InferRequest("plain", (X,), binary=True))
    noted = Noted(headers | {"accept-encoding": "gzip"})
    response = await door.ask("POST", "/v2/models/plain/infer", noted, body)
    assert decode_response(response.headers, response.body).outputs[0].shape == (1, 100_000)
    assert noted.aside == {"accept-encoding"}


async def test_a_large_body_that_does_not_inflate_is_refused(door: Door) -> None:
    body = b"no gzip" * 100_000
    assert (await door.ask("POST", "/v2/models/plain/infer", {"content-encoding": "gzip"}, body)).status == 400


async def test_a_model_is_loaded_when_a_device_says_so() -> None:
    door = Door()
    reply = await door.ask("POST", "/v2/repository/models/tail/load")
    assert (reply.status, door.local.preloaded) == (200, ["tail"])
    assert (await door.ask("POST", "/v2/repository/models/nobody/load")).status == 404

"""The Android sample, as far as it can be checked without Android: its Python side runs, its Kotlin side fits to it."""

from __future__ import annotations

import ast
import json
import re
import sys
import threading
import time
import urllib.error
import urllib.request
import xml.etree.ElementTree
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest

from agent.host_bridge import HostState
from engines.digest import file_sha256
from engines.fakes_tensor import MAGIC, double
from engines.registry import ImportGuard, use_guard
from links.port import Found
from protocol.decode import encode
from protocol.errors import BadRequest, EngineError
from protocol.models import CatalogueEntry, Source
from protocol.tensors import Tensor

SAMPLE = Path(__file__).parents[3] / "firmware_scripts" / "android"
MAIN = SAMPLE / "app" / "src" / "main"
KOTLIN = MAIN / "java" / "io" / "github" / "midstream" / "host"
PYTHON = MAIN / "python"
ANDROID = "{http://schemas.android.com/apk/res/android}"


class Phone:
    """Stands where PhoneBridge.kt does: a phone with one model, y = 2 x."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {"network": "wifi", "validated": True, "battery_ratio": 0.5, "charging": False}
        self.kept: dict[str, str] = {}
        self.callback: Callable[[], None] | None = None
        self.closed: list[int] = []
        self.awake: list[bool] = []
        self.multicast: list[bool] = []

    def stateJson(self) -> str:  # noqa: N802 - a Kotlin name, as all below
        return json.dumps(self.state)

    def onChange(self, callback: Callable[[], None] | None) -> None:  # noqa: N802
        self.callback = callback

    def holdAwake(self, on: bool) -> None:  # noqa: N802
        self.awake.append(on)

    def holdMulticast(self, on: bool) -> None:  # noqa: N802
        self.multicast.append(on)

    def browseJson(self, kind: str, seconds: float) -> str:  # noqa: N802
        return json.dumps([{"instance": "c", "addresses": ["192.168.1.2"], "port": 8791, "txt": {"fl": "home"}}])

    def readSecret(self, name: str) -> str | None:  # noqa: N802
        return self.kept.get(name)

    def writeSecret(self, name: str, base64: str) -> None:  # noqa: N802
        self.kept[name] = base64

    def runtimeVersion(self) -> str:  # noqa: N802
        return "1"

    def loadModel(self, path: str, threads: int) -> int:  # noqa: N802
        if not Path(path).read_bytes().startswith(MAGIC):
            raise ValueError("not a model")
        return 7

    def modelJson(self, handle: int) -> str:  # noqa: N802
        spec = {"datatype": "FP32", "shape": [-1, 4]}
        return json.dumps({"inputs": [{"name": "x", **spec}], "outputs": [{"name": "y", **spec}]})

    def runModel(self, handle: int, inputs: Sequence[bytes], shapes: str) -> list[bytes]:  # noqa: N802
        assert json.loads(shapes)[0][1] == 4
        return [double(data) for data in inputs]

    def closeModel(self, handle: int) -> None:  # noqa: N802
        self.closed.append(handle)


@pytest.fixture
def sample() -> Iterator[Any]:
    """The sample's Python package, importable for one test."""
    sys.path.insert(0, str(PYTHON))
    try:
        import midstream_host.bridge
        import midstream_host.service

        yield midstream_host
    finally:
        sys.path.remove(str(PYTHON))
        for name in [name for name in sys.modules if name.split(".")[0] == "midstream_host"]:
            del sys.modules[name]
        use_guard(ImportGuard())


def test_every_call_into_kotlin_is_there_with_its_number_of_arguments() -> None:
    source = (KOTLIN / "PhoneBridge.kt").read_text()
    there = {
        name: len([part for part in arguments.split(",") if ":" in part])
        for name, arguments in re.findall(r"^    fun (\w+)\(([^)]*)\)", source, re.M)
    }
    calls = [
        (node.func.attr, len(node.args))
        for node in ast.walk(ast.parse((PYTHON / "midstream_host" / "bridge.py").read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and ast.unparse(node.func.value) in ("self._phone", "phone")
    ]
    assert len(calls) >= 12
    assert [call for call in calls if there.get(call[0]) != call[1]] == []


def test_the_service_calls_what_python_has() -> None:
    called = set(re.findall(r'callAttr\("(\w+)"', (KOTLIN / "AgentService.kt").read_text()))
    tree = ast.parse((PYTHON / "midstream_host" / "service.py").read_text())
    public = {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")}
    assert called == public


def test_the_state_names_its_fields_as_the_port_does() -> None:
    put = set(re.findall(r'\.put\("(\w+)"', re.findall(r"fun stateJson.*?toString", _kotlin(), re.S)[0]))
    assert put == {field.name for field in attrs.fields(HostState)}


def test_the_manifest_asks_for_the_locks_and_declares_what_it_names() -> None:
    manifest = xml.etree.ElementTree.parse(MAIN / "AndroidManifest.xml").getroot()
    asked = {node.get(f"{ANDROID}name", "").rpartition(".")[2] for node in manifest.iter("uses-permission")}
    assert {"CHANGE_WIFI_MULTICAST_STATE", "WAKE_LOCK", "FOREGROUND_SERVICE", "INTERNET"} <= asked
    named = [node.get(f"{ANDROID}name", "") for kind in ("activity", "service") for node in manifest.iter(kind)]
    assert named and all((KOTLIN / f"{name.removeprefix('.')}.kt").is_file() for name in named)


def test_a_start_that_android_refuses_is_told_to_the_user() -> None:
    source = (KOTLIN / "MainActivity.kt").read_text()
    start = source.index("startForegroundService(")
    assert "catch (error: IllegalStateException)" in source[start:]
    assert "isIgnoringBatteryOptimizations" in source


def test_the_bridge_speaks_for_the_phone(sample: Any) -> None:
    phone = Phone()
    host = sample.bridge.PhoneHost(phone, to_java=list)
    assert host.state() == HostState(network="wifi", battery_ratio=0.5, charging=False)
    phone.state |= {"thermal": "volcanic", "network": "carrier pigeon"}
    assert (host.state().thermal, host.state().network) == ("none", None)
    told: list[int] = []
    stop = host.watch(lambda: told.append(1))
    assert phone.callback is not None
    phone.callback()
    stop()
    assert (told, phone.callback) == ([1], None)
    assert host.browse("_midstream._tcp", 1) == [Found("c", ("192.168.1.2",), 8791, {"fl": "home"})]
    assert host.secrets.read("k") is None
    host.secrets.write("k", b"\x00\xff")
    assert host.secrets.read("k") == b"\x00\xff"


def test_models_of_the_phone_keep_the_rules_of_the_port(sample: Any, tmp_path: Path) -> None:
    phone = Phone()
    runtime = sample.bridge.PhoneHost(phone, to_java=list).runtimes()["tflite"]
    (tmp_path / "a.tflite").write_bytes(MAGIC)
    (tmp_path / "b.tflite").write_bytes(b"?")
    with pytest.raises(EngineError, match=r"b\.tflite"):
        runtime.load(tmp_path / "b.tflite", 1)
    model = runtime.load(tmp_path / "a.tflite", 1)
    given = Tensor("x", "FP32", (2, 4), bytes(32))
    assert list(model.run([given])) == [Tensor("y", "FP32", (2, 4), bytes(32))]
    with pytest.raises(BadRequest):
        model.run([Tensor("z", "FP32", (2, 4), bytes(32))])
    model.close()
    model.close()
    assert phone.closed == [7]


def test_the_service_starts_pauses_resumes_and_stops(sample: Any, tmp_path: Path, free_port: Callable[[], int]) -> None:
    sample.service.PORT = free_port()
    phone = Phone()
    _model(tmp_path / "models")
    # Chaquopy's arrays are not there: the phone of the test takes lists.
    url = sample.service.start(phone, str(tmp_path / "state"), str(tmp_path / "models"), "", list)
    try:
        assert sample.service.start(phone, "", "", "") == url
        assert _infer(url) == 200
        sample.service.pause()
        assert _infer(url) == 503
        sample.service.resume()
        assert _infer(url) == 200
    finally:
        sample.service.stop()
    sample.service.stop()
    assert phone.callback is None
    assert phone.awake.count(True) == phone.awake.count(False) > 0


class Leaving(Phone):
    """Android's answer is late when the agent stops following it."""

    def __init__(self) -> None:
        super().__init__()
        self.leaves = threading.Event()

    def onChange(self, callback: Callable[[], None] | None) -> None:  # noqa: N802
        if callback is None:
            self.leaves.set()
            time.sleep(0.5)
        super().onChange(callback)


def test_a_service_that_begins_while_the_one_before_ends_waits_for_that_end(
    sample: Any, tmp_path: Path, free_port: Callable[[], int]
) -> None:
    sample.service.PORT = free_port()
    before, after = Leaving(), Phone()
    folders = str(tmp_path / "state"), str(tmp_path / "models")
    sample.service.start(before, *folders, "", list)
    ending = threading.Thread(target=sample.service.stop)
    ending.start()
    try:
        assert before.leaves.wait(10)
        assert sample.service.start(after, *folders, "", list).endswith(str(sample.service.PORT))
        end_s = time.monotonic() + 10
        while after.callback is None and time.monotonic() < end_s:
            time.sleep(0.02)
        assert (before.callback, after.callback is not None) == (None, True)
    finally:
        ending.join()
        sample.service.stop()
    assert after.callback is None


def test_the_worker_of_the_calls_outlives_a_service() -> None:
    source = (KOTLIN / "AgentService.kt").read_text()
    assert source.index("companion object") < source.index("newSingleThreadExecutor")
    assert "shutdown" not in source


def _kotlin() -> str:
    return (KOTLIN / "PhoneBridge.kt").read_text()


def _model(models: Path) -> None:
    file = models / "double" / "double.tflite"
    file.parent.mkdir(parents=True)
    file.write_bytes(MAGIC)
    entry = CatalogueEntry(
        name="double", format="tflite", filename=file.name, sha256=file_sha256(file), size_bytes=len(MAGIC),
        source=Source("file", file=str(file)), licence="", description="",
    )  # fmt: skip
    (file.parent / "entry.json").write_bytes(encode(entry))


def _infer(url: str) -> int:
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}
    request = urllib.request.Request(
        f"{url}/v2/models/double/infer", json.dumps({"inputs": [tensor]}).encode(), {"content-type": "application/json"}
    )
    for _ in range(100):
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                assert json.loads(answer.read())["outputs"][0]["data"] == [2.0, 4.0, 6.0, 8.0]
                return int(answer.status)
        except urllib.error.HTTPError as err:
            if err.code != 404 and b"loading" not in err.read():
                return err.code
    pytest.fail("the model was never served")

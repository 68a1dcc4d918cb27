"""HostBridge and TensorRuntime over the Kotlin object PhoneBridge; its methods are called by name."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from agent.host_bridge import HostState, Thermal, Transport
from engines.model_inputs import match_inputs
from engines.port import TensorRuntime, TextEngine
from links.port import Found
from protocol.errors import EngineError, MidstreamError
from protocol.tensors import Tensor, TensorSpec

MAX_FOUND = 64

ToJava = Callable[[Sequence[bytes]], Any]
"""Bytes of several tensors as an Array<ByteArray>."""


def java_arrays(parts: Sequence[bytes]) -> Any:
    """As Chaquopy makes them."""
    from java import jarray, jbyte  # type: ignore[import-not-found]

    return jarray(jarray(jbyte))([jarray(jbyte)(part) for part in parts])


class PhoneHost:
    """A HostBridge over PhoneBridge.kt."""

    def __init__(self, phone: Any, to_java: ToJava = java_arrays) -> None:
        self._phone = phone
        self._runtime = PhoneRuntime(phone, to_java)
        self._listeners: list[Callable[[], None]] = []
        self._lock = threading.Lock()
        self.secrets = PhoneSecrets(phone)

    def state(self) -> HostState:
        found = json.loads(str(self._phone.stateJson()))
        network, thermal = found.get("network"), found.get("thermal")
        return HostState(
            battery_ratio=found.get("battery_ratio"),
            charging=found.get("charging"),
            power_save=bool(found.get("power_save")),
            thermal=thermal if thermal in get_args(Thermal) else "none",
            network=network if network in get_args(Transport) else None,
            validated=bool(found.get("validated", True)),
            metered=bool(found.get("metered")),
            background=bool(found.get("background")),
            idle=bool(found.get("idle")),
        )

    def watch(self, on_change: Callable[[], None]) -> Callable[[], None]:
        with self._lock:
            self._listeners.append(on_change)
            self._phone.onChange(self._changed)

        def stop() -> None:
            with self._lock:
                self._listeners.remove(on_change)
                if not self._listeners:
                    self._phone.onChange(None)

        return stop

    def hold_awake(self, on: bool) -> None:
        self._phone.holdAwake(on)

    def hold_multicast(self, on: bool) -> None:
        self._phone.holdMulticast(on)

    def browse(self, service_type: str, seconds: float) -> Sequence[Found]:
        listed = json.loads(str(self._phone.browseJson(service_type, float(seconds))))
        return [
            Found(str(f["instance"]), tuple(map(str, f["addresses"])), int(f["port"]), dict(f.get("txt", {})))
            for f in listed[:MAX_FOUND]
        ]

    def runtimes(self) -> Mapping[str, TensorRuntime]:
        return {"tflite": self._runtime}

    def text_engine(self, model: str) -> TextEngine | None:
        return None

    def _changed(self) -> None:
        with self._lock:
            listeners = tuple(self._listeners)
        for listener in listeners:
            listener()


class PhoneSecrets:
    """The phone's secrets; bytes cross as base64."""

    def __init__(self, phone: Any) -> None:
        self._phone = phone

    def read(self, name: str) -> bytes | None:
        found = self._phone.readSecret(name)
        return None if found is None else base64.b64decode(str(found))

    def write(self, name: str, secret: bytes) -> None:
        self._phone.writeSecret(name, base64.b64encode(secret).decode())


class PhoneRuntime:
    """TensorRuntime on the app's LiteRT."""

    name = "litert on the host"

    def __init__(self, phone: Any, to_java: ToJava) -> None:
        self._phone = phone
        self._to_java = to_java

    @property
    def version(self) -> str:
        return str(self._phone.runtimeVersion())

    def load(self, file: Path, threads: int) -> PhoneModel:
        handle = _asked(f"cannot load {file.name}", lambda: self._phone.loadModel(str(file), threads))
        return PhoneModel(self._phone, handle, self._to_java)


class PhoneModel:
    """A loaded model of PhoneRuntime."""

    thread_safe = False

    def __init__(self, phone: Any, handle: Any, to_java: ToJava) -> None:
        self._phone = phone
        self._handle = handle
        self._to_java = to_java
        self._closed = False
        found = json.loads(str(_asked("cannot describe a model", lambda: phone.modelJson(handle))))
        self.inputs: Sequence[TensorSpec] = tuple(_spec(s) for s in found["inputs"])
        self.outputs: Sequence[TensorSpec] = tuple(_spec(s) for s in found["outputs"])

    def run(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        given = match_inputs(inputs, self.inputs)
        arrays = self._to_java([bytes(tensor.data) for tensor in given])
        shapes = json.dumps([list(tensor.shape) for tensor in given])
        taken = _asked("the model failed", lambda: self._phone.runModel(self._handle, arrays, shapes))
        return [_tensor(spec, bytes(data)) for spec, data in zip(self.outputs, taken, strict=True)]

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._phone.closeModel(self._handle)


def _spec(found: Mapping[str, Any]) -> TensorSpec:
    shape = tuple(None if size < 0 else int(size) for size in found["shape"])
    return TensorSpec(str(found["name"]), str(found["datatype"]), shape)


def _tensor(spec: TensorSpec, data: bytes) -> Tensor:
    """One free dimension is what the others leave of the bytes; more cannot be told from bytes alone."""
    from protocol.tensors import DATATYPE_BYTES

    free = [at for at, size in enumerate(spec.shape) if size is None]
    shape = [1 if size is None else size for size in spec.shape]
    if len(free) > 1:
        raise EngineError(f"{spec.name} has several free dimensions", next_step="fix the model's shapes")
    if free:
        known_bytes = DATATYPE_BYTES[spec.datatype]
        for size in shape:
            known_bytes *= size
        shape[free[0]] = len(data) // known_bytes if known_bytes else 0
    return Tensor(spec.name, spec.datatype, tuple(shape), data)


def _asked(what: str, call: Callable[[], Any]) -> Any:
    """Java's exceptions as ours."""
    try:
        return call()
    except MidstreamError:
        raise
    except Exception as err:
        raise EngineError(f"{what}: {err}", next_step="see the app's log") from err

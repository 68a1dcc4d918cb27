"""The port to the program that an agent is a guest of: what only it can know or do (Android: PowerManager and so on).

Every call may come from a thread of the agent, may block for a moment and may fail: a host whose call fails costs a
warning, never the agent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, Protocol

from attrs import frozen

from engines.port import TensorRuntime, TextEngine
from links.port import Found

Thermal = Literal["none", "light", "moderate", "severe", "critical", "emergency", "shutdown"]
"""As Android's PowerManager tells it; other hosts map to the nearest."""

Transport = Literal["none", "wifi", "ethernet", "cellular", "vpn", "other"]


@frozen(kw_only=True)
class HostState:
    """What the host knows now; None where it cannot tell.

    battery_ratio: 0 to 1. power_save: the user asked the system to save. network: what carries traffic, "none" for
    nothing. validated: it was seen to lead somewhere. metered: bytes cost money. background: nobody looks at the host.
    idle: the system defers this program's network and timers (Doze, and the program is not exempt from it).
    """

    battery_ratio: float | None = None
    charging: bool | None = None
    power_save: bool = False
    thermal: Thermal = "none"
    network: Transport | None = None
    validated: bool = True
    metered: bool = False
    background: bool = False
    idle: bool = False


class SecretStore(Protocol):
    """Small secrets by name, in the host's key store. Blocking."""

    def read(self, name: str) -> bytes | None: ...

    def write(self, name: str, secret: bytes) -> None:
        """Durable when it returns."""
        ...


class HostBridge(Protocol):
    """What a host brings. `agent.fakes_host.FakeHost` is one to begin from."""

    @property
    def secrets(self) -> SecretStore | None:
        """Where the device's key is kept; None: in a file of the agent's state folder."""
        ...

    def state(self) -> HostState: ...

    def watch(self, on_change: Callable[[], None]) -> Callable[[], None]:
        """Call `on_change`, from any thread, whenever `state` may have changed; returns the way to stop."""
        ...

    def hold_awake(self, on: bool) -> None:
        """Take or leave the wake lock: held while requests are under way and while presence is told."""
        ...

    def hold_multicast(self, on: bool) -> None:
        """Take or leave the multicast lock, without which Android drops mDNS; held while services are looked for."""
        ...

    def browse(self, service_type: str, seconds: float) -> Sequence[Found]:
        """Services of a type like `_midstream._tcp` found within `seconds` (NsdManager). Blocks that long."""
        ...

    def runtimes(self) -> Mapping[str, TensorRuntime]:
        """Runtimes of the host by the format of the files they load: `onnx`, `tflite`; instead of our own."""
        ...

    def text_engine(self, model: str) -> TextEngine | None:
        """An engine of the host's for the configured text model; None: it has none. The agent closes it."""
        ...


class PlainHost:
    """A HostBridge for programs that have nothing to tell: mains power, a network that is always there, no engines."""

    secrets: SecretStore | None = None

    def state(self) -> HostState:
        return HostState()

    def watch(self, on_change: Callable[[], None]) -> Callable[[], None]:
        return lambda: None

    def hold_awake(self, on: bool) -> None:
        """Such a host does not sleep."""

    def hold_multicast(self, on: bool) -> None:
        """Such a host drops nothing."""

    def browse(self, service_type: str, seconds: float) -> Sequence[Found]:
        return ()

    def runtimes(self) -> Mapping[str, TensorRuntime]:
        return {}

    def text_engine(self, model: str) -> TextEngine | None:
        return None

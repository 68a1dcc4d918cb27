"""What a device is and what it was measured to do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from attrs import field, frozen

PROFILE_SCHEMA = "midstream.profile/1.0"

Power = Literal["mains", "battery"]


@frozen
class Measured:
    """One measured figure of one model on one engine.

    what: `load`, `whole`, `head:<cut>:<codec>`, `prefill`, `decode`, `memory_bandwidth`. median_s and spread_s (half
    the inter-quartile range) are seconds of one run; per_token_s divides them by the tokens of the run where that
    means something. For memory_bandwidth a run moves one GiB.
    """

    digest: str
    engine: str
    threads: int
    what: str
    median_s: float
    spread_s: float
    per_token_s: float | None = None


@frozen
class DeviceProfile:
    """One device: facts, engines and measurements. None means unknown, never a guess.

    memory_bytes: what this process may use, cgroup limits applied. cores: CPUs this process may use (rounded up).
    key: hash over model digests, engine versions and CPU; the measurements hold for this key only.
    measured_left_out: measurements that the device has and this document has no room for.
    """

    device_id: str
    schema: str = PROFILE_SCHEMA
    labels: Mapping[str, str] = field(factory=dict)
    soc: str | None = None
    cores: int | None = None
    cpu_features: frozenset[str] = frozenset()
    memory_bytes: int | None = None
    page_bytes: int | None = None
    os: str | None = None
    npu: str | None = None
    engines: Mapping[str, str] = field(factory=dict)
    power: Power | None = None
    measured: tuple[Measured, ...] = ()
    key: str = ""
    arch: str | None = None
    accelerators: tuple[str, ...] = ()
    memory_bytes_per_s: float | None = None
    slowdown_declared: float = 1.0
    measured_left_out: int = 0

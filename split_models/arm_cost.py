"""The three arms of a tensor request and what each costs: data only."""

from __future__ import annotations

from typing import Literal

from attrs import frozen

ZSTD_SUFFIX = "+zstd"
"""After a codec's name: the same head and tail, with compressed bodies on the wire."""

DIRECT = "cloud"
"""Name of the usual link, which goes without saying."""


@frozen
class Arm:
    """Device: the whole model here. Cut: head here, tail there. Cloud: the encoded input travels."""

    kind: Literal["device", "cut", "cloud"]
    cut: str | None = None
    codec: str | None = None
    link: str | None = None

    @property
    def form(self) -> str | None:
        """The codec inside the graphs."""
        return self.codec.removesuffix(ZSTD_SUFFIX) if self.codec is not None else None

    @property
    def compressed(self) -> bool:
        """Whether bodies are compressed on the wire."""
        return self.codec is not None and self.codec.endswith(ZSTD_SUFFIX)

    def __str__(self) -> str:
        """`cloud`, `cut:017:int8`; by another way to the coordinator than the direct one `cloud@webrtc`."""
        text = f"cut:{self.cut}:{self.codec}" if self.kind == "cut" else self.kind
        return text if self.link in (None, DIRECT) else f"{text}@{self.link}"


DEVICE_ARM = Arm("device")


@frozen
class ArmCost:
    """What one request costs on one arm, link time apart.

    device_s: head, encoding, pre- and post-processing here. server_s: tail or whole model there. up_bytes, down_bytes:
    what crosses. error_ratio: measured error of the task's answer against the whole model. loaded: ready now.
    sends_input: an input of the model leaves as it came, or only moved or scaled.
    """

    arm: Arm
    device_s: float
    up_bytes: int = 0
    down_bytes: int = 0
    server_s: float = 0.0
    joules: float = 0.0
    error_ratio: float = 0.0
    loaded: bool = True
    sends_input: bool = False

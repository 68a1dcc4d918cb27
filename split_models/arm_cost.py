"""The three arms of a tensor request and what each costs: data only."""

from __future__ import annotations

from math import inf
from typing import Literal

from attrs import frozen

ZSTD_SUFFIX = "+zstd"
"""After a codec's name: the same head and tail, with compressed bodies on the wire."""

DIRECT = "cloud"
"""Name of the usual link, which goes without saying."""

HERE = "device"
"""Stands for the link of a cut whose tail ran on this device."""


@frozen
class Arm:
    """Device: the whole model here. Cut: head here, tail there. Cloud: the encoded input travels.

    A cut without a link ran both parts here: so a request ends whose tail was late. It is never chosen beforehand.
    """

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
        """`cloud`, `cut:017:int8`; by another way to the coordinator than the direct one `cloud@webrtc`; a cut whose
        tail ran here `cut:017:int8@device`.
        """
        if self.kind == "cut":
            where = "" if self.link == DIRECT else f"@{self.link or HERE}"
            return f"cut:{self.cut}:{self.codec}{where}"
        return self.kind if self.link in (None, DIRECT) else f"{self.kind}@{self.link}"


DEVICE_ARM = Arm("device")


@frozen
class ArmCost:
    """What one request costs on one arm, link time apart.

    device_s: head, encoding, pre- and post-processing here. server_s: tail or whole model there. up_bytes, down_bytes:
    what crosses. error_ratio: measured error of the task's answer against the whole model. loaded: ready now.
    sends_input: an input of the model leaves as it came, or only moved or scaled. rest_s: of a cut: seconds in which
    this device ends by itself once the head has run; None while the tail is not in memory here.
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
    rest_s: float | None = None

    @property
    def goes_on_s(self) -> float:
        """`rest_s`, infinite where this device cannot go on."""
        return inf if self.rest_s is None else self.rest_s

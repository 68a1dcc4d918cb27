"""Frames of the control channel between a gateway and the apps that use it: JSON objects in binary WebSocket frames.

Each side numbers what it sends (instructions there, results here) from 1, keeps it until the other side has
acknowledged it, and sends the rest again after a new connection; numbers at or below the last one taken are dropped.
So every instruction and every result arrives once, whoever of the two was restarted. docs/control-channel.md has the
exchange step by step.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

from attrs import define, evolve, field, frozen

from protocol.decode import check_schema, decode, encode, load_json
from protocol.errors import Full, ProtocolError

SCHEMA = "midstream.channel/1.0"
PATH = "/midstream/v1/channel"
MAX_FRAME_BYTES = 64 << 10
MAX_ENGINES = 32
MAX_NAME_CHARS = 256
MAX_WAITING = 10_000
"""Numbered frames that wait for an acknowledgement; one more is refused."""

_SESSION = re.compile(r"[0-9a-f]{32}", re.ASCII)


@frozen(kw_only=True)
class Hello:
    """First frame of the app. session: 128 random bits, chosen once and kept; received: last instruction it took."""

    type: Literal["hello"] = "hello"
    schema: str = SCHEMA
    session: str
    device: str = ""
    received: int = 0
    engines: tuple[str, ...] = ()
    models: tuple[str, ...] = ()


@frozen(kw_only=True)
class Welcome:
    """The gateway's answer. received: last result it has kept. lost: instructions that the app will not get,
    for too many waited for its acknowledgement. The app sends a frame (a beat, if it has nothing else) at least twice
    in heartbeat_s and takes a gateway that is silent for two of them for gone."""

    type: Literal["welcome"] = "welcome"
    received: int
    heartbeat_s: float
    resumed: bool = False
    lost: int = 0


@frozen(kw_only=True)
class Instruction:
    """What the app shall do.

    route: use engine `target` for `auto` from now on. switch: use `model` where no model is named; one that is in use
    already is not loaded again. warm: load `model` on engine `target` (empty: the one in use) and tell how long a
    first token took before and after.
    """

    type: Literal["instruct"] = "instruct"
    seq: int = 0
    id: str
    do: Literal["route", "switch", "warm"]
    target: str = ""
    model: str = ""
    reason: str = ""


@frozen(kw_only=True)
class Result:
    """What became of an instruction or of a request that the app ran itself. `of` names it."""

    type: Literal["result"] = "result"
    seq: int = 0
    of: str
    kind: Literal["done", "failed", "part", "answer"]
    body: Mapping[str, Any] = field(factory=dict)


@frozen(kw_only=True)
class Ack:
    """Everything up to `seq` is kept."""

    type: Literal["ack"] = "ack"
    seq: int


@frozen(kw_only=True)
class Beat:
    """Still here."""

    type: Literal["beat"] = "beat"


@frozen(kw_only=True)
class Bye:
    """This connection ends on purpose; the session stays."""

    type: Literal["bye"] = "bye"
    reason: str = ""


Frame = Hello | Welcome | Instruction | Result | Ack | Beat | Bye
_KINDS: Mapping[str, type[Any]] = {
    "hello": Hello, "welcome": Welcome, "instruct": Instruction, "result": Result, "ack": Ack, "beat": Beat, "bye": Bye,
}  # fmt: skip


def read_frame(data: bytes) -> Frame | None:
    """A frame; None for one of a kind that this release does not know. Raises ProtocolError or TooLarge."""
    raw = load_json(data, what="a control frame", max_bytes=MAX_FRAME_BYTES)
    if not isinstance(raw, Mapping) or not isinstance(raw.get("type"), str):
        raise ProtocolError("a control frame is no object with a type", field="type")
    kind = _KINDS.get(raw["type"])
    if kind is None:
        return None
    frame: Frame = decode(kind, raw, what=f"a {raw['type']} frame")
    if isinstance(frame, Hello):
        _check_hello(frame)
    for name in ("seq", "received"):
        if getattr(frame, name, 0) < 0:
            raise ProtocolError(f"{name} is below 0", field=name)
    return frame


def write_frame(frame: Frame) -> bytes:
    """Raises ProtocolError for a frame that the other side would refuse."""
    data = encode(frame)
    if len(data) > MAX_FRAME_BYTES:
        raise ProtocolError(
            f"a {frame.type} frame has {len(data)} bytes, at most {MAX_FRAME_BYTES} are sent",
            next_step="send it in parts",
            field="body",
        )
    return data


def _check_hello(hello: Hello) -> None:
    check_schema(hello.schema, SCHEMA)
    if not _SESSION.fullmatch(hello.session):
        raise ProtocolError("session is not 32 hexadecimal digits", next_step="choose 128 random bits", field="session")
    for name in ("engines", "models"):
        if len(getattr(hello, name)) > MAX_ENGINES:
            raise ProtocolError(f"{name} has more than {MAX_ENGINES} names", field=name)
        if any(len(one) > MAX_NAME_CHARS for one in getattr(hello, name)):
            raise ProtocolError(f"a name in {name} has more than {MAX_NAME_CHARS} characters", field=name)
    if len(hello.device) > MAX_NAME_CHARS:
        raise ProtocolError(f"device has more than {MAX_NAME_CHARS} characters", field="device")


@define
class Outbox:
    """Numbered frames until they are acknowledged. `last` is the number given last; `lost` says how many were dropped
    without one and have not been told yet: who tells it takes that off."""

    limit: int = MAX_WAITING
    last: int = 0
    lost: int = field(default=0, init=False)
    _gap: int = field(default=0, init=False)
    """Numbers before the first that waits which were dropped since they were given out."""
    _waiting: OrderedDict[int, bytes] = field(factory=OrderedDict, init=False)

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, frame: Instruction | Result) -> bytes:
        """Number a frame and keep it; returns what to send. Raises Full."""
        if len(self._waiting) >= self.limit:
            raise Full(
                f"{self.limit} {frame.type} frames wait for an acknowledgement",
                retry_after_s=5.0,
                next_step=f"the other side sends ack with the last seq it took; look whether it is connected ({PATH})",
            )
        data = write_frame(evolve(frame, seq=self.last + 1))
        self.last += 1
        self._waiting[self.last] = data
        return data

    def drop_first(self) -> None:
        """The oldest that waits will not be sent again. The others keep their numbers until `resume` closes the gap."""
        self._waiting.popitem(last=False)
        self.lost += 1
        self._gap += 1

    def keep(self, wanted: Callable[[Frame], bool]) -> None:
        """Drop what is not wanted any more, after `resume` and before the rest is sent again: it is numbered anew."""
        first = self.last - len(self._waiting)
        frames = [read_frame(data) for data in self._waiting.values()]
        kept = [frame for frame in frames if frame is not None and wanted(frame)]
        if len(kept) < len(frames):
            self._number(kept, first)

    def acknowledge(self, seq: int) -> None:
        """Forget everything up to `seq`. A number that was never given is ignored."""
        gap = min(self._gap, max(0, self.last - len(self._waiting) - seq))
        self.lost = max(0, self.lost - (self._gap - gap))  # it took them before they were dropped
        self._gap = gap
        while self._waiting and next(iter(self._waiting)) <= seq:
            self._waiting.popitem(last=False)

    def resume(self, received: int) -> None:
        """The other side took everything up to `received`. What waits follows that number without a gap, also when
        the other side has forgotten numbers that it took once."""
        first = self.last - len(self._waiting)
        if first - self._gap <= received <= self.last:
            self.acknowledge(received)
        if received < first or received > self.last:
            self.renumber(received)

    def renumber(self, received: int) -> None:
        """Everything that waits is new to the other side, which counts from `received`."""
        self._number([read_frame(data) for data in self._waiting.values()], received)

    def _number(self, frames: Iterable[Frame | None], received: int) -> None:
        self._waiting.clear()
        self.last, self._gap = received, 0
        for frame in frames:
            assert isinstance(frame, (Instruction, Result))
            self.put(frame)

    def waiting(self) -> Sequence[bytes]:
        """What to send again on a new connection, in order."""
        return tuple(self._waiting.values())

    def numbered(self, after: int) -> Sequence[tuple[int, bytes]]:
        """The same with their numbers, those above `after`."""
        return tuple((number, data) for number, data in self._waiting.items() if number > after)

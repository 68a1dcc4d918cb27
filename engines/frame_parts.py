"""Tensor messages in pieces: how one leaves in frames and how its frames become tensors again. No I/O."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence

from attrs import define, field

from protocol import zstd
from protocol.errors import ProtocolError
from protocol.tensor_frames import LAST, WAITED, Answer, Ask, Data, TensorHead, encode, tensors_of
from protocol.tensors import Tensor

FRAGMENT_BYTES = 256 << 10
"""A small message waits for at most this much of a large one."""

LARGE_BYTES = 16 << 10
"""From here on a message tells a rate: a request by its acknowledgement, an answer by its head, which leaves first."""

FAIR_PART = 4
"""One frame in this many belongs to the oldest message, so that many small ones never starve a large one."""


def views_of(tensors: Sequence[Tensor]) -> deque[memoryview]:
    """The data of tensors as bytes, not copied."""
    return deque(memoryview(tensor.data).cast("B") for tensor in tensors if tensor.size_bytes)


def pack(tensors: Sequence[Tensor]) -> bytes:
    """All data in one zstd frame. Blocking, about 2 ms per MB."""
    return zstd.compress_tensors(b"", tensors)


@define(eq=False)
class Outgoing:
    """One message on its way out.

    views: its data. head: makes the first frame around the data it carries, at the moment it leaves. timed: where the
    data is large, the head goes before it, so that the far end can tell how long it took. on_begin and on_end are told
    the bytes that the sender had sent before the first and after the last frame.
    """

    request: int
    head: Callable[[bytes | memoryview], Ask | Answer]
    views: deque[memoryview]
    timed: bool = False
    on_begin: Callable[[int], None] = lambda sent_bytes: None
    on_end: Callable[[int], None] = lambda sent_bytes: None
    begun: bool = False
    waited: bool = False
    left_bytes: int = 0

    def __attrs_post_init__(self) -> None:
        self.left_bytes = sum(len(view) for view in self.views)

    def frame(self, room_bytes: int) -> tuple[bytes, int]:
        """The next frame with at most `room_bytes` of data, and how much it took."""
        alone = self.timed and not self.begun and self.left_bytes >= LARGE_BYTES
        data = b"" if alone else self._take(min(room_bytes, FRAGMENT_BYTES))
        flags = (LAST if self.left_bytes == 0 else 0) | (WAITED if self.waited else 0)
        part = Data(data) if self.begun else self.head(data)
        self.begun = True
        return encode(self.request, part, flags), len(data)

    def _take(self, size_bytes: int) -> bytes | memoryview:
        parts: list[memoryview] = []
        wanted = size_bytes
        while wanted and self.views:
            view = self.views.popleft()
            if len(view) > wanted:
                self.views.appendleft(view[wanted:])
                view = view[:wanted]
            parts.append(view)
            wanted -= len(view)
        self.left_bytes -= size_bytes - wanted
        return parts[0] if len(parts) == 1 else b"".join(parts)


class OutgoingQueue:
    """Messages by what is left of them, the shortest first: equal ones leave in order, small ones overtake large ones.

    (L. Schrage, "A proof of the optimality of the shortest remaining processing time discipline", 1968.)
    """

    def __init__(self) -> None:
        self._messages: dict[int, Outgoing] = {}
        self._heap: list[tuple[int, int, Outgoing]] = []
        self._count = 0
        self._turn = 0

    def __len__(self) -> int:
        return len(self._messages)

    def add(self, message: Outgoing) -> None:
        self._messages[message.request] = message
        self._push(message)

    def drop(self, request: int) -> Outgoing | None:
        """Take a message out, sent in part or not at all."""
        return self._messages.pop(request, None)

    def next(self) -> Outgoing | None:
        """The message whose turn it is; give it back with `back` unless it is done."""
        if not self._messages:
            return None
        self._turn += 1
        if self._turn % FAIR_PART == 0:
            return next(iter(self._messages.values()))
        while True:
            left_bytes, _, message = self._heap[0]
            if self._messages.get(message.request) is message and left_bytes == message.left_bytes:
                return message
            heapq.heappop(self._heap)

    def back(self, message: Outgoing, done: bool) -> None:
        """After a frame of `message` was taken."""
        if self._messages.get(message.request) is not message:
            return
        if done:
            del self._messages[message.request]
        else:
            self._push(message)

    def stalled(self) -> None:
        """Nothing may leave now: messages sent in part will carry that mark."""
        for message in self._messages.values():
            message.waited = message.waited or message.begun

    def _push(self, message: Outgoing) -> None:
        self._count += 1
        heapq.heappush(self._heap, (message.left_bytes, self._count, message))


@define(eq=False)
class Incoming:
    """One message on its way in; memory grows with what has arrived, never with what was announced.

    total_bytes: on the wire. room_bytes: what it counts for, the larger of its packed and its unpacked length.
    """

    heads: tuple[TensorHead, ...]
    packed_bytes: int = 0
    size_bytes: int = 0
    total_bytes: int = 0
    room_bytes: int = 0
    got_bytes: int = 0
    _parts: list[bytes | memoryview] = field(factory=list)

    def __attrs_post_init__(self) -> None:
        self.size_bytes = sum(head.size_bytes for head in self.heads)
        self.total_bytes = self.packed_bytes or self.size_bytes
        self.room_bytes = max(self.packed_bytes, self.size_bytes)

    def add(self, data: bytes | memoryview, flags: int) -> bool:
        """Take the next bytes; True when the message is whole. Raises ProtocolError when the lengths do not add up."""
        self.got_bytes += len(data)
        if self.got_bytes > self.total_bytes:
            raise ProtocolError(f"more data than the {self.total_bytes} bytes announced", field="data")
        if len(data):
            self._parts.append(data)
        last = bool(flags & LAST)
        if last and self.got_bytes < self.total_bytes:
            raise ProtocolError(f"ends after {self.got_bytes} of {self.total_bytes} bytes", field="data")
        return last

    def tensors(self) -> tuple[Tensor, ...]:
        """The whole message. Packed data takes about 2 ms per MB, and never more memory than was announced.

        Raises BadRequest when shape and length of a tensor do not agree, ProtocolError or TooLarge for packed data that
        is damaged or of another length.
        """
        whole = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts.clear()
        if self.packed_bytes:
            whole = zstd.decompress(bytes(whole), self.size_bytes)
            if len(whole) != self.size_bytes:
                raise ProtocolError(f"unpacks to {len(whole)} bytes, {self.size_bytes} were announced", field="data")
        return tensors_of(self.heads, memoryview(whole))

"""What is known of exchanges while they run, and the TransferSamples that they leave behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

from attrs import define

from protocol.clock import Clock
from protocol.events import TransferSample

Sink = Callable[[TransferSample], None]

LARGE_REPLY_BYTES = 16 << 10
"""A reply of this size or more is a sample of the way down."""


def _unknown() -> None:
    return None


@define(eq=False)
class Transfer:
    """One exchange. Times are monotonic seconds; `sending_s` is None until its first byte may leave.

    moved: bytes that the peer's system has acknowledged so far; None where nobody tells.
    """

    size_bytes: int
    started_s: float
    idle_before_s: float
    sending_s: float | None = None
    moved: Callable[[], int | None] = _unknown


@define(eq=False)
class Receipt:
    """A large answer while it comes. size_bytes: as announced."""

    size_bytes: int
    started_s: float
    moved_bytes: int = 0


T = TypeVar("T", bound=Transfer)


class TransferLog(Generic[T]):
    """The transfers of one link. `seconds` of its samples are wire time: what the peer says it worked is taken out.

    make: from size, beginning, and the idle time before it.
    """

    def __init__(self, link: str, sink: Sink, clock: Clock, make: Callable[[int, float, float], T]) -> None:
        self._link = link
        self._sink = sink
        self._clock = clock
        self._make = make
        self._running: dict[int, T] = {}
        self._receiving: dict[int, Receipt] = {}
        self._last_end_s: float | None = None

    @contextmanager
    def transfer(self, size_bytes: int) -> Iterator[T]:
        """One exchange from its beginning to its end."""
        now_s = self._clock()
        idle_s = 0.0 if self._running or self._last_end_s is None else max(0.0, now_s - self._last_end_s)
        transfer = self._make(size_bytes, now_s, idle_s)
        self._running[id(transfer)] = transfer
        try:
            yield transfer
        finally:
            self._running.pop(id(transfer), None)
            self._last_end_s = self._clock()

    def sending(self, transfer: T) -> None:
        """Its first byte may leave now."""
        transfer.sending_s = self._clock()

    def answered(self, transfer: T, server_s: float) -> None:
        """The answer has begun: the way up has been measured."""
        if transfer.sending_s is not None:
            self._sink(self._up(transfer, max(self._clock() - transfer.sending_s - server_s, 0.0), server_s))
        self._running.pop(id(transfer), None)

    @contextmanager
    def receipt(self, size_bytes: int, began_s: float) -> Iterator[Receipt]:
        """A reply's body on its way; a large one that is given up took at least this long."""
        receipt = Receipt(size_bytes, began_s)
        if size_bytes >= LARGE_REPLY_BYTES:
            self._receiving[id(receipt)] = receipt
        try:
            yield receipt
        except BaseException:
            if id(receipt) in self._receiving:
                self._sink(self._down(size_bytes, began_s, receipt.moved_bytes))
            raise
        finally:
            self._receiving.pop(id(receipt), None)

    def arrived(self, size_bytes: int, began_s: float) -> None:
        """A reply's body that began to arrive at `began_s` is whole."""
        if size_bytes >= LARGE_REPLY_BYTES:
            self._sink(self._down(size_bytes, began_s))

    def abandoned(self, transfer: T) -> None:
        """It ended without an answer: it took at least this long."""
        if transfer.sending_s is not None and id(transfer) in self._running:
            self._sink(self._up(transfer, self._clock() - transfer.sending_s, complete=False))

    def under_way(self) -> TransferSample | None:
        """The oldest transfer that is being sent and has not been answered, or else the oldest answer that has not come
        whole; `seconds` is its age.
        """
        sending = [(t.sending_s, t) for t in self._running.values() if t.sending_s is not None]
        if not sending:
            receipt = next(iter(self._receiving.values()), None)
            return self._down(receipt.size_bytes, receipt.started_s, receipt.moved_bytes) if receipt else None
        began_s, oldest = min(sending, key=lambda pair: pair[0])
        return self._up(oldest, self._clock() - began_s, complete=False)

    def _up(self, transfer: T, seconds: float, server_s: float = 0.0, *, complete: bool = True) -> TransferSample:
        return TransferSample(
            at_s=self._clock(), link=self._link, direction="up", size_bytes=transfer.size_bytes, seconds=seconds,
            server_s=server_s, idle_before_s=transfer.idle_before_s, complete=complete,
            moved_bytes=None if complete else transfer.moved(),
        )  # fmt: skip

    def _down(self, size_bytes: int, began_s: float, moved_bytes: int | None = None) -> TransferSample:
        """moved_bytes: of one that has not come whole."""
        now_s = self._clock()
        return TransferSample(
            at_s=now_s, link=self._link, direction="down", size_bytes=size_bytes, seconds=now_s - began_s,
            complete=moved_bytes is None, moved_bytes=moved_bytes,
        )  # fmt: skip

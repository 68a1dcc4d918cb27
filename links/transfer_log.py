"""What is known of exchanges while they run, and the TransferSamples that they leave behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from attrs import define

from protocol.clock import Clock
from protocol.events import TransferSample

Sink = Callable[[TransferSample], None]

LARGE_REPLY_BYTES = 16 << 10
"""A reply of this size or more is a sample of the way down."""


@define(eq=False)
class Transfer:
    """One exchange. Times are monotonic seconds; `sending_s` is None until its first byte may leave."""

    size_bytes: int
    idle_before_s: float
    sending_s: float | None = None


class TransferLog:
    """The transfers of one link. `seconds` of its samples are wire time: what the peer says it worked is taken out."""

    def __init__(self, link: str, sink: Sink, clock: Clock) -> None:
        self._link = link
        self._sink = sink
        self._clock = clock
        self._running: dict[int, Transfer] = {}
        self._last_end_s: float | None = None

    @contextmanager
    def transfer(self, size_bytes: int) -> Iterator[Transfer]:
        """One exchange from its beginning to its end."""
        now_s = self._clock()
        idle_s = 0.0 if self._running or self._last_end_s is None else max(0.0, now_s - self._last_end_s)
        transfer = Transfer(size_bytes, idle_s)
        self._running[id(transfer)] = transfer
        try:
            yield transfer
        finally:
            self._running.pop(id(transfer), None)
            self._last_end_s = self._clock()

    def sending(self, transfer: Transfer) -> None:
        """Its first byte may leave now."""
        transfer.sending_s = self._clock()

    def answered(self, transfer: Transfer, server_s: float) -> None:
        """The answer has begun: the way up has been measured."""
        if transfer.sending_s is not None:
            self._sink(self._up(transfer, max(self._clock() - transfer.sending_s - server_s, 0.0), server_s))
        self._running.pop(id(transfer), None)

    def arrived(self, size_bytes: int, began_s: float) -> None:
        """A reply's body that began to arrive at `began_s` is whole."""
        if size_bytes >= LARGE_REPLY_BYTES:
            now_s = self._clock()
            self._sink(
                TransferSample(
                    at_s=now_s, link=self._link, direction="down", size_bytes=size_bytes, seconds=now_s - began_s
                )
            )

    def abandoned(self, transfer: Transfer) -> None:
        """It ended without an answer: it took at least this long."""
        if transfer.sending_s is not None and id(transfer) in self._running:
            self._sink(self._up(transfer, self._clock() - transfer.sending_s, complete=False))

    def under_way(self) -> TransferSample | None:
        """The oldest transfer that is being sent and has not been answered; `seconds` is its age."""
        sending = [(t.sending_s, t) for t in self._running.values() if t.sending_s is not None]
        if not sending:
            return None
        began_s, oldest = min(sending, key=lambda pair: pair[0])
        return self._up(oldest, self._clock() - began_s, complete=False)

    def _up(
        self, transfer: Transfer, seconds: float, server_s: float = 0.0, *, complete: bool = True
    ) -> TransferSample:
        return TransferSample(
            at_s=self._clock(), link=self._link, direction="up", size_bytes=transfer.size_bytes, seconds=seconds,
            server_s=server_s, idle_before_s=transfer.idle_before_s, complete=complete,
        )  # fmt: skip

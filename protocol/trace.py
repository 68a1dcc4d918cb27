"""W3C Trace Context: the `traceparent` header, and what one request's trace is. Randomness is an argument.

traceparent = version "-" trace-id "-" parent-id "-" flags          https://www.w3.org/TR/trace-context/
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from attrs import evolve, frozen

HEADER = "traceparent"
RANDOM_BYTES = 24
"""What a new trace takes: 16 for its id, 8 for its first span."""

MAX_CHARS = 256
"""A longer header is none of ours, whatever a later version may add."""

_FORM = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.DOTALL)
_NO_TRACE, _NO_SPAN = "0" * 32, "0" * 16


@frozen
class TraceContext:
    """A span by its ids, lower-case hex. sampled: whoever began the trace records it. parent_id: the span that asked
    for this one; empty: this one began the trace."""

    trace_id: str
    span_id: str
    sampled: bool = True
    parent_id: str = ""

    @property
    def header(self) -> str:
        """As `traceparent` carries it to whatever is asked on behalf of this span."""
        return f"00-{self.trace_id}-{self.span_id}-{'01' if self.sampled else '00'}"


_UNDER: ContextVar[TraceContext | None] = ContextVar("trace", default=None)


@contextmanager
def within(span: TraceContext | None) -> Iterator[None]:
    """What this task and those that it begins do is done on behalf of `span`; None: of no trace."""
    token = _UNDER.set(span)
    try:
        yield
    finally:
        _UNDER.reset(token)


def present() -> TraceContext | None:
    """The span on whose behalf this task works."""
    return _UNDER.get()


def parsed(header: str) -> TraceContext | None:
    """What a `traceparent` says; None for an empty or malformed one, which is then as if it were not there.

    Versions above 00 may have more after the flags; version ff and ids of zeros are not valid.

    >>> parsed("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01").span_id
    'b7ad6b7169203331'
    """
    found = _FORM.fullmatch(header) if len(header) <= MAX_CHARS else None
    if found is None:
        return None
    version, trace_id, span_id, flags, more = found.groups()
    if version == "ff" or (version == "00" and more) or trace_id == _NO_TRACE or span_id == _NO_SPAN:
        return None
    return TraceContext(trace_id, span_id, bool(int(flags, 16) & 1))


def entered(header: str, random: bytes) -> TraceContext:
    """The span of a request that came with this header: in its trace, or the first one of a new trace.

    random: RANDOM_BYTES of chance.
    """
    above = parsed(header) if header else None
    span_id = _id(random[16:24])
    if above is None:
        return TraceContext(_id(random[:16]), span_id)
    return evolve(above, span_id=span_id, parent_id=above.span_id)


def child(above: TraceContext, random: bytes) -> TraceContext:
    """A span within `above`. random: 8 bytes of chance."""
    return evolve(above, span_id=_id(random[:8]), parent_id=above.span_id)


def _id(random: bytes) -> str:
    """Hex that is not all zeros."""
    return random.hex() if any(random) else "1".rjust(2 * len(random), "0")

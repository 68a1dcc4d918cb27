"""What a front door's API makes of an answer: the port between delivery and the wire forms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from gateway.answer import Answer
from gateway.stops import Piece
from protocol.errors import MidstreamError


class Wire(Protocol):
    """One answer in one API's form. A stream is begin, pieces, end; or, when it is cut, an error and nothing after."""

    @property
    def headers(self) -> Mapping[str, str]:
        """Of a stream; the content type among them."""
        ...

    @property
    def ping(self) -> bytes:
        """What clients pass over, for a stream that is silent."""
        ...

    def begin(self, answer: Answer) -> bytes:
        """Before the first piece, or before the end of an answer without any."""
        ...

    def piece(self, answer: Answer, piece: Piece) -> bytes: ...

    def end(self, answer: Answer) -> bytes:
        """After the last piece: finish reason, usage, the mark of a whole stream."""
        ...

    def error(self, err: MidstreamError) -> bytes:
        """Instead of the end."""
        ...

    def whole(self, answer: Answer, pieces: Sequence[Piece]) -> bytes:
        """The body of an answer that is not streamed."""
        ...

"""Static settings of the text way, the same for both houses. What may change at run time is policy."""

from __future__ import annotations

from attrs import frozen


@frozen
class GatewaySettings:
    """Bounds of the text way.

    max_body_bytes: larger request bodies are refused before they are read.
    max_concurrent: requests under way at once; one more gets 503 with Retry-After.
    deadline_s: a whole request may take this long.
    ahead_tokens: how far an engine may generate past what the client has taken.
    hold_headers_s: a streamed answer's headers wait this long for the first content, so that a failure before it still
        gets its own status; then they go out with comment pings.
    ping_every_s: a silent stream carries a comment line this often (load balancers cut silent ones at 60 s).
    max_losses: an answer survives this many lost engines; more means that something else is wrong.
    drain_s: how long stop() lets running answers end before it closes them.
    """

    max_body_bytes: int = 4 << 20
    max_concurrent: int = 64
    deadline_s: float = 600.0
    ahead_tokens: int = 32
    hold_headers_s: float = 15.0
    ping_every_s: float = 10.0
    max_losses: int = 8
    drain_s: float = 5.0

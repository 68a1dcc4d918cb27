"""What a device keeps of the networks it has used: transfers with their ages, never with monotonic stamps."""

from __future__ import annotations

from attrs import frozen

from protocol.events import Direction

LINKS_SCHEMA = "midstream.links/1.0"


@frozen
class PastTransfer:
    """size_bytes took `seconds`; it ended `age_s` before the document was written."""

    size_bytes: int
    seconds: float
    age_s: float


@frozen
class PastWay:
    """One direction, oldest transfer first. residuals: seconds taken over seconds predicted, oldest first."""

    direction: Direction
    transfers: tuple[PastTransfer, ...] = ()
    residuals: tuple[float, ...] = ()


@frozen
class PastRoundTrip:
    """Smoothed round trip, its mean deviation and the least seen, in seconds."""

    smoothed_s: float
    deviation_s: float
    least_s: float
    samples: int
    age_s: float


@frozen
class PastLink:
    """All that was learnt of one link over one network."""

    ways: tuple[PastWay, ...] = ()
    round_trip: PastRoundTrip | None = None


@frozen
class KeptLink:
    """link: its name. way: the far end and the network it was reached over. age_s: since it was last in use."""

    link: str
    way: str
    age_s: float
    past: PastLink


@frozen
class LinksDocument:
    """The newest first. clock_trusted: whether `saved_unix_s` means anything."""

    saved_unix_s: float
    clock_trusted: bool
    links: tuple[KeptLink, ...] = ()
    schema: str = LINKS_SCHEMA

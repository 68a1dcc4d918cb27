"""Whether an answer may be given on in a provider's own bytes, and by whom."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from attrs import frozen

from engines.port import RelayingEngine
from gateway.flights import Flights
from gateway.places import Running
from gateway.targets import Target, TargetBoard
from protocol.text import TextRequest


@frozen
class RelayPorts:
    """What relayed answers share. hold: takes a place and returns the way to give it back; raises Full."""

    board: TargetBoard
    flights: Flights[bytes]
    hold: Callable[[Running], Callable[[], None]]


@frozen
class Relay:
    """What may be asked for bytes, in this order. request: as the targets see it."""

    dialect: str
    targets: tuple[Target, ...]
    request: TextRequest
    ports: RelayPorts


def relay_of(
    request: TextRequest,
    stream: bool,
    starts: Sequence[Target],
    eligible: Sequence[Target],
    ports: RelayPorts,
) -> Relay | None:
    """The relay, if all who may answer are providers of one wire form and none could take over a broken stream."""
    engines = [target.relay for target in eligible if target.relay is not None]
    if not starts or len(engines) != len(eligible):
        return None
    dialect = engines[0].codec.dialect
    if any(engine.codec.dialect != dialect for engine in engines[1:]):
        return None
    if (request.tools or request.response_format) and not all(_takes_tools(engine) for engine in engines):
        return None  # calls may have to be found in the text
    if stream and len(eligible) > 1 and any(_continues(engine) for engine in engines):
        return None
    return Relay(dialect, tuple(starts), request, ports)


def _takes_tools(engine: RelayingEngine) -> bool:
    features = engine.codec.features
    return features is not None and features.tools


def _continues(engine: RelayingEngine) -> bool:
    features = engine.codec.features
    return features is None or features.continues == "text"

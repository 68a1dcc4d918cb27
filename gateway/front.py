"""All front doors of the text way: one list of routes."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.door import Door
from gateway.front_openai import OpenAIFront
from gateway.pipeline import TextWay
from links.port import Route
from protocol.clock import WallClock


class Front:
    """The routes of the text way."""

    def __init__(self, way: TextWay, wall: WallClock) -> None:
        self._door = Door(way, wall)

    def routes(self) -> Sequence[Route]:
        """What a house mounts."""
        return tuple(OpenAIFront(self._door).routes())

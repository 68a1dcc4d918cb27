"""All front doors of the text way: one list of routes."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.door import Door
from gateway.front_anthropic import AnthropicFront
from gateway.front_ollama import OllamaFront
from gateway.front_openai import OpenAIFront
from gateway.front_route import RouteFront
from gateway.pipeline import TextWay
from links.port import Route
from protocol.clock import WallClock


class Front:
    """The routes of the text way."""

    def __init__(self, way: TextWay, wall: WallClock) -> None:
        self._door = Door(way, wall)

    def routes(self) -> Sequence[Route]:
        """What a house mounts."""
        doors = (OpenAIFront, AnthropicFront, OllamaFront, RouteFront)
        return tuple(route for door in doors for route in door(self._door).routes())

"""Intent and complexity of a prompt from one look at its features: marks are lanes beside the weights. Pure."""

from __future__ import annotations

from attrs import frozen

from gateway import complexity
from gateway.intents import LANE_BITS, Intent, IntentModel, lanes_of
from gateway.prompt_features import features


@frozen
class Seen:
    """What was seen in a text. marks: how many of each of complexity.KINDS."""

    intent: Intent
    marks: tuple[int, ...]
    chinese: bool


class PromptReader:
    """One table for both, so that every feature is looked up once."""

    def __init__(self, model: IntentModel) -> None:
        self.model = model
        self._intents = len(model.names)
        self._lanes = self._intents + len(complexity.KINDS)
        table = dict(model.packed)
        for key, kinds in complexity.mark_hashes().items():
            for kind in kinds:
                table[key] = table.get(key, 0) + (1 << LANE_BITS * (self._intents + kind))
        self._packed = table.get

    def read(self, text: str) -> Seen:
        """Takes some tens of microseconds, whatever the text's length."""
        found = features(text)
        lanes = lanes_of(sum(filter(None, map(self._packed, found.hashes))), self._lanes)
        intent = self.model.likeliest(lanes[: self._intents], found.tokens)
        return Seen(intent, lanes[self._intents :], found.chinese)

"""Intent and complexity of a prompt from one look at its features: marks are lanes beside the weights. Pure."""

from __future__ import annotations

from attrs import define

from gateway import complexity
from gateway.intents import LANE_BITS, Intent, IntentModel, lanes_of, row_of
from gateway.prompt_features import HEAD, TAIL, WIDE_HEAD, WIDE_TAIL, features

HARD_HEAD, HARD_TAIL = 120, 90
"""Characters in which a hard mark is found: more than features read, since it keeps a prompt from the device."""

_HARD, _MOST = complexity.HARD, complexity.MOST_HARD

assert complexity.MOST_HARD < WIDE_TAIL < WIDE_HEAD, (
    "a mark reaches from what features leave unread into what they read"
)


@define
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
        self._row = row_of(self._intents + len(complexity.KINDS))
        table = dict(model.packed)
        for key, kinds in complexity.mark_keys().items():
            for kind in kinds:
                table[key] = table.get(key, 0) + (1 << LANE_BITS * (self._intents + kind))
        self._known = table.keys()
        self._weight = table.__getitem__

    def read(self, text: str) -> Seen:
        """Takes a dozen microseconds, whatever the text's length."""
        found = features(text)
        lanes = lanes_of(sum(map(self._weight, self._known & found.keys())), self._row)
        intent = self.model.likeliest(lanes[: self._intents], found.tokens)
        marks = lanes[self._intents :]
        if not marks[_HARD] and len(text) > HEAD + TAIL and _says_hard(text, found.chinese):
            marks = (*marks[:_HARD], 1, *marks[_HARD + 1 :])
        return Seen(intent, marks, found.chinese)


def _says_hard(text: str, chinese: bool) -> bool:
    """Whether a hard mark stands at the ends of a text, where features have none.

    One that is there reaches into what features leave unread; most texts have nothing there that could be one.
    """
    if len(text) <= HARD_HEAD + HARD_TAIL:
        return complexity.may_say_hard(text) and complexity.says_hard(text)
    head, tail = (WIDE_HEAD, WIDE_TAIL) if chinese else (HEAD, TAIL)
    unread = f"{text[head - _MOST : HARD_HEAD]} {text[-HARD_TAIL : _MOST - tail]}"
    return complexity.may_say_hard(unread) and complexity.says_hard(f"{text[:HARD_HEAD]} {text[-HARD_TAIL:]}")

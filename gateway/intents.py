"""Which intent a prompt has: a linear model over words and pairs, small enough for the path of every request. Pure.

The model file is made by `python -m benchmarks.train_intents`. Its id names it: a threshold holds for one id only.

The weights of all intents for a feature are packed into one integer, a lane of bits each, so that one addition adds
them all: a prompt is classified by one sum over the features that the model knows, each counted once.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from functools import cache
from math import exp, sqrt
from pathlib import Path
from typing import NamedTuple

from attrs import field, frozen

from gateway.prompt_features import MAX_FEATURES, Features, Key, key_of
from protocol.errors import ConfigError

MODEL_FILE = Path(__file__).with_name("intents.bin")

MAGIC = b"midstream-intents-2\n"

LANE_BITS = 16

OFFSET = 128
"""Added to each weight, so that lanes never borrow; all lanes get the same, so that differences stay."""

assert MAX_FEATURES * (OFFSET + 127) < 1 << LANE_BITS, "a lane has room for every feature of a prompt"


class Intent(NamedTuple):
    """The likeliest intent, and its probability."""

    name: str
    probability: float


@frozen
class IntentModel:
    """names: of the intents. packed: weights by feature. scale: logits per unit of weight. threshold: the least
    probability that was right often enough where it was fitted. id: of names and weights."""

    names: tuple[str, ...]
    packed: Mapping[Key, int] = field(repr=False)
    scale: float
    threshold: float
    id: str

    def classify(self, features: Features) -> Intent:
        """The likeliest intent of a prompt."""
        return self.likeliest(lanes_of(total(self.packed, features), row_of(len(self.names))), features.tokens)

    def likeliest(self, lanes: Sequence[int], tokens: int) -> Intent:
        """By a softmax over the lanes' sums; texts of any length have logits of one size."""
        best = max(lanes)
        unit = self.scale / sqrt(tokens or 1)
        likely = sum([exp(unit * (lane - best)) for lane in lanes])
        return Intent(self.names[lanes.index(best)], 1.0 / likely)


def total(packed: Mapping[Key, int], features: Features) -> int:
    """Sum over the features that `packed` knows, each once: a document that repeats a word does not outshout the rest.

    A set of those is made first, for most features of a prompt are unknown, and so pass without a call each.
    """
    return sum(map(packed.__getitem__, packed.keys() & features.keys()))


def row_of(count: int) -> struct.Struct:
    """The form of `count` lanes; what is unpacked by it must have no more in it."""
    return struct.Struct(f"<{count}H")


def lanes_of(total: int, row: struct.Struct) -> tuple[int, ...]:
    """The lanes of a sum of packed integers."""
    return row.unpack(total.to_bytes(row.size, "little"))


def write(names: Sequence[str], weights: Mapping[str, Sequence[int]], scale: float, threshold: float) -> bytes:
    """The model file. weights: for each feature's phrase one of -127..127 per intent."""
    phrases = sorted(weights)
    lines = "\n".join(phrases).encode()
    head = {"names": list(names), "scale": scale, "threshold": threshold, "phrases_bytes": len(lines)}
    rows = b"".join(struct.pack(f"{len(names)}b", *weights[phrase]) for phrase in phrases)
    return MAGIC + json.dumps(head).encode() + b"\n" + lines + rows


def read(data: bytes) -> IntentModel:
    """Raises ConfigError when `data` is no model file."""
    try:
        if not data.startswith(MAGIC):
            raise ValueError("another form")
        end = data.index(b"\n", len(MAGIC))
        head = json.loads(data[len(MAGIC) : end])
        names, rows_at = tuple(head["names"]), end + 1 + int(head["phrases_bytes"])
        phrases = data[end + 1 : rows_at].decode().split("\n")
        rows = struct.iter_unpack(f"{len(names)}b", data[rows_at:])
        packed = {key_of(phrase): _pack(row) for phrase, row in zip(phrases, rows, strict=True)}
        body = hashlib.sha256("\n".join(names).encode() + data[end:]).hexdigest()
        return IntentModel(names, packed, float(head["scale"]), float(head["threshold"]), f"words-{body[:12]}")
    except (ValueError, KeyError, TypeError, IndexError, struct.error) as err:
        raise ConfigError(f"the intent model cannot be read: {err}", next_step="install midstream again") from err


@cache
def default_model() -> IntentModel:
    """The model that comes with the package. Raises ConfigError."""
    return read(MODEL_FILE.read_bytes())


def _pack(row: Sequence[int]) -> int:
    return sum((weight + OFFSET) << (LANE_BITS * lane) for lane, weight in enumerate(row))

"""Fits the intent model of the gateway: a linear model over words and pairs, from our own prompts and templates.

Logistic regression by full-batch Adam, seeded, so that the same data give the same file. The strength of the
penalty and the threshold under which the model abstains come from folds of the training half; the test half is looked
at once, at the end.

    python -m benchmarks.train_intents            # writes gateway/intents.bin
    python -m benchmarks.train_intents --check    # only says whether the file in the tree is the one this makes
    python -m benchmarks.train_intents --sentences  # the head for sentence vectors; needs minilm-int8 and its tokenizer
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from attrs import frozen

from benchmarks.report import arguments
from benchmarks.routing_prompts import Labelled, filler, generated, halves, labelled
from engines.store import default_store
from gateway import intents, second_opinion
from gateway.memory import TextMemory
from gateway.memory_settings import MemorySettings
from gateway.prompt_features import Features, Key, features, phrase_of

Floats = np.ndarray[Any, np.dtype[np.float32]]
Indices = np.ndarray[Any, np.dtype[np.int64]]

SEED = 11
PER_TEMPLATE = 40
FOLDS = 3
STEPS = 80
RATE = 0.05
PENALTIES = (5e-6, 1e-5, 2e-5)
REAL_WEIGHT = 10.0
"""A labelled prompt counts as much as this many generated ones."""

ACCEPTED_ACCURACY = 0.95
"""The threshold is the least probability from which so many answers of the folds were right."""

HEAD_STEPS, HEAD_RATE, HEAD_PENALTY, HEAD_REAL_WEIGHT = 2000, 2.0, 1e-3, 6.0
HEAD_THRESHOLD = 0.2
"""Who is asked only about what the other one could not tell may be less sure."""

DOCUMENT_SHARE = 0.5
"""Of the generated prompts: they carry a document, whose words must not count."""

LEAST_COUNT = 2

LEAST_WEIGHT = 16
"""Of 127: features that weigh less for every intent are left out."""


@frozen
class Sparse:
    """Rows of few entries: features that are there, by the root of the number of tokens, as the gateway scales them.

    rows, columns, values: one item per entry, by rows. height: rows in all, those without an entry counted.
    """

    rows: Indices
    columns: Indices
    values: Floats
    height: int

    def times(self, weights: Floats) -> Floats:
        """self @ weights: [height, intents]."""
        return _summed(weights[self.columns] * self.values[:, None], self.rows, self.height)

    def transposed_times(self, slopes: Floats, width: int) -> Floats:
        """self.T @ slopes: [width, intents]."""
        order = np.argsort(self.columns, kind="stable")
        return _summed(slopes[self.rows[order]] * self.values[order, None], self.columns[order], width)


@frozen
class Fitted:
    """A linear model before it is packed. weights: [features, intents]."""

    names: tuple[str, ...]
    columns: dict[Key, int]
    weights: Floats

    def probabilities(self, texts: Sequence[str]) -> Floats:
        """[texts, intents]."""
        return _softmax(_matrix([features(text) for text in texts], self.columns).times(self.weights))


def fit(real: Sequence[Labelled], made: Sequence[Labelled], penalty: float) -> Fitted:
    """Full-batch descent on the weighted cross entropy."""
    samples = [*real, *made]
    names = tuple(sorted({sample.intent for sample in samples}))
    seen = [features(sample.text) for sample in samples]
    counts = Counter(key for one in seen for key in set(one.keys()))
    common = sorted((key for key, count in counts.items() if count >= LEAST_COUNT), key=phrase_of)
    columns = {key: at for at, key in enumerate(common)}
    inputs = _matrix(seen, columns)
    wanted = np.eye(len(names), dtype=np.float32)[[names.index(sample.intent) for sample in samples]]
    weight = np.array([REAL_WEIGHT] * len(real) + [1.0] * len(made), dtype=np.float32)
    weight /= weight.sum()
    weights = np.zeros((len(columns), len(names)), dtype=np.float32)
    mean: Any = np.zeros_like(weights)
    square: Any = np.zeros_like(weights)
    for step in range(1, STEPS + 1):
        error = (_softmax(inputs.times(weights)) - wanted) * weight[:, None]
        slope = inputs.transposed_times(error, len(columns)) + penalty * weights
        # Adam (Kingma and Ba 2015), algorithm 1: rare words learn as fast as common ones.
        mean = 0.9 * mean + 0.1 * slope
        square = 0.99 * square + 0.01 * slope * slope
        weights -= RATE * (mean / (1 - 0.9**step)) / (np.sqrt(square / (1 - 0.99**step)) + 1e-8)
    return Fitted(names, columns, weights)


def _matrix(seen: Sequence[Features], columns: dict[Key, int]) -> Sparse:
    entries = [
        (row, column, 1.0 / math.sqrt(one.tokens or 1))
        for row, one in enumerate(seen)
        for column in sorted(columns[key] for key in columns.keys() & one.keys())
    ]
    rows, places, values = zip(*entries, strict=True)
    return Sparse(np.array(rows), np.array(places), np.array(values, dtype=np.float32), len(seen))


def _summed(items: Floats, groups: Indices, count: int) -> Floats:
    """Sums of consecutive items of one group; `groups` ascends."""
    found = np.zeros((count, items.shape[1]), dtype=np.float32)
    starts = np.flatnonzero(np.diff(groups, prepend=-1))
    found[groups[starts]] = np.add.reduceat(items, starts, axis=0)
    return found


def _softmax(logits: Floats) -> Floats:
    shifted = np.exp(logits - logits.max(axis=1, keepdims=True))
    result: Floats = shifted / shifted.sum(axis=1, keepdims=True)
    return result


def chosen(real: Sequence[Labelled], made: Sequence[Labelled]) -> tuple[float, float]:
    """(penalty, threshold) by folds of the labelled training half."""
    best = (-1.0, PENALTIES[0], 1.0)
    for penalty in PENALTIES:
        scored: list[tuple[float, bool]] = []
        for fold in range(FOLDS):
            kept = [prompt for at, prompt in enumerate(real) if at % FOLDS != fold]
            asked = [prompt for at, prompt in enumerate(real) if at % FOLDS == fold]
            model = fit(kept, made, penalty)
            found = model.probabilities([prompt.text for prompt in asked])
            scored += [
                (float(row.max()), model.names[int(row.argmax())] == prompt.intent)
                for row, prompt in zip(found, asked, strict=True)
            ]
        accuracy = sum(right for _, right in scored) / len(scored)
        print(f"penalty {penalty:g}: accuracy over folds {accuracy:.3f}, threshold {threshold_of(scored):.3f}")
        best = max(best, (accuracy, penalty, threshold_of(scored)))
    return best[1], best[2]


def threshold_of(scored: Sequence[tuple[float, bool]]) -> float:
    """The least probability from which on ACCEPTED_ACCURACY of the answers are right."""
    ordered = sorted(scored, reverse=True)
    right, least = 0, 1.0
    for count, (probability, correct) in enumerate(ordered, 1):
        right += correct
        if right >= ACCEPTED_ACCURACY * count:
            least = probability
    return least


def packed(model: Fitted, threshold: float) -> bytes:
    """The model file: eight bits per weight."""
    # Only differences between intents matter: the mean of a row goes, so that eight bits hold more.
    centred = model.weights - model.weights.mean(axis=1, keepdims=True)
    scale = float(np.abs(centred).max()) / 127.0
    whole = np.rint(centred / scale).astype(int)
    kept = [(key, at) for key, at in model.columns.items() if np.abs(whole[at]).max() >= LEAST_WEIGHT]
    rows = {phrase_of(key): whole[at].tolist() for key, at in kept}
    return intents.write(model.names, rows, scale, round(threshold, 3))


def train() -> bytes:
    """The whole fit, from the data in the tree."""
    real, _ = halves(labelled())
    rng = random.Random(SEED)
    plain = list(generated(PER_TEMPLATE, SEED))
    made = [_with_document(sample, rng) if rng.random() < DOCUMENT_SHARE else sample for sample in plain]
    penalty, threshold = chosen(real, made)
    return packed(fit(real, made, penalty), threshold)


async def train_sentences() -> None:
    """Writes gateway/intents_sentences.json: a softmax head over the encoder's vectors."""
    real, _ = halves(labelled())
    samples = [*real, *generated(2, SEED)]
    with tempfile.TemporaryDirectory() as folder:
        memory = TextMemory(MemorySettings(cache="semantic", conversations=False), Path(folder), default_store())
        embedder = memory.embedder
        if embedder is None:
            raise SystemExit(memory.why)
        try:
            found = await embedder.embed([sample.text[: second_opinion.MAX_CHARACTERS] for sample in samples])
        finally:
            await memory.close()
    names = intents.default_model().names
    inputs = np.asarray(found, dtype=np.float32)
    wanted = np.eye(len(names), dtype=np.float32)[[names.index(sample.intent) for sample in samples]]
    weight = np.array([HEAD_REAL_WEIGHT] * len(real) + [1.0] * (len(samples) - len(real)), dtype=np.float32)
    weight /= weight.sum()
    rows = np.zeros((inputs.shape[1], len(names)), dtype=np.float32)
    for _ in range(HEAD_STEPS):
        rows -= HEAD_RATE * (inputs.T @ ((_softmax(inputs @ rows) - wanted) * weight[:, None]) + HEAD_PENALTY * rows)
    unit = float(np.abs(rows).max()) / 127.0
    whole = np.rint(rows.T / unit).astype(int).tolist()
    document = {"encoder": embedder.id, "names": names, "unit": unit, "threshold": HEAD_THRESHOLD, "rows": whole}
    second_opinion.HEAD_FILE.write_text(json.dumps(document, separators=(",", ":")) + "\n", encoding="utf-8")
    print(f"{embedder.id}: {len(samples)} samples, {second_opinion.HEAD_FILE.stat().st_size} bytes")


def _with_document(sample: Labelled, rng: random.Random) -> Labelled:
    document = filler(rng, rng.randint(20, 400), sample.chinese)
    text = f"{sample.text}\n{document}" if rng.random() < 0.7 else f"{document}\n{sample.text}"
    return Labelled(sample.intent, text)


def main() -> None:
    """Command line."""
    parser = arguments("Fits the intent model of the gateway.")
    parser.add_argument("--check", action="store_true", help="compare with the file in the tree, write nothing")
    parser.add_argument("--sentences", action="store_true", help="fit the head for sentence vectors instead")
    options = parser.parse_args()
    if options.sentences:
        asyncio.run(train_sentences())
        return
    data = train()
    model = intents.read(data)
    if options.check:
        print("the same" if intents.MODEL_FILE.read_bytes() == data else "different")
        return
    intents.MODEL_FILE.write_bytes(data)
    _, test = halves(labelled())
    found = [(model.classify(features(prompt.text)), prompt) for prompt in test]
    right = sum(intent.name == prompt.intent for intent, prompt in found)
    kept = [(intent, prompt) for intent, prompt in found if intent.probability >= model.threshold]
    good = sum(intent.name == prompt.intent for intent, prompt in kept)
    print(f"{model.id}: {len(model.packed)} features, {len(data)} bytes, threshold {model.threshold}")
    print(
        f"test half: {right / len(test):.3f} of {len(test)} right; "
        f"{len(kept)} are above the threshold, {good / len(kept):.3f} of them right"
    )
    for intent, prompt in found:
        if intent.name != prompt.intent:
            print(f"  {prompt.intent} taken for {intent.name} ({intent.probability:.2f}): {prompt.text[:70]}")


if __name__ == "__main__":
    main()

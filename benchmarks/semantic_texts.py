"""Questions for the semantic cache's bench: distinct ones, paraphrases, and edits that change the answer."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from pathlib import Path

from attrs import frozen

TOPICS = [
    "the garden hose",
    "a bicycle tyre",
    "my tax return",
    "a sourdough starter",
    "the office printer",
    "an old laptop",
    "a leaking tap",
    "the school timetable",
    "a rental contract",
    "a job interview",
    "the city library",
    "a camping stove",
    "my savings account",
    "a violin bow",
    "the train ticket",
    "a wedding speech",
    "a science project",
    "the kitchen scale",
    "a broken zip",
    "the dishwasher",
    "a houseplant",
    "my phone screen",
    "a cover letter",
    "the night bus",
    "a chess opening",
    "the spare key",
    "a birthday cake",
    "an electric kettle",
    "a museum visit",
    "the washing machine",
    "a fishing licence",
    "my passport",
    "the heating bill",
    "a tent",
    "a used car",
    "the neighbour's dog",
    "a language course",
    "the parking permit",
    "a coffee grinder",
    "my running shoes",
]
ACTIONS = [
    "clean",
    "repair",
    "replace",
    "store",
    "sell",
    "buy",
    "check",
    "measure",
    "explain",
    "compare",
    "choose",
    "prepare",
    "cancel",
    "renew",
    "label",
    "paint",
    "photograph",
    "insure",
    "borrow",
    "ship",
    "test",
    "organise",
    "protect",
    "describe",
]
PLACES = [
    "Paris",
    "London",
    "Madrid",
    "Vienna",
    "Oslo",
    "Cairo",
    "Lagos",
    "Lima",
    "Hanoi",
    "Delhi",
    "Perth",
    "Quito",
    "Tunis",
    "Riga",
    "Seoul",
    "Osaka",
]
DAYS = ["today", "tomorrow", "on Monday", "on Tuesday", "on Friday", "on Sunday", "this weekend"]
EXTRAS = [
    "with a small budget",
    "in a hurry",
    "for the first time",
    "without special tools",
    "in winter",
    "before moving house",
    "when nobody can help",
    "for a friend",
    "on a rainy afternoon",
    "as a beginner",
    "in a small flat",
    "after a long trip",
]

ASKING = (
    ("How do I {a} {t} {e}?", "What is the way to {a} {t} {e}?"),
    ("Can you tell me how to {a} {t} {e}?", "Tell me how I can {a} {t} {e}."),
    ("What should I know to {a} {t} {e}?", "Which things matter to {a} {t} {e}?"),
    ("Give me tips to {a} {t} {e}.", "I need some tips: {a} {t} {e}."),
    ("What is the best time to {a} {t} {e}?", "When is the best moment to {a} {t} {e}?"),
)


@frozen
class Pair:
    """A question that is kept and one that is asked; `same` says whether one answer serves both."""

    kept: str
    asked: str
    same: bool
    kind: str


def questions(count: int, seed: int) -> list[str]:
    """Distinct questions; which template, topic, action and circumstance is drawn."""
    draw = random.Random(seed)
    made: dict[str, None] = {}
    while len(made) < count:
        template = draw.choice(draw.choice(ASKING))
        topic, other = draw.choice(TOPICS), draw.choice(TOPICS)
        extra = draw.choice(EXTRAS) + draw.choice(["", f" and {draw.choice(ACTIONS)} {other} too"])
        made[template.format(a=draw.choice(ACTIONS), t=topic, e=extra)] = None
    return list(made)


def paraphrases(folder: Path | None, count: int, seed: int) -> list[Pair]:
    """Recorded pairs where a folder has them (`gptcache/pairs_part1.json`), and pairs of our own templates."""
    draw = random.Random(seed)
    pairs = []
    file = folder / "gptcache" / "pairs_part1.json" if folder is not None else None
    if file is not None and file.exists():
        for row in json.loads(file.read_text()):
            pairs.append(Pair(row["origin"], row["similar"], True, "recorded"))
    for _ in range(count):
        one, other = draw.choice(ASKING)
        fill = {"a": draw.choice(ACTIONS), "t": draw.choice(TOPICS), "e": draw.choice(EXTRAS)}
        pairs.append(Pair(one.format(**fill), other.format(**fill), True, "template"))
    return pairs


def edits(texts: list[str], seed: int) -> list[Pair]:
    """Minimal edits of each text (number, negation, name), and near misses of our own templates."""
    draw = random.Random(seed)
    names = sorted({name for text in texts for name in re.findall(r"(?<=[a-z,] )[A-Z][A-Za-z]{2,}", text)})
    pairs = []
    for text in texts:
        for kind, edit in EDITS.items():
            changed = edit(text, draw, names)
            if changed and changed != text:
                pairs.append(Pair(text, changed, False, kind))
    for _ in range(len(texts) // 2):
        template, other = draw.choice(ASKING)[0], draw.choice(ASKING)[0]
        (one, two), (topic, else_), extra = draw.sample(ACTIONS, 2), draw.sample(TOPICS, 2), draw.choice(EXTRAS)
        kept = template.format(a=one, t=topic, e=extra)
        pairs.append(Pair(kept, template.format(a=two, t=topic, e=extra), False, "action"))
        pairs.append(Pair(kept, template.format(a=one, t=else_, e=extra), False, "thing"))
        pairs.append(Pair(kept, other.format(a=two, t=topic, e=draw.choice(EXTRAS)), False, "neighbour"))
        (here, there), (day, later) = draw.sample(PLACES, 2), draw.sample(DAYS, 2)
        kept = f"What is the weather like in {here} {day}?"
        pairs.append(Pair(kept, f"What is the weather like in {there} {day}?", False, "weather"))
        pairs.append(Pair(kept, f"How is the weather in {here} {later}?", False, "weather"))
    return pairs


def _number(text: str, draw: random.Random, names: list[str]) -> str:
    found = re.search(r"\d+", text)
    if found:
        return text[: found.start()] + str(int(found.group()) % 10**9 + draw.randint(1, 9)) + text[found.end() :]
    words = text.split()
    return " ".join([*words[:-1], f"{draw.randint(2, 90)}", words[-1]]) if len(words) > 4 else ""


def _negation(text: str, draw: random.Random, names: list[str]) -> str:
    return re.sub(r"\b(is|are|can|should|will|does|do|must)\b(?! not)", r"\1 not", text, count=1)


def _name(text: str, draw: random.Random, names: list[str]) -> str:
    present = [name for name in names if re.search(rf"(?<=[a-z,] ){name}\b", text)]
    absent = [name for name in names if name.lower() not in text.lower()]
    if not present or not absent:
        return ""
    return re.sub(rf"(?<=[a-z,] ){present[0]}\b", draw.choice(absent), text)


EDITS: dict[str, Callable[[str, random.Random, list[str]], str]] = {
    "number": _number,
    "negation": _negation,
    "name": _name,
}

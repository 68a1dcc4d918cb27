"""Labelled prompts of our own, in Chinese and English, split once in two halves; templates for training only.

`routing_data/prompts.tsv` has the labelled prompts. Every second one of an intent and a language is kept for test;
nothing is fitted on those. `routing_data/templates.tsv` makes more text for training.
"""

from __future__ import annotations

import random
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from attrs import frozen

DATA = Path(__file__).with_name("routing_data")

SPLIT_SEED = 7

_SLOT = re.compile(r"\{(\w+)\}")


@frozen
class Labelled:
    """One prompt and what it asks for."""

    intent: str
    text: str

    @property
    def chinese(self) -> bool:
        """Whether it has Chinese characters."""
        return not self.text.isascii() and any("一" <= character <= "鿿" for character in self.text)


def labelled() -> list[Labelled]:
    """All labelled prompts."""
    lines = (DATA / "prompts.tsv").read_text(encoding="utf-8").splitlines()
    return [Labelled(*line.split("\t", 1)) for line in lines if line]


def halves(prompts: Sequence[Labelled], seed: int = SPLIT_SEED) -> tuple[list[Labelled], list[Labelled]]:
    """(for training, for test): the same share of every intent and language on both sides."""
    groups: dict[tuple[str, bool], list[Labelled]] = defaultdict(list)
    for prompt in prompts:
        groups[prompt.intent, prompt.chinese].append(prompt)
    rng = random.Random(seed)
    fit: list[Labelled] = []
    test: list[Labelled] = []
    for number, key in enumerate(sorted(groups)):
        group = groups[key]
        rng.shuffle(group)
        # Groups are odd: the one more goes to either side in turn.
        half = (len(group) + number % 2) // 2
        fit += group[:half]
        test += group[half:]
    return fit, test


def generated(per_template: int, seed: int) -> Iterator[Labelled]:
    """Prompts from the templates; the same ones for a seed."""
    patterns, slots = _templates()
    rng = random.Random(seed)
    for intent, pattern in patterns:
        for _ in range(per_template):
            yield Labelled(intent, _SLOT.sub(lambda slot: rng.choice(slots[slot[1]]), pattern))


def filler(rng: random.Random, tokens: int, chinese: bool) -> str:
    """Text of no meaning with about `tokens` tokens, like the documents that prompts carry."""
    if chinese:
        return "".join(rng.choice(_HAN) for _ in range(tokens))
    return " ".join(rng.choice(_WORDS) for _ in range(round(tokens * 0.75)))


def _templates() -> tuple[list[tuple[str, str]], Mapping[str, list[str]]]:
    text = (DATA / "templates.tsv").read_text(encoding="utf-8")
    above, below = text.split("\n---\n")
    patterns = [
        (intent, pattern)
        for intent, _, pattern in (line.partition("\t") for line in above.splitlines() if not line.startswith("#"))
    ]
    slots = {
        name: options.split("|") for name, _, options in (line.partition("\t") for line in below.splitlines() if line)
    }
    return patterns, slots


_WORDS = tuple(
    re.findall(
        r"\w+",
        "the of and a to in was on with for as at by from had it is that were which an this their be are has its not "
        "station river market garden winter council bridge paper window harvest engine report village company island "
        "school letter harbour street forest season record signal captain question station teacher museum valley "
        "opened moved carried became followed stood reached showed began turned built sold asked brought called grew "
        "old new long small early late northern local public several quiet heavy common former central open second",
    )
)
_HAN = (
    "的一是在不了有和人这中大为上个国我以要他时来用们生到作地于出就分对成会可主发年动同工也能下过子说产种面而方后多定行学法所民得经"
    "十三之进着等部度家电力里如水化高自二理起小物现实加量都两体制机当使点从业本去把性好应开它合还因由其些然前外天政四日那社义事平形"
)

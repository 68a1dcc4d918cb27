"""Prompts for the benchmarks of routing: of the lengths that Azure's traces have, all different, some with a history.

`azure2023/conv_part1.csv` and `code_part1.csv` (Azure Public Dataset, CC BY 4.0, from Splitwise, ISCA'24) give lengths
where their folder is named; otherwise lengths are drawn from log-normal distributions like theirs.
"""

from __future__ import annotations

import csv
import random
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path

from benchmarks.routing_prompts import Labelled, filler, generated, labelled
from protocol.chat import ChatRequest
from protocol.text import Message

CODE_SHARE = 0.3


def lengths(traces: Path | None, count: int, seed: int) -> list[int]:
    """Prompt tokens of `count` requests."""
    rng = random.Random(seed)
    if traces is not None:
        found = [_column(traces / "azure2023" / f"{name}_part1.csv") for name in ("conv", "code")]
        return [rng.choice(found[rng.random() < CODE_SHARE]) for _ in range(count)]
    # Medians and 90 % quantiles of the two traces.
    return [
        round(rng.lognormvariate(*((7.19, 1.02) if rng.random() < CODE_SHARE else (6.95, 0.67)))) for _ in range(count)
    ]


def requests(traces: Path | None, count: int, seed: int = 3) -> list[ChatRequest]:
    """`count` chat requests for `auto`, no two alike."""
    rng = random.Random(seed)
    asked = _questions(seed)
    made = [_request(next(asked), tokens, rng) for tokens in lengths(traces, count, seed)]
    texts = {tuple(message.content for message in request.messages) for request in made}
    assert len(texts) == count, "prompts repeat"
    return made


def body(request: ChatRequest) -> dict[str, object]:
    """The request as a client sends it."""
    turns = [{"role": message.role, "content": message.content} for message in request.messages]
    return {"model": "auto", "messages": turns, "max_tokens": 64}


def _questions(seed: int) -> Iterator[Labelled]:
    found = [*labelled(), *generated(4, seed)]
    random.Random(seed).shuffle(found)
    return cycle(found)


def _request(question: Labelled, tokens: int, rng: random.Random) -> ChatRequest:
    """A history and a last turn; the question stands before or after what it is about."""
    document = filler(rng, max(12, tokens - len(question.text) // 4), question.chinese)
    turns = rng.choice((1, 1, 2, 4))
    cut = len(document) * (turns - 1) // (turns + 1)
    history, about = document[:cut], document[cut:]
    messages: list[Message] = []
    for turn in range(turns - 1):
        piece = history[turn * cut // max(1, turns - 1) : (turn + 1) * cut // max(1, turns - 1)]
        messages.append(Message("assistant" if turn % 2 else "user", piece))
    last = f"{question.text}\n{about}" if rng.random() < 0.7 else f"{about}\n{question.text}"
    return ChatRequest("auto", (*messages, Message("user", last)))


def _column(file: Path) -> list[int]:
    with file.open(encoding="utf-8", newline="") as rows:
        return [int(row["ContextTokens"]) for row in csv.DictReader(rows)]

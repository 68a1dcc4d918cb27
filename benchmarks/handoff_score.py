"""What the handoff bench holds answers against: the law, the bytes of a handoff, and likelihood under a model.

The law: the answer is the source's tokens below the cut and what the target generated from exactly that prefix; no
token is lost, none is doubled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from attrs import frozen

from benchmarks.handoff_plan import PROMPTS
from benchmarks.handoff_stage import Batch, Generation
from gateway.stops import Owned
from protocol.handoff import Extend, encode
from protocol.text import Token

NATS = 0.25
"""Kernels round differently by batch size and binding: a chosen token may lie this far below the best one of another
pass over the same prefix, or as far as it does in answers that nobody moved. Where a one-shot pass says more than NATS,
one is made in the target's own steps."""


@frozen
class Judged:
    """How an answer kept the law. lost, doubled: tokens; violations: sentences."""

    lost: int
    doubled: int
    violations: tuple[str, ...]


def judge(owned: Sequence[Owned], made: Mapping[str, Sequence[Generation]], complete: bool, max_tokens: int) -> Judged:
    """Hold the delivered tokens against what each side made.

    Args:
        made: generations by target name, in order.
        complete: the answer came to its own end.
    """
    indices = [one.token.index for one in owned]
    doubled = len(indices) - len(set(indices))
    lost = len(set(range(max(indices, default=-1) + 1)) - set(indices))
    if not complete:
        lost += max_tokens - len(set(indices))
    violations: list[str] = []
    # Whoever may have made the last token: an engine that is taken up again may repeat what it had made ahead before.
    current: list[Generation] = []
    for place, one in enumerate(owned):
        given = [before.token for before in owned[:place]]
        began = [g for g in made[one.side] if g.at == place and not _wrong_prefix(g.prefix, given)]
        going_on = [g for g in current if any(g is mine for mine in made[one.side])]
        found = [g for g in (*going_on, *began) if _makes(g, one.token)]
        if not found:
            violations.append(f"token {place} is not what {one.side} makes from the answer before it")
        current = found
    return Judged(lost, doubled, tuple(violations))


def _makes(generation: Generation, token: Token) -> bool:
    number = token.index - generation.at
    if not 0 <= number < len(generation.made):
        return False
    made = generation.made[number]
    return (made.id, made.data) == (token.id, token.data)


def _wrong_prefix(prefix: Sequence[Token], given: Sequence[Token]) -> bool:
    """Whether `prefix` is not the answer that the reader was given."""
    if all(token.id is not None for token in prefix):
        same = [token.id for token in prefix] == [token.id for token in given]
    else:
        same = b"".join(token.data for token in prefix) == b"".join(token.data for token in given)
    return not same or len(prefix) != len(given)


def text_bytes(batch: Batch) -> int:
    """Bytes of the same batch in the same frame, as plain UTF-8 text."""
    first = batch.tokens[0].index
    frame = Extend(first, (Token(first, None, batch.text),))
    size_bytes = len(encode(bytes(16), 1, frame))
    # Beside a prompt, what the text adds to a frame that is there anyway.
    return size_bytes if batch.alone else size_bytes - len(encode(bytes(16), 1, Extend(first, ())))


@frozen
class Scored:
    """nll: mean nats per token. worst: how far below the best one the worst of the target's tokens lies, in nats."""

    nll: float
    worst: float


class Oracle:
    """One-shot passes of a model over whole texts, with the logits of every position."""

    def __init__(self, file: Path, context_tokens: int) -> None:
        import llama_cpp

        self._model: Any = llama_cpp.Llama(
            str(file),
            n_ctx=context_tokens,
            n_batch=context_tokens,
            n_ubatch=context_tokens,
            n_threads=1,
            n_threads_batch=2,
            logits_all=True,
            verbose=False,
        )

    def close(self) -> None:
        """Free the model."""
        self._model.close()

    def ids(self, text: bytes, *, prompt: bool = False) -> list[int]:
        """Token ids as the engines make them of a prompt or of an answer so far."""
        return list(self._model.tokenize(text, add_bos=prompt, special=prompt))

    def score(self, prompt: str, before: Sequence[int], after: Sequence[int]) -> Scored:
        """`before` + `after` behind the prompt; `worst` looks at `after` alone."""
        import numpy as np

        head = self.ids(prompt.encode(), prompt=True)
        answer = [*before, *after]
        self._model.reset()
        self._model.eval([*head, *answer])
        rows = self._model.scores[len(head) - 1 : len(head) - 1 + len(answer)]
        best = rows.max(axis=1)
        chosen = rows[np.arange(len(answer)), answer]
        totals = best + np.log(np.exp(rows - best[:, None]).sum(axis=1, dtype=np.float64))
        worst = float((best - chosen)[len(before) :].max(initial=0.0))
        if worst > NATS:
            worst = self._worst_in_steps([*head, *before], after)
        return Scored(float(np.mean(totals - chosen)), worst)

    def _worst_in_steps(self, prefix: Sequence[int], after: Sequence[int]) -> float:
        """The prefix in one batch, then a token at a time, as the target decoded."""
        self._model.reset()
        self._model.eval(list(prefix))
        worst = 0.0
        for one in after:
            row = self._model.scores[self._model.n_tokens - 1]
            worst = max(worst, float(row.max() - row[one]))
            self._model.eval([one])
        return worst


class Own:
    """A model's own answers, which nobody moved: by which engine, to which prompt, as token ids.

    limit: how far below the best one a token may lie; what the worst of its own answers does, and half as much again.
    """

    def __init__(self, oracle: Oracle, model: str, answers: Mapping[tuple[str, int], Sequence[int]]) -> None:
        self.oracle, self.model = oracle, model
        self.worst = 0.0
        self._answers = {key: ids for key, ids in answers.items() if key[0].endswith(f":{model}") and ids}
        scored = [oracle.score(PROMPTS[number], [], ids) for (_, number), ids in self._answers.items()]
        self.limit = max(NATS, 1.5 * max((one.worst for one in scored), default=0.0))
        self._nll: dict[tuple[str, int, int], float] = {}

    def nll(self, number: int, tokens: int) -> float | None:
        """Mean nats per token over the first `tokens` tokens of its answers to a prompt, of all engines that run it."""
        found = [self._one(key, tokens) for key in self._answers if key[1] == number]
        return fmean(found) if found else None

    def _one(self, key: tuple[str, int], tokens: int) -> float:
        if (*key, tokens) not in self._nll:
            ids = self._answers[key][:tokens]
            self._nll[*key, tokens] = self.oracle.score(PROMPTS[key[1]], [], ids).nll
        return self._nll[*key, tokens]


def ratio_of_means(above: Sequence[float], below: Sequence[float]) -> float | None:
    """Mean over mean, None without numbers."""
    return fmean(above) / fmean(below) if above and below and fmean(below) > 0 else None

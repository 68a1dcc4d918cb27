"""What the handoff bench holds answers against: the law, the bytes of a handoff, and likelihood under a model.

The law: the answer is the source's tokens below the cut and what the target generated from exactly that prefix; no
token is lost, none is doubled; each of the target's tokens lies within NATS of the best one of a one-shot pass over the
same prefix.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, Protocol

from attrs import field, frozen

from benchmarks.handoff_again import Heard, Read, as_reads
from benchmarks.handoff_plan import PROMPTS
from benchmarks.handoff_stage import Batch, Generation
from gateway.stops import Owned
from protocol.handoff import Extend, encode_body
from protocol.text import Sampling, TextRequest, Token

NATS = 0.25
"""How far below the best token of a one-shot pass over the same prefix a token may lie."""

PASS_S = 30.0
SHOWN = 20
"""Best tokens that an engine tells in its own pass; one that is none of them lies too far below."""

MICRO_BATCH_TOKENS = 16
"""llama.cpp's flash attention has one kernel for 64 rows and more and another one for fewer, as when it decodes. They
round differently, by up to 0.3 nats on SmolLM2 Q4_1: a pass must use the one that the engines decode with."""


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
    """Bytes of the frame that carries the same batch as plain UTF-8 text, behind the same header."""
    first = batch.tokens[0].index
    block = encode_body(Extend(first, (Token(first, None, batch.text),)))[1]
    return batch.header_bytes + batch.request_bytes + len(block)


@frozen
class Suspect:
    """A token that lies too far below the best one of the first pass: the engine that made it is asked itself.

    ids: prompt and answer before it. nats: how far it lies below in the first pass. reads: what the engine was given to
    read when it made it.
    """

    actor: str
    ids: tuple[int, ...]
    token: int
    data: bytes
    nats: float
    reads: tuple[Read, ...] = ()


@frozen
class Scored:
    """nll: nats per token of the answer. nats: how far below the best one each of the later tokens lies."""

    nll: tuple[float, ...]
    nats: tuple[float, ...]
    head: tuple[int, ...] = field(repr=False)

    def suspects(
        self, actor: str, before: Sequence[int], after: Sequence[Token], reads: tuple[Read, ...] = ()
    ) -> list[Suspect]:
        """Those of the later tokens that lie further below than the law allows. reads: as in Suspect."""
        ids = [token.id for token in after if token.id is not None]
        given = (*self.head, *before)
        return [
            Suspect(actor, (*given, *ids[:place]), ids[place], after[place].data, nats, reads)
            for place, nats in enumerate(self.nats)
            if nats > NATS
        ]


class Oracle:
    """One-shot passes of a model over whole texts, with the logits of every position, by llama-cpp-python."""

    def __init__(self, file: Path, context_tokens: int) -> None:
        import llama_cpp

        self._model: Any = llama_cpp.Llama(
            str(file),
            n_ctx=context_tokens,
            n_batch=context_tokens,
            n_ubatch=MICRO_BATCH_TOKENS,
            n_threads=1,
            n_threads_batch=2,
            flash_attn=True,
            logits_all=True,
            verbose=False,
        )

    def close(self) -> None:
        """Free the model."""
        self._model.close()

    def ids(self, text: bytes, *, prompt: bool = False) -> list[int]:
        """Token ids as the engines make them of a prompt or of an answer so far."""
        return list(self._model.tokenize(text, add_bos=prompt, special=prompt))

    def answer_ids(self, answer: Sequence[int | Token]) -> list[int]:
        """The ids of an answer so far, given as ids or as tokens with them."""
        ids = [one.id if isinstance(one, Token) else one for one in answer]
        return [one for one in ids if one is not None]

    def answer_text_ids(self, answer: Sequence[int | Token]) -> list[int]:
        """The same where text crossed: of tokens counts their text alone."""
        if not answer or isinstance(answer[0], int):
            return self.answer_ids(answer)
        return self.ids(b"".join(one.data for one in answer if isinstance(one, Token)))

    def _pass(self, head: Sequence[int], answer: Sequence[int]) -> tuple[Any, Any, Any]:
        """Logits of the answer's tokens: of the best one there, of the one that was chosen, and all of them."""
        import numpy as np

        self._model.reset()
        self._model.eval([*head, *answer])
        rows = self._model.scores[len(head) - 1 : len(head) - 1 + len(answer)]
        return rows.max(axis=1), rows[np.arange(len(answer)), list(answer)], rows

    def score(self, prompt: str, before: Sequence[int], after: Sequence[int]) -> Scored:
        """`before` + `after` behind the prompt; `nats` are of `after` alone."""
        import numpy as np

        head = self.ids(prompt.encode(), prompt=True)
        best, chosen, rows = self._pass(head, [*before, *after])
        totals = best + np.log(np.exp(rows - best[:, None]).sum(axis=1, dtype=np.float64))
        nats = (best - chosen)[len(before) :]
        return Scored(tuple((totals - chosen).tolist()), tuple(nats.tolist()), tuple(head))


@frozen
class OwnAnswer:
    """An engine's answer that nobody moved, and what the engine was given to read meanwhile."""

    tokens: Sequence[Token]
    heard: tuple[Heard, ...] = ()


class Own:
    """A model's own answers, which nobody moved: by which engine, to which prompt, as tokens.

    suspects: tokens that lie too far below. nats: how far the worst of the others lies below, by engine.
    """

    def __init__(self, oracle: Oracle, model: str, answers: Mapping[tuple[str, int], OwnAnswer]) -> None:
        self.oracle, self.model = oracle, model
        self.suspects: list[Suspect] = []
        self.nats: dict[str, float] = {}
        self._nll: dict[tuple[str, int], tuple[float, ...]] = {}
        for (actor, number), answer in answers.items():
            tokens, ids = answer.tokens, [token.id for token in answer.tokens if token.id is not None]
            if not actor.endswith(f":{model}") or not ids:
                continue
            scored = oracle.score(PROMPTS[number], [], ids)
            reads = as_reads(answer.heard, scored.head, oracle.answer_ids)
            self.suspects += scored.suspects(actor, [], tokens, reads)
            within = [nats for nats in scored.nats if nats <= NATS]
            self.nats[actor] = max([self.nats.get(actor, 0.0), *within])
            self._nll[actor, number] = scored.nll

    def nll(self, number: int, first: int, end: int) -> float | None:
        """Mean nats of tokens [first, end) of the answers to a prompt, of all engines that run the model.

        At the same places, since later tokens are likelier. None where no answer is that long.
        """
        parts = [nll[first:end] for (_, one), nll in self._nll.items() if one == number and len(nll) > first]
        return fmean(fmean(part) for part in parts) if parts else None


class Asked(Protocol):
    """An engine with the name of its model."""

    model: str

    async def prepare(self, request: TextRequest, deadline_s: float) -> Any:
        """As of TextEngine."""


async def own_pass(actor: Asked, suspect: Suspect) -> float:
    """How far the token lies below the best one when its engine itself reads the same prefix in one go."""
    return _below(await _next(actor, suspect.ids), suspect)


async def _next(actor: Asked, ids: tuple[int, ...]) -> Token:
    """What the engine holds for best behind `ids`, with what else was likely."""
    sampling = Sampling(max_tokens=1, logprobs=SHOWN)
    continuation = await actor.prepare(TextRequest(actor.model, ids, sampling), PASS_S)
    try:
        best: Token = await anext(continuation.start(0, 2))
    finally:
        await continuation.close()
    return best


def _below(best: Token, suspect: Suspect) -> float:
    """Nats from the suspect to the best one; infinite for one that is not among the likely ones."""
    if best.id == suspect.token:
        return 0.0
    found = [logprob for data, logprob in best.alternatives if data == suspect.data]
    tops = [logprob for _, logprob in best.alternatives]
    return max(tops) - max(found) if found else float("inf")


def ratio_of_means(above: Sequence[float], below: Sequence[float]) -> float | None:
    """Mean over mean, None without numbers."""
    return fmean(above) / fmean(below) if above and below and fmean(below) > 0 else None

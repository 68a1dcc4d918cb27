"""Choosing a token from logits: greedy, or temperature and nucleus, with what was likely beside it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import frozen

from protocol.text import Sampling

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


SEED_MASK = (1 << 64) - 1


@frozen
class Chosen:
    """A sampled id. `logprob` and `top` are of the raw distribution (temperature 1, no bias), `top` best first;
    they and `margin` are there when logprobs were asked for, as they cost a walk through the vocabulary.
    `top_pieces` is `top` with the tokens' bytes, filled in by who knows them."""

    id: int
    logprob: float | None = None
    margin: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    top_pieces: tuple[tuple[bytes, float], ...] = ()


class Sampler:
    """Samples as `sampling` says; the same seed gives the same draws."""

    def __init__(self, sampling: Sampling) -> None:
        import numpy

        self._numpy = numpy
        self._sampling = sampling
        # A seed may be negative in OpenAI's API; the generator takes none below 0.
        self._random = numpy.random.default_rng(None if sampling.seed is None else sampling.seed & SEED_MASK)

    def choose(self, logits: NDArray[np.float32]) -> Chosen:
        """`logits`: [vocabulary]."""
        if not self._sampling.logprobs:
            return Chosen(self._draw(logits))
        logprobs = self.log_softmax(logits)
        count = max(2, self._sampling.logprobs)
        top = self._numpy.argpartition(logprobs, -count)[-count:]
        top = top[self._numpy.argsort(-logprobs[top], kind="stable")]
        chosen = self._draw(logits)
        return Chosen(
            id=chosen,
            logprob=float(logprobs[chosen]),
            margin=float(logprobs[top[0]] - logprobs[top[1]]),
            top=tuple((int(one), float(logprobs[one])) for one in top[: self._sampling.logprobs]),
        )

    def log_softmax(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """Natural logarithms of the probabilities, [..., vocabulary]."""
        shifted = logits - logits.max(axis=-1, keepdims=True)
        result: NDArray[np.float32] = shifted - self._numpy.log(
            self._numpy.exp(shifted).sum(axis=-1, keepdims=True, dtype=self._numpy.float64)
        ).astype(self._numpy.float32)
        return result

    def _draw(self, logits: NDArray[np.float32]) -> int:
        sampling, numpy = self._sampling, self._numpy
        if sampling.logit_bias:
            logits = logits.copy()
            for token, bias in sampling.logit_bias.items():
                if 0 <= token < len(logits):
                    logits[token] += bias
        if sampling.temperature <= 0:
            return int(logits.argmax())
        order = numpy.argsort(-logits, kind="stable")
        shares = numpy.exp(self.log_softmax(logits[order])).astype(numpy.float64)
        # The nucleus is cut before the temperature, as llama.cpp's chain does.
        keep = int(numpy.searchsorted(numpy.cumsum(shares), sampling.top_p)) + 1 if sampling.top_p < 1 else len(order)
        keep = min(keep, len(order))
        best = logits[order[0]].astype(numpy.float64)
        # Distances to the best are at most 0, so a tiny temperature makes them -inf and never a NaN.
        with numpy.errstate(over="ignore"):
            weights = numpy.exp((logits[order[:keep]].astype(numpy.float64) - best) / sampling.temperature)
        place = int(numpy.searchsorted(numpy.cumsum(weights), self._random.random() * weights.sum(), side="right"))
        return int(order[min(place, keep - 1)])

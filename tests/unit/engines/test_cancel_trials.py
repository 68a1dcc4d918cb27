"""Cancelling at random moments, 200 times: in the queue, inside a prompt and while an answer is made."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.cancel import CONTEXT_TOKENS, PHASES, measured_batch, trials
from engines.llama_cpp import EmbeddedLlamaCpp
from engines.llama_server import EmbeddedLlamaServer

ModelFile = Callable[[str], Path]
TRIALS = 100
LIMIT_CPU_S = {EmbeddedLlamaCpp: 0.1, EmbeddedLlamaServer: 1.0}
"""In processor seconds, which are nearly the same on a busy machine: of a token, or of a batch of prompts."""


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize("made", list(LIMIT_CPU_S), ids=["llama-cpp", "llama-server"])
async def test_a_cancelled_request_stops_at_once_and_touches_nobody(
    model_file: ModelFile, made: type[EmbeddedLlamaCpp] | type[EmbeddedLlamaServer]
) -> None:
    model = model_file("smollm2-135m")
    sized = {"batch_tokens": await measured_batch(model)} if made is EmbeddedLlamaServer else {}
    engine = made(model, context_tokens=CONTEXT_TOKENS, threads=1, slots=2, **sized)
    outcome = await trials(engine, TRIALS)
    assert len(outcome.trials) == TRIALS
    assert outcome.ran == 0, "a queued request of a departed client reached the engine"
    assert outcome.lost == 0 and outcome.other_answers >= 3, "another stream lost tokens"
    for phase in PHASES:
        stops = outcome.stops_cpu_s(phase)
        assert len(stops) >= TRIALS // 8, f"hardly any trial met {phase}"
        if phase != "prefill" or made is EmbeddedLlamaCpp:
            assert max(stops) < LIMIT_CPU_S[made], phase
    # The server ends a prompt between two batches; the batch is sized to half the limit by the rate measured above, and
    # a machine that has slowed since then makes it longer, not larger. The next one may have begun when the word came.
    read_tokens, batch_tokens = outcome.read_tokens(), sized.get("batch_tokens", 0)
    assert statistics.median(read_tokens) <= batch_tokens and max(read_tokens) <= 2 * batch_tokens
    assert (max(read_tokens) > 0) == bool(sized), "the server told nothing of its prompts"
    assert engine.load().running == 0

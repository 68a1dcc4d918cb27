"""Cancelling at random moments, 200 times: in the queue, inside a prompt and while an answer is made."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.cancel import CONTEXT_TOKENS, PHASES, measured_batch, trials
from engines.llama_cpp import EmbeddedLlamaCpp
from engines.llama_server import EmbeddedLlamaServer

ModelFile = Callable[[str], Path]
TRIALS = 100
LIMIT_S = {EmbeddedLlamaCpp: 0.1, EmbeddedLlamaServer: 1.0}
"""In processor seconds, which are the same on a busy machine: of a prompt, of a token, or of the batch that runs."""


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize("made", list(LIMIT_S), ids=["llama-cpp", "llama-server"])
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
        assert max(stops) < LIMIT_S[made], phase
    assert engine.load().running == 0

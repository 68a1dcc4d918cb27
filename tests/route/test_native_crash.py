"""Native code that dies under an answer: the worker goes, the house and the answer stay."""

from __future__ import annotations

import os
import signal

import openai
import pytest

from engines.fakes_text import FakeTextEngine, fake_answer
from engines.queued_text import QueuedTextEngine
from engines.worker import WorkerEngine
from gateway.targets import Target
from protocol.events import SourceLost
from protocol.policy import MigrationPolicy, Policy
from protocol.text import Message
from tests.route.text_house import house

FAKE = "engines.fakes_text:FakeTextEngine"
STAY = Policy(migration=MigrationPolicy(enabled=False))
TOKENS = 40


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGABRT, signal.SIGILL])
async def test_a_crash_of_native_code_takes_its_worker_and_the_stream_goes_on_elsewhere(number: signal.Signals) -> None:
    worker = WorkerEngine(FAKE, {"tokens_per_s": 200.0, "answer_tokens": 200})
    queue = QueuedTextEngine(worker, slots=1, wait_target_s=5.0)
    other = FakeTextEngine(name="other", tokens_per_s=2000.0, answer_tokens=200)
    models = frozenset({"fake"})
    targets = [Target("device", True, queue, models, tokens_per_s=200.0), Target("cloud", False, other, models)]
    try:
        await worker.capabilities()
        async with (
            house(targets, policy=STAY) as one,
            openai.AsyncOpenAI(base_url=f"{one.base_url}/v1", api_key="none", max_retries=0) as client,
        ):
            stream = await client.chat.completions.create(
                model="fake",
                messages=[{"role": "user", "content": "go on"}],
                max_tokens=TOKENS,
                stream=True,
                stream_options={"include_usage": True},
            )
            text, usage = "", None
            async for chunk in stream:
                text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
                usage = chunk.usage or usage
                if len(text) > 20 and worker.process_id is not None and number is not None:
                    os.kill(worker.process_id, number)
                    number = None  # type: ignore[assignment]
            lost = [event for event in one.emit.events if isinstance(event, SourceLost)]
            assert text == fake_answer((Message("user", "go on"),), TOKENS, 200).decode()
            assert usage is not None and usage.completion_tokens == TOKENS
            assert [(event.source, event.target) for event in lost] == [("device", "cloud")]
            # The next answer finds a new worker.
            whole = await client.chat.completions.create(
                model="fake", messages=[{"role": "user", "content": "again"}], max_tokens=5
            )
            assert whole.choices[0].message.content == fake_answer((Message("user", "again"),), 5, 200).decode()
    finally:
        await queue.close()

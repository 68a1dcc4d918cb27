"""Both llama.cpp bindings, in process, on a real model: characters, cancellation, sampling, templates, bad files."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from attrs import evolve

from engines.llama_cpp import EmbeddedLlamaCpp
from engines.llama_server import EmbeddedLlamaServer, LlamaServerEngine
from engines.pieces import PieceDecoder
from engines.port import Continuation, TextEngine
from protocol.errors import BadRequest, ContextOverflow, EngineError, LinkTimeout, Unsupported
from protocol.text import Message, Prompt, Sampling, TextRequest, Token

ModelFile = Callable[[str], Path]
CLASSES = {"llama-server": EmbeddedLlamaServer, "llama-cpp": EmbeddedLlamaCpp}
EMOJI = "Emoji: \U0001f600 \U0001f603 \U0001f604 "


@pytest.fixture(params=list(CLASSES))
async def engine(request: pytest.FixtureRequest, model_file: ModelFile) -> AsyncIterator[TextEngine]:
    made = CLASSES[request.param](model_file("smollm2-135m"), context_tokens=384, slots=1)
    yield made
    await made.close()


def ask(prompt: Prompt, count: int = 8, **sampling: object) -> TextRequest:
    return TextRequest("m", prompt, Sampling(max_tokens=count, **sampling))  # type: ignore[arg-type]


async def take(continuation: Continuation, at: int = 0) -> list[Token]:
    tokens = [token async for token in continuation.start(at, 1000)]
    await continuation.close()
    return tokens


async def test_a_character_split_over_tokens_keeps_all_its_ids_and_bytes(engine: TextEngine) -> None:
    tokens = await take(await engine.prepare(ask(EMOJI, 7), 30))
    assert [token.index for token in tokens] == list(range(7))
    assert all(token.id is not None and token.data for token in tokens)
    split = [token for token in tokens if b"\xf0\x9f" in token.data and len(token.data) < 4]
    assert split, "the model was expected to write an emoji in several tokens"
    decoder = PieceDecoder()
    text = "".join(decoder.feed(token.data) for token in tokens)
    assert "\ufffd" not in text
    # The ids are the true ones: another engine may go on from them.
    continuation = await engine.prepare(evolve(ask(EMOJI, 9), prefix=tuple(evolve(t, finish=None) for t in tokens)), 30)
    assert continuation.prompt_tokens > 0
    assert [token.index for token in await take(continuation, 7)] == [7, 8]


async def test_a_partial_character_at_max_tokens_is_not_dropped(engine: TextEngine) -> None:
    whole = await take(await engine.prepare(ask(EMOJI, 4), 30))
    cut = next(token.index for token in whole if token.data.startswith(b"\xf0\x9f") and len(token.data) < 4) + 1
    tokens = await take(await engine.prepare(ask(EMOJI, cut), 30))
    assert [token.index for token in tokens] == list(range(cut))
    assert tokens[-1].finish == "length" and tokens[-1].data == b"\xf0\x9f"


async def test_cancelling_inside_a_prompt_stops_its_prefill(engine: TextEngine) -> None:
    await engine.capabilities()
    prompt = "one two three four five six seven eight nine ten " * 32
    with pytest.raises(LinkTimeout):
        await engine.prepare(ask(prompt, 1), 0.03)
    assert engine.load().running == 0
    continuation = await engine.prepare(ask(prompt, 1), 50)
    # What ran when the cancel came ends its batch; a prompt that was read whole would leave all but one token.
    assert continuation.cached_tokens < continuation.prompt_tokens - 1, "the cancelled prompt was read to its end"
    await continuation.close()


async def test_the_second_turn_finds_the_first_in_the_cache(engine: TextEngine) -> None:
    await take(await engine.prepare(ask("The quick brown fox jumps over the lazy dog", 2), 30))
    again = await engine.prepare(ask("The quick brown fox jumps over the lazy dog again", 2), 30)
    assert again.cached_tokens >= 8
    await again.close()


async def test_sampling_is_repeatable_by_seed_and_obeys_bias(engine: TextEngine) -> None:
    drawn = [
        b"".join(
            token.data for token in await take(await engine.prepare(ask("Once", 8, temperature=1.0, seed=seed), 30))
        )
        for seed in (1, 1, 2)
    ]
    assert drawn[0] == drawn[1] != drawn[2]
    (first, *_) = await take(await engine.prepare(ask("The sea is", 1), 30))
    assert first.id is not None
    (other, *_) = await take(await engine.prepare(ask("The sea is", 1, logit_bias={first.id: -100.0}), 30))
    assert other.id != first.id


async def test_logprobs_are_of_the_raw_distribution(engine: TextEngine) -> None:
    tokens = await take(await engine.prepare(ask("The sea is", 4, logprobs=3), 30))
    for token in tokens:
        assert token.logprob is not None and token.logprob <= 0
        assert token.margin is not None and token.margin >= 0
        assert len(token.alternatives) == 3
        assert token.alternatives[0] == (token.data, pytest.approx(token.logprob, abs=1e-4))
        assert [p for _, p in token.alternatives] == sorted((p for _, p in token.alternatives), reverse=True)


async def test_logprobs_do_not_follow_temperature_bias_or_nucleus(engine: TextEngine) -> None:
    (plain,) = await take(await engine.prepare(ask("The sea is", 1, logprobs=3), 30))
    assert plain.id is not None and plain.logprob is not None
    pushed = {plain.id: 50.0}
    (other,) = await take(
        await engine.prepare(
            ask("The sea is", 1, logprobs=3, temperature=1.5, top_p=0.9, seed=5, logit_bias=pushed), 30
        )
    )
    assert other.id == plain.id
    assert other.logprob == pytest.approx(plain.logprob, abs=0.05)
    assert other.margin == pytest.approx(plain.margin, abs=0.1)


async def test_an_answer_that_outgrows_the_context_says_length(engine: TextEngine) -> None:
    continuation = await engine.prepare(ask("a b c d e " * 72, 900), 50)
    room = 384 - continuation.prompt_tokens
    tokens = await take(continuation)
    assert tokens[-1].finish in ("length", "stop")
    assert len(tokens) <= room


async def test_a_prefix_that_outgrows_the_context_is_refused(engine: TextEngine) -> None:
    continuation = await engine.prepare(ask("hello", 900), 30)
    ids = await engine.tokenize(b" word")
    with pytest.raises(ContextOverflow):
        await continuation.extend([Token(index=i, id=ids[0], data=b" word") for i in range(400)])
    await continuation.close()


async def test_text_that_ends_inside_a_character_is_refused(engine: TextEngine) -> None:
    with pytest.raises(BadRequest):
        await engine.tokenize(EMOJI.encode()[:9])


async def test_grammar_is_obeyed_or_refused(engine: TextEngine) -> None:
    request = ask("Answer:", 5, grammar='root ::= "yes" | "no"')
    if (await engine.capabilities()).grammar:
        tokens = await take(await engine.prepare(request, 30))
        assert b"".join(token.data for token in tokens) in (b"yes", b"no")
    else:
        with pytest.raises(Unsupported):
            await engine.prepare(request, 30)


@pytest.mark.llama_native
async def test_engines_of_one_file_agree_on_vocabulary_template_and_prompt(model_file: ModelFile) -> None:
    engines = [made(model_file("smollm2-135m"), context_tokens=256, slots=1) for made in CLASSES.values()]
    seen = [await one.capabilities() for one in engines]
    assert seen[0].vocabulary == seen[1].vocabulary
    assert seen[0].template == seen[1].template
    question = (Message("system", "Be brief."), Message("user", "What is 2+2?"))
    lengths = []
    for one in engines:
        continuation = await one.prepare(ask(question, 1), 30)
        lengths.append(continuation.prompt_tokens)
        await continuation.close()
    assert lengths[0] == lengths[1]
    for one in engines:
        await one.close()


@pytest.mark.parametrize("name", list(CLASSES))
async def test_a_file_that_is_no_model_is_an_engine_error(tmp_path: Path, name: str) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF not really")
    engine = CLASSES[name](file)
    with pytest.raises(EngineError, match=r"m\.gguf"):
        await engine.prepare(ask("x"), 10)
    with pytest.raises(EngineError):
        await engine.capabilities()
    await engine.close()


async def test_a_truncated_model_is_an_engine_error_in_a_worker(tmp_path: Path, model_file: ModelFile) -> None:
    file = tmp_path / "half.gguf"
    with model_file("smollm2-135m").open("rb") as whole:
        file.write_bytes(whole.read(8 << 20))
    engine = LlamaServerEngine(file)
    with pytest.raises(EngineError, match=r"half"):
        await engine.prepare(ask("x"), 20)
    await engine.close()


@pytest.mark.parametrize("name", list(CLASSES))
async def test_the_catalogues_template_serves_a_file_without_one(model_file: ModelFile, name: str) -> None:
    template = "{% for m in messages %}<start_of_turn>{{ m.role }}\n{{ m.content }}<end_of_turn>\n{% endfor %}"
    engine = CLASSES[name](model_file("gemma3-270m"), context_tokens=256, slots=1, chat_template=template)
    continuation = await engine.prepare(ask((Message("user", "hello"),), 2), 40)
    assert 6 <= continuation.prompt_tokens <= 12
    assert len(await take(continuation)) >= 1
    await engine.close()


CLOSED_AT_ONCE = """
import asyncio, sys
from engines.llama_server import EmbeddedLlamaServer

async def main():
    for _ in range(3):
        engine = EmbeddedLlamaServer(sys.argv[1], context_tokens=256, threads=1)
        await engine.url()
        await engine.close()

asyncio.run(main())
"""


def test_a_server_that_is_closed_as_soon_as_it_listens_ends(model_file: ModelFile) -> None:
    """In a process of its own: the native stop holds the interpreter's lock, so that nothing here could end it."""
    model = model_file("smollm2-135m")
    done = subprocess.run([sys.executable, "-c", CLOSED_AT_ONCE, str(model)], timeout=55, capture_output=True)
    assert done.returncode == 0, done.stderr[-500:]

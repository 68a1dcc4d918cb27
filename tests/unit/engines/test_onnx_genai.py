"""onnxruntime-genai on a tiny model: pieces, caches, cancellation, sampling, broken folders."""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from engines.catalogue import load_catalogue
from engines.decoding import Aborted, Entry
from engines.hf_tokenizer import HfTokenizer
from engines.onnx_genai import EmbeddedOnnxGenai, model_folder
from engines.onnx_genai_native import GenaiModel
from engines.registry import engine_class
from engines.store import ModelStore
from protocol.errors import BadRequest, ContextOverflow, EngineError, NotFound, Unsupported
from protocol.text import Message, Sampling, TextRequest, Token
from tests.contract.make_genai_model import BUILT_MODEL, build
from tests.contract.tiny_genai import TEMPLATE, byte_letters, vocabulary, write_model


@pytest.fixture(scope="module", params=["written", "built"])
def folder(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """A model written operator by operator, and one that the library's own builder made."""
    return BUILT_MODEL if request.param == "built" else write_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
async def engine(folder: Path) -> AsyncIterator[EmbeddedOnnxGenai]:
    made = EmbeddedOnnxGenai(folder, context_tokens=256, threads=1, slots=2)
    yield made
    await made.close()


def ask(prompt: str, count: int = 8, **sampling: object) -> TextRequest:
    return TextRequest("m", prompt, Sampling(max_tokens=count, **sampling))  # type: ignore[arg-type]


async def take(engine: EmbeddedOnnxGenai, request: TextRequest) -> list[Token]:
    continuation = await engine.prepare(request, 20)
    return [token async for token in continuation.start(0, 1000)]


def test_pieces_are_the_tokens_own_bytes(folder: Path) -> None:
    tokenizer, ids = HfTokenizer(folder), vocabulary()
    assert tokenizer.piece(ids["-" * 64]) == b"-" * 64, "longer than 32 bytes"
    assert tokenizer.piece(ids["Ġword"]) == b" word"
    assert tokenizer.piece(ids["<|user|>"]) == b""
    assert tokenizer.piece(10**6) == b""
    assert b"".join(tokenizer.piece(one) for one in range(4, 260)) == bytes(range(256))
    assert tokenizer.size == len(ids)


@pytest.mark.slow
def test_the_built_model_is_what_the_builder_makes_of_drawn_weights(tmp_path: Path) -> None:
    for needed in ("torch", "transformers", "onnx_ir"):
        pytest.importorskip(needed)
    made = {file.name: file.read_bytes() for file in build(tmp_path).iterdir()}
    kept = {file.name: file.read_bytes() for file in BUILT_MODEL.iterdir()}
    assert made.keys() == kept.keys()
    assert {name for name in made if made[name] != kept[name]} == set()


def test_pieces_of_a_sentencepiece_vocabulary(tmp_path: Path) -> None:
    model = {"type": "BPE", "vocab": {"<unk>": 0, "\u2581the": 1, "<0xC3>": 2}}
    added = [{"id": 3, "content": "\u00e9t\u00e9", "special": False}, {"id": 0, "content": "<unk>", "special": True}]
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": model, "added_tokens": added}))
    tokenizer = HfTokenizer(tmp_path)
    assert [tokenizer.piece(one) for one in range(4)] == [b"", b" the", b"\xc3", "\u00e9t\u00e9".encode()]


async def test_ids_are_the_tokenizers_and_vocabularies_compare_by_hash(folder: Path, engine: EmbeddedOnnxGenai) -> None:
    ids = await engine.tokenize(b" word" + b"-" * 64 + "\u00e9".encode())
    assert [HfTokenizer(folder).piece(one) for one in ids] == [b" word", b"-" * 64, b"\xc3", b"\xa9"]
    assert (await engine.capabilities()).vocabulary == HfTokenizer(folder).digest
    with pytest.raises(BadRequest):
        await engine.tokenize("\u00e9".encode()[:1])


async def test_the_second_turn_finds_the_first_in_the_cache(folder: Path, engine: EmbeddedOnnxGenai) -> None:
    first = await take(engine, ask("the river runs past old mills", 4))
    text = "the river runs past old mills" + b"".join(token.data for token in first).decode()
    fresh = EmbeddedOnnxGenai(folder, context_tokens=256, threads=1, slots=1)
    alone = await take(fresh, ask(text + " and", 4))
    await fresh.close()
    continuation = await engine.prepare(ask(text + " and", 4), 20)
    assert continuation.cached_tokens >= continuation.prompt_tokens - 5
    again = [token async for token in continuation.start(0, 10)]
    assert [token.data for token in again] == [token.data for token in alone]


async def test_two_answers_at_once_are_what_each_is_alone(engine: EmbeddedOnnxGenai) -> None:
    prompts = ("the old mills", "a stone bridge")
    alone = [await take(engine, ask(prompt, 20)) for prompt in prompts]
    both = [await engine.prepare(ask(prompt, 20), 20) for prompt in prompts]
    streams = [one.start(0, 50) for one in both]
    mixed: list[list[Token]] = [[], []]
    for _ in range(20):
        for place, stream in enumerate(streams):
            token = await anext(stream, None)
            if token is not None:
                mixed[place].append(token)
    assert [[token.data for token in one] for one in mixed] == [[token.data for token in one] for one in alone]
    for one in both:
        await one.close()


async def test_logprobs_are_of_the_raw_distribution(engine: EmbeddedOnnxGenai) -> None:
    (plain,) = await take(engine, ask("the", 1, logprobs=3))
    assert plain.logprob is not None and plain.id is not None
    biased = {plain.id: 3.0}
    (warm,) = await take(engine, ask("the", 1, logprobs=3, temperature=0.01, top_p=0.5, seed=3, logit_bias=biased))
    assert warm.id == plain.id
    assert warm.logprob == pytest.approx(plain.logprob, abs=1e-5)
    assert [data for data, _ in warm.alternatives] == [data for data, _ in plain.alternatives]


async def test_a_character_split_over_tokens_comes_as_its_bytes_also_when_it_is_cut(
    folder: Path, engine: EmbeddedOnnxGenai
) -> None:
    """Bytes of a character, and one that never can be text, are forced: nothing is dropped, replaced or held back."""
    ids = vocabulary()
    letters = byte_letters()
    for byte in (0xC3, 0xA9, 0xFF):
        forced = {ids[letters[byte]]: 1000.0}
        tokens = await take(engine, ask("the", 3, logit_bias=forced))
        assert [token.data for token in tokens] == [bytes((byte,))] * 3
        assert tokens[-1].finish == "length"
    first = Token(index=0, id=ids[letters[0xC3]], data=b"\xc3")
    request = TextRequest("m", "the", Sampling(max_tokens=2, logit_bias={ids[letters[0xA9]]: 1000.0}), prefix=(first,))
    continuation = await engine.prepare(request, 20)
    (second,) = [token async for token in continuation.start(1, 10)]
    assert (first.data + second.data).decode() == "\u00e9"


async def test_overflow_and_grammars_are_refused(engine: EmbeddedOnnxGenai) -> None:
    with pytest.raises(ContextOverflow) as overflow:
        await engine.prepare(ask("x" * 300), 20)
    assert (overflow.value.prompt_tokens, overflow.value.context_tokens) == (300, 256)
    with pytest.raises(Unsupported):
        await engine.prepare(ask("x", grammar='root ::= "a"'), 20)
    tokens = await take(engine, ask("x" * 250, 100))
    assert len(tokens) <= 6 and tokens[-1].finish in ("length", "stop")


async def test_a_model_without_a_template_says_so(folder: Path, tmp_path: Path) -> None:
    bare = write_model(tmp_path / "bare")
    (bare / "tokenizer_config.json").write_text("{}")
    question = TextRequest("m", (Message("user", "hi"),), Sampling(max_tokens=2))
    engine = EmbeddedOnnxGenai(bare, context_tokens=128, threads=1)
    with pytest.raises(BadRequest, match="no chat template"):
        await engine.prepare(question, 20)
    await engine.close()
    (bare / "chat_template.jinja").write_text(TEMPLATE)
    engine = EmbeddedOnnxGenai(bare / "genai_config.json", context_tokens=128, threads=1)
    continuation = await engine.prepare(question, 20)
    assert continuation.prompt_tokens == len("hi\n") + 2
    await continuation.close()
    await engine.close()
    assert model_folder(bare / "genai_config.json") == bare


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("genai_config.json", "{"),
        ("genai_config.json", "{}"),
        ("tokenizer.json", "[]"),
        ("tokenizer.json", '{"model": {}}'),
        ("tokenizer_config.json", None),
        ("model.onnx", "no model"),
    ],
)
async def test_a_broken_folder_is_an_engine_error(tmp_path: Path, name: str, content: str | None) -> None:
    broken = write_model(tmp_path / "broken")
    (broken / name).unlink()
    if content is not None:
        (broken / name).write_text(content)
    engine = EmbeddedOnnxGenai(broken, context_tokens=128, threads=1)
    with pytest.raises(EngineError, match=r"broken|tokenizer"):
        await engine.prepare(ask("x"), 20)
    await engine.close()


async def test_a_folder_goes_into_the_store_and_is_served_from_it(folder: Path, tmp_path: Path) -> None:
    store = ModelStore(tmp_path / "store", load_catalogue())
    entry = store.add(folder / "genai_config.json", name="tiny")
    assert (entry.format, entry.filename) == ("genai", "genai_config.json")
    assert {side.filename for side in entry.side_files} >= {"model.onnx", "tokenizer.json", "tokenizer_config.json"}
    store.verify("tiny")
    engine = engine_class("onnx_genai")(
        store.path("tiny"), model="tiny", context_tokens=128, threads=1, in_process=True
    )
    continuation = await engine.prepare(ask("the river", 3), 20)
    assert len([token async for token in continuation.start(0, 10)]) == 3
    await engine.close()
    (store.path("tiny").parent / "model.onnx").write_bytes(b"short")
    with pytest.raises((NotFound, EngineError)):
        store.verify("tiny")


def test_an_evaluation_is_interrupted_from_another_thread_and_the_model_lives_on(folder: Path) -> None:
    stop = threading.Event()
    model = GenaiModel(folder, context_tokens=1024, threads=1, should_abort=stop.is_set)
    ids = model.tokenize(b"the river runs past " * 20, special=True)
    model.decode([Entry(token, place, 0, place == len(ids) - 1) for place, token in enumerate(ids)])
    wanted = model.logits(len(ids) - 1).tolist()
    aborted = 0
    for wait_s in (0.0, 0.0005, 0.001, 0.002, 0.004):
        model.keep(0, 0)
        stop.clear()
        timer = threading.Timer(wait_s, lambda: (stop.set(), model.interrupt()))
        timer.start()
        try:
            for _ in range(200):
                model.keep(0, 0)
                model.decode([Entry(token, place, 0, False) for place, token in enumerate(ids)])
        except Aborted:
            aborted += 1
        timer.join()
    assert aborted == 5
    stop.clear()
    model.keep(0, 0)
    model.decode([Entry(token, place, 0, place == len(ids) - 1) for place, token in enumerate(ids)])
    assert model.logits(len(ids) - 1).tolist() == wanted
    model.close()

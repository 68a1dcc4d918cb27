"""GGUF metadata and the vocabulary inside, on real files and on broken ones."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from engines.gguf import parameters_of, read_metadata
from engines.llama_cpp_native import NativeModel
from engines.vocabulary import Vocabulary, read_vocabulary
from protocol.errors import EngineError

ModelFile = Callable[[str], Path]


def string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def pair(key: str, kind: int, value: bytes) -> bytes:
    return string(key.encode()) + struct.pack("<I", kind) + value


def strings(*items: bytes) -> bytes:
    return struct.pack("<IQ", 8, len(items)) + b"".join(map(string, items))


def gguf(*pairs: bytes) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, 0, len(pairs)) + b"".join(pairs)


def vocabulary_file(
    tmp_path: Path, tokens: tuple[bytes, ...], merges: tuple[bytes, ...] = (b"a b",), bos: int = 1
) -> Path:
    file = tmp_path / "tiny.gguf"
    file.write_bytes(
        gguf(
            pair("tokenizer.ggml.model", 8, string(b"gpt2")),
            pair("tokenizer.ggml.tokens", 9, strings(*tokens)),
            pair("tokenizer.ggml.merges", 9, strings(*merges)),
            pair("tokenizer.ggml.bos_token_id", 4, struct.pack("<I", bos)),
            pair("general.file_type", 4, struct.pack("<I", hash(tokens) % 7)),
        )
    )
    return file


@pytest.mark.llama_native
@pytest.mark.parametrize("name", ["smollm2-135m", "gemma3-270m"])
def test_pieces_are_those_of_llama_cpp(model_file: ModelFile, name: str) -> None:
    vocabulary = read_vocabulary(model_file(name))
    model = NativeModel(model_file(name), context_tokens=64, sequences=1, threads=1, should_abort=lambda: False)
    try:
        assert model.vocabulary_size == len(vocabulary.tokens)
        checked = range(0, len(vocabulary.tokens), 7)
        wrong = [one for one in checked if vocabulary.piece(one) != model.piece(one)]
        assert wrong == []
    finally:
        model.close()


def test_digest_tells_vocabularies_apart(model_file: ModelFile) -> None:
    first, second = read_vocabulary(model_file("smollm2-135m")), read_vocabulary(model_file("gemma3-270m"))
    assert first.digest != second.digest
    assert first.digest == read_vocabulary(model_file("smollm2-135m")).digest


def test_digest_covers_tokens_merges_and_special_ids(tmp_path: Path) -> None:
    base = read_vocabulary(vocabulary_file(tmp_path, (b"a", b"b"))).digest
    assert read_vocabulary(vocabulary_file(tmp_path, (b"a", b"b"))).digest == base
    assert read_vocabulary(vocabulary_file(tmp_path, (b"a", b"c"))).digest != base
    assert read_vocabulary(vocabulary_file(tmp_path, (b"ab", b""))).digest != base
    assert read_vocabulary(vocabulary_file(tmp_path, (b"a", b"b"), merges=(b"b a",))).digest != base
    assert read_vocabulary(vocabulary_file(tmp_path, (b"a", b"b"), bos=0)).digest != base


def test_the_hidden_tokens_of_a_character_are_found_when_only_one_spelling_fits(model_file: ModelFile) -> None:
    vocabulary = read_vocabulary(model_file("smollm2-135m"))
    star = "\U0001f31f".encode()
    ids = vocabulary.split(star[:3], 2)
    assert ids is not None and b"".join(vocabulary.piece(one) or b"" for one in ids) == star[:3]
    assert vocabulary.split(star[:3], 4) is None
    assert vocabulary.split(b"", 1) is None
    ambiguous = Vocabulary(
        {
            "tokenizer.ggml.model": b"llama",
            "tokenizer.ggml.tokens": (b"\xf0", b"\xf0\x9f", b"\x9f\x8c", b"\x8c"),
        },
        "made up",
    )
    assert ambiguous.split(b"\xf0\x9f\x8c", 2) is None


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"not a model",
        b"GGUF",
        b"GGUF" + struct.pack("<IQQ", 99, 0, 0),
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 60),
        gguf(pair("k", 8, struct.pack("<Q", 1 << 60))),
        gguf(pair("k", 9, struct.pack("<IQ", 8, 1 << 60))),
        gguf(pair("k", 9, struct.pack("<IQ", 10, 1 << 20))),
        gguf(pair("k", 9, struct.pack("<IQ", 9, 1))),
        gguf(pair("k", 77, b"")),
        gguf(pair("general.name", 8, string(b"no tokenizer"))),
    ],
)
def test_a_file_that_is_no_model_is_an_engine_error(tmp_path: Path, data: bytes) -> None:
    file = tmp_path / "broken.gguf"
    file.write_bytes(data)
    with pytest.raises(EngineError) as refused:
        read_vocabulary(file)
    assert "broken.gguf" in str(refused.value)


def test_a_missing_file_is_an_engine_error(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="cannot be read"):
        read_metadata(tmp_path / "absent.gguf")


@pytest.mark.llama_native
def test_pieces_of_any_length_are_whole(model_file: ModelFile) -> None:
    vocabulary = read_vocabulary(model_file("gemma3-270m"))
    long = [one for one in range(len(vocabulary.tokens)) if len(vocabulary.piece(one) or b"") > 32]
    assert long, "the model was expected to have tokens of more than 32 bytes"
    model = NativeModel(
        model_file("gemma3-270m"), context_tokens=64, sequences=1, threads=1, should_abort=lambda: False
    )
    try:
        assert [model.piece(one) for one in long] == [vocabulary.piece(one) for one in long]
    finally:
        model.close()


@pytest.mark.parametrize(("name", "parameters"), [("smollm2-135m", 134.5e6), ("gemma3-270m", 268.1e6)])
def test_parameters_follow_from_the_sizes_in_the_file(model_file: ModelFile, name: str, parameters: float) -> None:
    assert parameters_of(read_metadata(model_file(name))) == pytest.approx(parameters, rel=0.001)


def test_a_file_without_sizes_tells_no_parameters() -> None:
    assert parameters_of({}) is None
    assert parameters_of({"general.architecture": b"llama", "llama.embedding_length": 0}) is None

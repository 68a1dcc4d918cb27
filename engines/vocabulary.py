"""What a model's tokens are: their bytes, and one hash that says whether ids may cross to another engine."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

from engines.gguf import Value, read_metadata
from protocol.errors import EngineError

_SPECIAL_KEYS = (
    "tokenizer.ggml.bos_token_id",
    "tokenizer.ggml.eos_token_id",
    "tokenizer.ggml.eot_token_id",
    "tokenizer.ggml.eom_token_id",
    "tokenizer.ggml.unknown_token_id",
    "tokenizer.ggml.padding_token_id",
    "tokenizer.ggml.add_bos_token",
    "tokenizer.ggml.add_eos_token",
    "tokenizer.ggml.add_space_prefix",
)
# Token types of GGUF (tokenizer.ggml.token_type) that show as nothing in an answer.
_SILENT_TYPES = (2, 3, 5)
_BYTE_TYPE = 6
_SPACE_MARK = "\u2581".encode()


class Vocabulary:
    """Tokens of one GGUF file.

    `digest` is a hash over tokenizer kind, tokens, merges and special ids: two engines with the same digest may
    exchange ids. `piece(id)` is the token's raw bytes, None where this tokenizer kind is not known here.
    """

    def __init__(self, metadata: Mapping[str, Value], name: str) -> None:
        tokens = metadata.get("tokenizer.ggml.tokens")
        kind = metadata.get("tokenizer.ggml.model")
        if not isinstance(tokens, tuple) or not isinstance(kind, bytes) or not tokens:
            raise EngineError(f"{name} has no tokenizer", next_step="use a GGUF file of a language model")
        self.kind = kind.decode("utf-8", "replace")
        self.tokens: tuple[bytes, ...] = tuple(token for token in tokens if isinstance(token, bytes))
        types = metadata.get("tokenizer.ggml.token_type", ())
        self._types = types if isinstance(types, tuple) and len(types) == len(tokens) else (1,) * len(tokens)
        self._metadata = metadata

    @cached_property
    def digest(self) -> str:
        """Hex sha256; equal exactly when tokens, merges and special ids are."""
        state = hashlib.sha256()
        merges = self._metadata.get("tokenizer.ggml.merges", ())
        pre = self._metadata.get("tokenizer.ggml.pre", b"")
        for part in (self.kind.encode(), pre, *self.tokens, b"merges", *(merges if isinstance(merges, tuple) else ())):
            _add(state, part)
        for key in _SPECIAL_KEYS:
            _add(state, f"{key}={self._metadata.get(key)!r}".encode())
        return state.hexdigest()

    @cached_property
    def _pieces(self) -> tuple[bytes | None, ...]:
        return tuple(self._piece(index, token) for index, token in enumerate(self.tokens))

    @cached_property
    def _ids(self) -> Mapping[bytes, tuple[int, ...]]:
        found: dict[bytes, tuple[int, ...]] = {}
        for index, piece in enumerate(self._pieces):
            if piece and self._types[index] not in _SILENT_TYPES:
                found[piece] = (*found.get(piece, ()), index)
        return found

    def piece(self, token_id: int) -> bytes | None:
        """Raw bytes of a token as it shows in an answer; None for an unknown id or tokenizer kind."""
        return self._pieces[token_id] if 0 <= token_id < len(self._pieces) else None

    def text(self, mark: str) -> str:
        """A special token as text by its short name (bos, eos); empty when the model has none."""
        index = self._metadata.get(f"tokenizer.ggml.{mark}_token_id")
        known = isinstance(index, int) and 0 <= index < len(self.tokens)
        return self.tokens[index].decode("utf-8", "replace") if known and isinstance(index, int) else ""

    def split(self, data: bytes, count: int) -> tuple[int, ...] | None:
        """The only way to write `data` with `count` tokens; None when there is none, or more than one.

        `data` is a part of one character (at most 8 bytes are looked at), so the search is tiny.
        """
        if count < 1 or not count <= len(data) <= 8:
            return None
        found = self._ways(data, count)
        return found[0] if len(found) == 1 else None

    def _ways(self, data: bytes, count: int) -> list[tuple[int, ...]]:
        if count == 1:
            return [(only,) for only in self._ids.get(data, ())]
        return [
            (head, *rest)
            for cut in range(1, len(data) - count + 2)
            for head in self._ids.get(data[:cut], ())
            for rest in self._ways(data[cut:], count - 1)
        ]

    def _piece(self, index: int, token: bytes) -> bytes | None:
        if self._types[index] in _SILENT_TYPES:
            return b""
        if self.kind == "gpt2":
            # Tokens that the model's maker added are plain text, the others are written in the byte alphabet.
            return token if self._types[index] == 4 else from_alphabet(token)
        if self.kind == "llama":
            if self._types[index] == _BYTE_TYPE and len(token) == 6:
                return bytes((int(token[3:5], 16),))
            return token.replace(_SPACE_MARK, b" ")
        return None


def read_vocabulary(file: Path) -> Vocabulary:
    """The vocabulary of a GGUF file. Raises EngineError when it has none."""
    return Vocabulary(read_metadata(file), file.name)


def _add(state: hashlib._Hash, part: Value) -> None:
    data = part if isinstance(part, bytes) else repr(part).encode()
    state.update(len(data).to_bytes(4, "little"))
    state.update(data)


def _byte_alphabet() -> Mapping[str, int]:
    """GPT-2's letters for bytes: printable Latin-1 bytes stand for themselves, the others for letters from 256 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + at): byte for at, byte in enumerate(others)}


_ALPHABET = _byte_alphabet()


def from_alphabet(token: bytes) -> bytes:
    """The bytes that a token written in GPT-2's letters stands for; as it is when it has others."""
    text = token.decode("utf-8", "replace")
    if all(letter in _ALPHABET for letter in text):
        return bytes(_ALPHABET[letter] for letter in text)
    return token

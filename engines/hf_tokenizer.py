"""What a `tokenizer.json` says of its vocabulary: the raw bytes of each token, and a hash to compare vocabularies by.

Byte-level BPE (GPT-2's alphabet) and SentencePiece-like BPE (U+2581 for a space, `<0xAB>` for a byte). Reading text
into tokens is left to the runtime.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engines.vocabulary import from_alphabet
from protocol.errors import EngineError

MAX_FILE_BYTES = 128 << 20
SPACE_MARK = "\u2581"


class HfTokenizer:
    """The tokenizer files of a model folder. Raises EngineError for a file that is none."""

    def __init__(self, folder: Path) -> None:
        document = read_json(folder / "tokenizer.json")
        try:
            model = document["model"]
            self._tokens = _tokens(model)
            self._added = {int(one["id"]): one for one in document.get("added_tokens") or ()}
        except (KeyError, TypeError, ValueError, AttributeError) as err:
            raise EngineError(f"{folder.name}/tokenizer.json is not a tokenizer this engine can read") from err
        self._byte_level = '"ByteLevel"' in json.dumps([document.get("pre_tokenizer"), document.get("decoder")])
        self.digest = _digest(document)

    @property
    def size(self) -> int:
        """One more than the highest id."""
        return 1 + max((*self._tokens, *self._added), default=-1)

    def piece(self, token_id: int) -> bytes:
        """Raw bytes of a token as it shows in an answer; empty for special and unknown ones."""
        added = self._added.get(token_id)
        if added is not None:
            return b"" if added.get("special") else str(added.get("content", "")).encode()
        token = self._tokens.get(token_id, "")
        if self._byte_level:
            return from_alphabet(token.encode())
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes((int(token[3:5], 16),))
        return token.replace(SPACE_MARK, " ").encode()


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object from a file of bounded size. Raises EngineError."""
    try:
        if file.stat().st_size > MAX_FILE_BYTES:
            raise EngineError(f"{file.name} has more than {MAX_FILE_BYTES} bytes")
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as err:
        raise EngineError(
            f"{file.parent.name}/{file.name} cannot be read", next_step="fetch the model's folder again"
        ) from err
    if not isinstance(found, dict):
        raise EngineError(f"{file.parent.name}/{file.name} is no JSON object")
    return found


def _tokens(model: Mapping[str, Any]) -> dict[int, str]:
    listed = model["vocab"]
    if isinstance(listed, dict):
        return {int(number): str(token) for token, number in listed.items()}
    return {number: str(entry[0]) for number, entry in enumerate(listed)}


def _digest(document: Mapping[str, Any]) -> str:
    """Hash of all that turns text into ids and back: files that differ in layout only have the same."""
    parts = {key: document.get(key) for key in ("added_tokens", "normalizer", "pre_tokenizer", "decoder", "model")}
    return hashlib.sha256(json.dumps(parts, sort_keys=True, separators=(",", ":")).encode()).hexdigest()

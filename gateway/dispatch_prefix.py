"""How much of a prompt a local engine has read before: engines reuse the longest common prefix of earlier turns. Pure.

An estimate for the device's TTFT: prompts are marked at the ends of their turns (a text every 512 characters, ids every
64), and the longest mark that an earlier prompt of this target shares counts as cached. Hashes only; no text is kept.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from protocol.chat import prompt_bytes
from protocol.text import Message, Prompt

KEPT_MARKS = 256
BLOCK_CHARACTERS, BLOCK_IDS = 512, 64
BYTES_PER_ID = 4


class PrefixMemory:
    """Marks of the prompts that one engine read last, the newest kept longest."""

    def __init__(self, kept: int = KEPT_MARKS) -> None:
        self._kept = kept
        self._marks: OrderedDict[int, None] = OrderedDict()

    def read(self, prompt: Prompt) -> None:
        """The engine has read this prompt."""
        for mark, _ in _marks_of(prompt):
            self._marks[mark] = None
            self._marks.move_to_end(mark)
            if len(self._marks) > self._kept:
                self._marks.popitem(last=False)

    def cached_ratio(self, prompt: Prompt) -> float:
        """Share of the prompt, by its bytes, that was read before; 0 to 1."""
        if not self._marks:
            return 0.0
        longest, total = 0, prompt_bytes(prompt)
        for mark, size_bytes in _marks_of(prompt):
            if mark not in self._marks:
                break
            longest = size_bytes
        return longest / total if total else 0.0


def _marks_of(prompt: Prompt) -> Iterator[tuple[int, int]]:
    """(hash of the prompt up to here, bytes up to here), ascending."""
    mark, size_bytes = 0, 0
    for piece, piece_bytes in _pieces(prompt):
        mark = hash((mark, piece))
        size_bytes += piece_bytes
        yield mark, size_bytes


def _pieces(prompt: Prompt) -> Iterator[tuple[object, int]]:
    """(what is hashed, its bytes): blocks of a text, turns, or blocks of ids."""
    if isinstance(prompt, str):
        for at in range(0, len(prompt), BLOCK_CHARACTERS):
            block = prompt[at : at + BLOCK_CHARACTERS]
            yield block, len(block.encode("utf-8"))
        return
    ids: list[int] = []
    for item in prompt:
        if isinstance(item, Message):
            yield (item.role, item.content), len(item.content.encode("utf-8"))
            continue
        ids.append(item)
        if len(ids) == BLOCK_IDS:
            yield tuple(ids), BYTES_PER_ID * BLOCK_IDS
            ids = []
    if ids:
        yield tuple(ids), BYTES_PER_ID * len(ids)

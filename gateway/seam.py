"""Where an answer may be cut: never inside a character, a tool call, or a word that is tokenised again. Pure."""

from __future__ import annotations

from engines.pieces import unfinished_bytes

TOOL_CALL_MARKS = ((b"<tool_call>", b"</tool_call>"), (b"[TOOL_CALLS]", b"\n\n"), (b"<|python_tag|>", b"<|eom_id|>"))
"""Opening and closing marks of tool calls in the answers of Hermes/Qwen, Mistral and Llama models."""

# From here on scripts are written without spaces between words (CJK and its punctuation).
FIRST_UNSPACED = "\u2e80"


def ends_whole(data: bytes) -> bool:
    """Whether `data` ends on a character boundary."""
    return unfinished_bytes(data) == 0


def inside_tool_call(answer: bytes) -> bool:
    """Whether a tool call is open at the end of `answer`, or its opening mark has begun."""
    for opening, closing in TOOL_CALL_MARKS:
        begun = answer.rfind(opening)
        if begun >= 0 and answer.find(closing, begun + len(opening)) < 0:
            return True
        if any(answer.endswith(opening[:length]) for length in range(1, len(opening))):
            return True
    return False


def between_words(answer: bytes, following: bytes) -> bool:
    """Whether no word spans the place between `answer` and the piece `following`.

    A place after a blank is refused too: tokenisers join a space to the word behind it, and chat templates trim the
    end of a turn that is continued, so what follows would come with a doubled or a missing blank.
    """
    before, after = answer.decode("utf-8", "replace")[-1:], following.decode("utf-8", "replace")[:1]
    if not before or not after:
        return not before
    if before.isspace():
        return False
    if after.isspace():
        return True
    return before >= FIRST_UNSPACED or not (before.isalnum() and after.isalnum())


def may_cut(answer: bytes, following: bytes | None, by_ids: bool) -> bool:
    """Whether the answer may go on elsewhere after `answer`.

    Args:
        following: the source's next piece, known only when it was looked at; needed for the text path.
        by_ids: the target takes token ids, so words do not matter.
    """
    if not ends_whole(answer[-4:]) or inside_tool_call(answer):
        return False
    return by_ids or (following is not None and between_words(answer[-4:], following))

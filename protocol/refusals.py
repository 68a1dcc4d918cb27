"""Errors across the handoff wire: MidstreamError to Refuse and back to the same class."""

from __future__ import annotations

from collections.abc import Iterator

from protocol import errors
from protocol.errors import ContextOverflow, EngineError, Full, MidstreamError
from protocol.handoff import Refuse

MAX_MESSAGE_CHARS = 500


def refusal(err: MidstreamError) -> Refuse:
    """The frame that tells a peer of `err`."""
    counts: dict[str, int] = {}
    if isinstance(err, ContextOverflow):
        counts = {"prompt_tokens": err.prompt_tokens, "context_tokens": err.context_tokens}
    return Refuse(
        code=err.code,
        message=err.message[:MAX_MESSAGE_CHARS],
        retry_after_s=err.retry_after_s if isinstance(err, Full) else None,
        field=err.field,
        counts=counts,
    )


def as_error(frame: Refuse) -> MidstreamError:
    """The error a peer meant; an unknown code becomes EngineError (another engine may still do it)."""
    if frame.code == ContextOverflow.code:
        counts = frame.counts
        return ContextOverflow(
            prompt_tokens=counts.get("prompt_tokens", 0), context_tokens=counts.get("context_tokens", 0)
        )
    message = frame.message[:MAX_MESSAGE_CHARS] or f"the peer refused: {frame.code[:64]}"
    cls = _BY_CODE.get(frame.code, EngineError)
    if issubclass(cls, Full):
        return cls(message, retry_after_s=frame.retry_after_s or 1.0)
    return cls(message, field=frame.field)


def _all_classes(root: type[MidstreamError]) -> Iterator[type[MidstreamError]]:
    yield root
    for cls in root.__subclasses__():
        yield from _all_classes(cls)


_BY_CODE = {
    cls.code: cls
    for cls in _all_classes(errors.MidstreamError)
    if cls.__module__ == errors.__name__ and cls is not ContextOverflow
}

"""The one error root and its five families, told apart by what the caller should do.

    MidstreamError
    |-- ConfigError        the operator fixes a file, flag or environment variable
    |-- EngineError        this model or runtime cannot do it here; use another engine or arm
    |   `-- EngineCrashed  the engine's process died; restart it or use another
    |-- LinkError          the network or peer failed; retry or stay local
    |   |-- LinkTimeout    the deadline passed
    |   `-- LinkClosed     the peer went away
    |-- RejectedError      the request was understood and refused
    |   |-- BadRequest, NotFound, NotAllowed, TooLarge, ContextOverflow
    |   |-- Unauthenticated  no key, or one that is not known (a NotAllowed)
    |   |-- BudgetExceeded   money or quota is used up; a retry does not help before the reset
    |   `-- Full           over capacity; carries retry_after_s
    |       |-- Loading    the model is not ready yet
    |       `-- RateLimited  who asks has asked too often
    `-- ProtocolError      the peer broke the rules of a document or a frame; names the field

Every error says the next step where there is one. Bugs are RuntimeError or AssertionError, never one of these.
"""

from __future__ import annotations

from collections.abc import Mapping


class MidstreamError(Exception):
    """Root of all errors raised by midstream.

    Args:
        message: what happened, one sentence.
        next_step: what the reader can do about it, one sentence or empty.
        field: dotted name of the offending field, or None.
    """

    http_status: int = 500
    code: str = "internal_error"

    def __init__(self, message: str, *, next_step: str = "", field: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.next_step = next_step
        self.field = field

    def __str__(self) -> str:
        return f"{self.message} ({self.next_step})" if self.next_step else self.message


class ConfigError(MidstreamError):
    """A file, flag or environment variable must be changed by the operator."""

    code = "config_error"


class EngineError(MidstreamError):
    """This engine cannot do it here; another engine or arm may."""

    http_status = 500
    code = "engine_error"


class EngineCrashed(EngineError):
    """The engine's process died in the middle of the work."""

    http_status = 503
    code = "engine_crashed"


class LinkError(MidstreamError):
    """The network or the peer failed: retry, or stay on the device."""

    http_status = 502
    code = "upstream_error"


class LinkTimeout(LinkError):
    """The deadline passed before the peer answered."""

    http_status = 504
    code = "upstream_timeout"


class LinkClosed(LinkError):
    """The peer went away in the middle of an exchange."""

    code = "upstream_closed"


class RejectedError(MidstreamError):
    """The request was understood and refused."""

    http_status = 400
    code = "rejected"


class BadRequest(RejectedError):
    """A field of the request is wrong; `field` names it."""

    code = "invalid_value"


class Unsupported(RejectedError):
    """A valid request for something that this build or model cannot do."""

    code = "unsupported_parameter"


class NotFound(RejectedError):
    """No such model, route or document."""

    http_status = 404
    code = "model_not_found"


class NotAllowed(RejectedError):
    """Who asks is unknown or may not do this."""

    http_status = 403
    code = "not_allowed"


class Unauthenticated(NotAllowed):
    """No key, or one that is not known here."""

    http_status = 401
    code = "invalid_api_key"


class BudgetExceeded(RejectedError):
    """A budget of money or tokens is used up. A retry helps after `reset_s` seconds; None: not by itself.

    `headers` are further headers of the refusal (x-ratelimit-*).
    """

    http_status = 429
    code = "budget_exceeded"

    def __init__(
        self,
        message: str,
        *,
        reset_s: float | None = None,
        next_step: str = "",
        field: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message, next_step=next_step, field=field)
        self.reset_s = reset_s
        self.headers: Mapping[str, str] = headers or {}


class TooLarge(RejectedError):
    """A body, frame or document is over its stated maximum."""

    http_status = 413
    code = "too_large"


class ContextOverflow(RejectedError):
    """Prompt and requested answer do not fit into the model's context; nothing was dropped."""

    code = "context_length_exceeded"

    def __init__(self, *, prompt_tokens: int, context_tokens: int) -> None:
        super().__init__(
            f"the prompt has {prompt_tokens} tokens and the model's context holds {context_tokens}",
            next_step="shorten the prompt or choose a model with a larger context",
            field="messages",
        )
        self.prompt_tokens = prompt_tokens
        self.context_tokens = context_tokens


class Full(RejectedError):
    """Over capacity now; come back after `retry_after_s` seconds or go elsewhere."""

    http_status = 503
    code = "over_capacity"

    def __init__(self, message: str, *, retry_after_s: float, next_step: str = "") -> None:
        super().__init__(message, next_step=next_step or f"try again after {max(1, round(retry_after_s))} s")
        self.retry_after_s = retry_after_s


class Loading(Full):
    """The model is being loaded; come back after `retry_after_s` seconds."""

    code = "model_loading"


class RateLimited(Full):
    """Who asks has asked too often; others are not affected. `headers`: x-ratelimit-* of the refusal."""

    http_status = 429
    code = "rate_limit_exceeded"

    def __init__(
        self, message: str, *, retry_after_s: float, next_step: str = "", headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message, retry_after_s=retry_after_s, next_step=next_step)
        self.headers: Mapping[str, str] = headers or {}


class ProtocolError(MidstreamError):
    """A document or frame breaks its rules; `field` names where."""

    http_status = 400
    code = "protocol_error"

"""How long a prompt and its answer may be, by policy; pure."""

from __future__ import annotations

from attrs import evolve

from protocol.chat import ChatRequest, prompt_bytes, tools_bytes
from protocol.errors import TooLarge
from protocol.policy import LimitsPolicy


def opened_within_limits(asked: ChatRequest, opened: ChatRequest, limits: LimitsPolicy) -> ChatRequest:
    """As `within_limits`, for a request with its conversation before it.

    A client cannot shorten what was kept for it, so it is told what it can do.
    """
    if opened is asked:
        return within_limits(asked, limits)
    within_limits(asked, limits)
    try:
        return within_limits(opened, limits)
    except TooLarge as err:
        raise TooLarge(
            f"with its conversation {err.message}",
            next_step="begin another conversation_id, with a summary of this one if it matters",
            field="conversation_id",
        ) from err


def within_limits(chat: ChatRequest, limits: LimitsPolicy) -> ChatRequest:
    """The request with its answer bounded by policy. Raises TooLarge for a prompt over the bound."""
    size_bytes = prompt_bytes(chat.prompt) + tools_bytes(chat.tools)
    check_size(size_bytes, limits, "messages" if chat.endpoint == "chat" else "prompt")
    bounded = min(chat.sampling.max_tokens, limits.max_answer_tokens)
    if bounded == chat.sampling.max_tokens:
        return chat
    return evolve(chat, sampling=evolve(chat.sampling, max_tokens=bounded))


def check_size(size_bytes: int, limits: LimitsPolicy, field: str) -> None:
    """Raises TooLarge for a prompt over the bound."""
    if size_bytes > limits.max_prompt_bytes:
        raise TooLarge(
            f"the prompt has {size_bytes} bytes, policy.limits.max_prompt_bytes is {limits.max_prompt_bytes}",
            next_step="shorten the prompt or change the policy",
            field=field,
        )

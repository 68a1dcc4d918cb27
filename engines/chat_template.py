"""Renders a model's chat template (Jinja text) for engines that do not do it themselves."""

from __future__ import annotations

import datetime
from collections.abc import Sequence

from engines.llama_server_wire import template_messages
from protocol.errors import BadRequest, EngineError
from protocol.text import Message

MAX_TEMPLATE_BYTES = 1 << 20


def render(template: str, messages: Sequence[Message], *, begin: str, end: str) -> str:
    """The prompt of `messages`, open for the assistant's answer.

    `begin` and `end` are the model's begin and end marks as text. Raises BadRequest when the template refuses the
    messages, EngineError when it cannot be used at all.
    """
    if len(template) > MAX_TEMPLATE_BYTES:
        raise EngineError(f"the chat template has {len(template)} characters")
    try:
        from jinja2 import TemplateError, TemplateSyntaxError
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as err:
        raise EngineError("jinja2 is not installed", next_step="pip install jinja2") from err

    def raise_exception(message: str) -> None:
        raise BadRequest(f"the chat template refuses these messages: {message}", field="messages")

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now(datetime.UTC).strftime(form)
    try:
        return environment.from_string(template).render(
            messages=template_messages(messages), add_generation_prompt=True, bos_token=begin, eos_token=end, tools=None
        )
    except TemplateSyntaxError as err:
        raise EngineError(f"the chat template is broken: {err}", next_step="give another chat_template") from err
    except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as err:
        raise BadRequest(f"the chat template cannot write these messages: {err}", field="messages") from err

"""What a request needs of a target beyond text: pictures, tools, an answer in a given form. Pure."""

from __future__ import annotations

from collections.abc import Callable

from attrs import frozen

from protocol.chat import ChatRequest
from protocol.errors import Unsupported
from protocol.text import TextCapabilities


@frozen
class Want:
    """One need: the parameter that brought it, how it is met, and what to do when nobody can."""

    field: str
    what: str
    met: Callable[[TextCapabilities], bool]

    def refusal(self, model: str) -> Unsupported:
        """The error when no target of `model` meets it."""
        return Unsupported(
            f"model {model[:256]!r} cannot take {self.what} here",
            next_step=f"leave {self.field} out, or name a model that can",
            field=self.field,
        )


IMAGES = Want("messages", "images", lambda can: can.images)
FORCED = Want("tool_choice", "a forced tool call", lambda can: can.tools or can.grammar)
FORMAT = Want("response_format", "a response format", lambda can: can.tools or can.grammar)
FORMAT_WITH_TOOLS = Want("response_format", "a response format beside tools", lambda can: can.tools)


def wants(chat: ChatRequest) -> tuple[Want, ...]:
    """The needs of `chat`; empty for text, and for tools that may be called: every model can be told of those."""
    if not chat.tools and chat.response_format is None and not chat.has_images:
        return ()
    formed = chat.response_format is not None
    asked = (
        (IMAGES, chat.has_images),
        (FORCED, bool(chat.tools) and chat.tool_choice != "auto"),
        (FORMAT, formed and not chat.tools),
        (FORMAT_WITH_TOOLS, formed and bool(chat.tools)),
    )
    return tuple(want for want, needed in asked if needed)

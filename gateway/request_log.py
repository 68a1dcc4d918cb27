"""One line of the log per text request: route, target, tokens, time, fallback; never a word of it."""

from __future__ import annotations

import logging

from protocol.events import Event, TextDone

log = logging.getLogger("midstream.requests")


def request_line(done: TextDone) -> str:
    """What is told of a request that ended."""
    sides = " ".join(f"{name}:{tokens}" for name, tokens in done.sides) or "nobody"
    ttft = "-" if done.ttft_s is None else f"{done.ttft_s:.3f}"
    words = [
        f"{done.request_id} {done.status} model={done.model} level={done.level or '-'} targets={sides}",
        f"in={done.prompt_tokens} out={done.completion_tokens} ttft_s={ttft} total_s={done.total_s:.3f}",
        f"usd={done.usd:.6f} cached={str(done.cached).lower()} fallback={str(done.moved).lower()}",
    ]
    if done.trace is not None:
        words.append(f"trace={done.trace.trace_id}")
    return " ".join(words) + f" reason={done.reason}"


def log_requests(event: Event) -> None:
    """An Emit: at level info."""
    if isinstance(event, TextDone) and log.isEnabledFor(logging.INFO):
        log.info("%s", request_line(event).translate(_ONE_LINE))


_ONE_LINE = dict.fromkeys((*range(32), 127, 133, 8232, 8233), " ")
"""A model's name comes from the client: it must not begin a line of its own."""

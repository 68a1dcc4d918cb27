"""MQTT topic filters (MQTT 3.1.1, section 4.7): `+` one level, `#` the rest; pure."""

from __future__ import annotations

from protocol.errors import BadRequest

MAX_TOPIC_BYTES = 512


def check_topic(topic: str) -> None:
    """Raises BadRequest unless `topic` can be published to."""
    _check_text(topic)
    if "+" in topic or "#" in topic:
        raise BadRequest(f"{topic!r} has wildcards; only subscriptions may have them", field="topic")


def check_pattern(pattern: str) -> None:
    """Raises BadRequest unless `pattern` is a valid subscription."""
    _check_text(pattern)
    levels = pattern.split("/")
    for place, level in enumerate(levels):
        if level not in ("+", "#") and ("+" in level or "#" in level):
            raise BadRequest(f"in {pattern!r} a wildcard must be a whole level", field="pattern")
        if level == "#" and place != len(levels) - 1:
            raise BadRequest(f"in {pattern!r} '#' must be the last level", field="pattern")


def _check_text(topic: str) -> None:
    if not topic or "\0" in topic or len(topic.encode()) > MAX_TOPIC_BYTES:
        raise BadRequest(f"a topic has 1 to {MAX_TOPIC_BYTES} bytes and no NUL", field="topic")


def matches(pattern: str, topic: str) -> bool:
    """Whether a message on `topic` belongs to the subscription `pattern`.

    >>> matches("a/+/c", "a/b/c"), matches("a/#", "a"), matches("#", "$SYS/x")
    (True, True, False)
    """
    wanted, levels = pattern.split("/"), topic.split("/")
    if levels[0].startswith("$") and wanted[0] in ("+", "#"):
        return False
    for place, level in enumerate(wanted):
        if level == "#":
            return True
        if place >= len(levels) or level not in ("+", levels[place]):
            return False
    return len(wanted) == len(levels)

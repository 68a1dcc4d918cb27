"""The thread that owns a native context, seen from outside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engines.context_owner import ContextOwner
from engines.decoding import DecodingModel
from protocol.errors import EngineError, MidstreamError


def test_whoever_asks_after_a_failed_load_is_told_why_it_failed() -> None:
    def load(should_abort: Callable[[], bool]) -> DecodingModel:
        raise EngineError("the library cannot be loaded")

    owner = ContextOwner(load, name="m", slots=1)
    owner.close()
    told: list[MidstreamError | None] = []

    def done(result: Any, err: MidstreamError | None) -> None:
        told.append(err)

    owner.call(lambda model: None, done)
    assert [str(err) for err in told] == ["the library cannot be loaded"]

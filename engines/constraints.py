"""Grammars and schemas of answers that were begun elsewhere or stood still: what they leave for the rest. Pure.

llama.cpp starts a grammar at the first token it generates, so a request that goes on with an answer is given the
grammar of what may still come.
"""

from __future__ import annotations

from attrs import evolve

from engines.pieces import unfinished_bytes
from protocol.errors import EngineError, MidstreamError
from protocol.gbnf import rest
from protocol.schema_grammar import schema_grammar
from protocol.text import Sampling


def going_on(sampling: Sampling, said: bytes) -> Sampling:
    """`sampling` for what follows `said`, the answer so far. Raises EngineError where that cannot be told."""
    if not said or (not sampling.grammar and sampling.json_schema is None):
        return sampling
    if unfinished_bytes(said[-4:]):
        raise EngineError("an answer under a grammar cannot go on inside a character")
    try:
        grammar = sampling.grammar or schema_grammar(sampling.json_schema or {})
        return evolve(sampling, grammar=rest(grammar, said.decode("utf-8", "replace")), json_schema=None)
    except MidstreamError as err:
        raise EngineError(f"the rest of an answer under a grammar cannot be told: {err.message}") from err

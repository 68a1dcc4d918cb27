"""What requests taught a cost table, on disk: a start begins where the last run ended.

One small file per model, of the bundle and engine that it was learnt with; written seldom, since cards wear out.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from pathlib import Path

from attrs import define, evolve, frozen

from protocol.clock import Clock
from protocol.decode import check_schema, decode, encode
from protocol.durable import read_durable, write_durable
from protocol.errors import MidstreamError, ProtocolError
from split_models.costs import CostTable

SCHEMA = "midstream.costs/1.0"
MAX_PARTS, MAX_BYTES = 4096, 1 << 20
WRITE_EVERY_S = 900.0
WORTH_WRITING_RATIO = 1.15
"""A figure that changed by less is not worth a write."""

_log = logging.getLogger("midstream.split")


@frozen
class KeptCosts:
    """Seconds by part at a slow-down of 1. digest: of the bundle. engine: name and version of what ran the heads."""

    schema: str
    digest: str
    engine: str
    device: Mapping[str, float]
    server: Mapping[str, float]


@define
class _Written:
    at_s: float
    kept: KeptCosts


class CostMemory:
    """Of all models of a device. `path_of` names the file of a model."""

    def __init__(self, path_of: Callable[[str], Path], engine: str, clock: Clock) -> None:
        self._path_of = path_of
        self._engine = engine
        self._clock = clock
        self._written: dict[str, _Written] = {}

    async def read(self, model: str, digest: str) -> KeptCosts | None:
        """What is kept of this bundle and engine."""
        kept = await asyncio.to_thread(read_durable, self._path_of(model), _parsed)
        if kept is None or (kept.digest, kept.engine) != (digest, self._engine):
            return None
        self._written[model] = _Written(self._clock(), kept)
        return kept

    async def keep(self, model: str, digest: str, table: CostTable, *, now: bool = False) -> bool:
        """Write what `table` has learnt, unless it is little news or the last write was a moment ago.

        now: the last write may have been a moment ago. False when nothing was written. A disk that cannot be written
        is said and let be.
        """
        learnt = table.learnt()
        before = self._written.get(model)
        kept = KeptCosts(SCHEMA, digest, self._engine, dict(learnt["device"]), dict(learnt["server"]))
        if before is not None and (before.kept.digest, before.kept.engine) == (digest, self._engine):
            kept = evolve(
                kept, device={**before.kept.device, **kept.device}, server={**before.kept.server, **kept.server}
            )
        early = before is not None and not now and self._clock() - before.at_s < WRITE_EVERY_S
        if early or not (kept.device or kept.server) or (before is not None and not _news(before.kept, kept)):
            return False
        self._written[model] = _Written(self._clock(), kept)
        try:
            await asyncio.to_thread(write_durable, self._path_of(model), encode(kept))
        except MidstreamError as err:
            _log.info("what %s costs is not kept: %s", model, err)
            return False
        return True


def _news(before: KeptCosts, after: KeptCosts) -> bool:
    if (before.digest, before.engine) != (after.digest, after.engine):
        return True
    return any(_differs(getattr(before, side), getattr(after, side)) for side in ("device", "server"))


def _differs(before: Mapping[str, float], after: Mapping[str, float]) -> bool:
    for part, seconds in after.items():
        old_s = before.get(part, 0.0)
        if max(old_s, seconds) > WORTH_WRITING_RATIO * min(old_s, seconds):
            return True
    return False


def _parsed(data: bytes) -> KeptCosts:
    kept = decode(KeptCosts, data, what="kept costs", max_bytes=MAX_BYTES)
    check_schema(kept.schema, SCHEMA)
    for side in (kept.device, kept.server):
        if len(side) > MAX_PARTS or not all(0.0 < seconds < float("inf") for seconds in side.values()):
            raise ProtocolError("seconds are above 0, of a bounded number of parts", field="device")
    return kept

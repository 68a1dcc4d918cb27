"""What requests taught survives a restart, and is written seldom."""

from __future__ import annotations

from pathlib import Path

import pytest

from protocol.clock import FakeClock
from split_models.cost_memory import WRITE_EVERY_S, CostMemory
from split_models.costs import CostTable
from tests.unit.split_models.parts import DIGEST, cut, manifest


def taught(seconds: float) -> CostTable:
    table = CostTable(manifest(cut("003")))
    for _ in range(5):
        table.observe("device", "whole", seconds)
        table.observe("server", "cloud", seconds / 2)
    return table


def memory(folder: Path, clock: FakeClock, engine: str = "onnx 1.0") -> CostMemory:
    return CostMemory(lambda model: folder / f"{model}.json", engine, clock)


async def test_a_start_begins_where_the_last_run_ended(tmp_path: Path) -> None:
    clock = FakeClock()
    assert await memory(tmp_path, clock).keep("m", DIGEST, taught(0.4))
    kept = await memory(tmp_path, clock).read("m", DIGEST)
    assert kept is not None
    table = CostTable(manifest(cut("003")))
    table.recall({"device": kept.device, "server": kept.server})
    assert table.seconds("device", "whole") == pytest.approx(0.4)
    assert table.seconds("server", "cloud") == pytest.approx(0.2)


async def test_another_bundle_or_engine_begins_anew(tmp_path: Path) -> None:
    clock = FakeClock()
    await memory(tmp_path, clock).keep("m", DIGEST, taught(0.4))
    assert await memory(tmp_path, clock).read("m", "f" * 64) is None
    assert await memory(tmp_path, clock, "onnx 2.0").read("m", DIGEST) is None


async def test_little_news_and_fresh_news_are_not_written(tmp_path: Path) -> None:
    clock = FakeClock()
    kept = memory(tmp_path, clock)
    assert not await kept.keep("m", DIGEST, CostTable(manifest(cut("003")))), "nothing was learnt yet"
    assert await kept.keep("m", DIGEST, taught(0.4))
    assert not await kept.keep("m", DIGEST, taught(0.8)), "a moment ago"
    clock.advance(WRITE_EVERY_S)
    assert not await kept.keep("m", DIGEST, taught(0.41)), "little news"
    assert await kept.keep("m", DIGEST, taught(0.8))
    assert await kept.keep("m", DIGEST, taught(0.4), now=True), "the last chance of a stop"


async def test_what_was_kept_of_parts_that_did_not_run_stays(tmp_path: Path) -> None:
    clock = FakeClock()
    await memory(tmp_path, clock).keep("m", DIGEST, taught(0.4))
    later = memory(tmp_path, clock)
    await later.read("m", DIGEST)
    table = CostTable(manifest(cut("003")))
    for _ in range(5):
        table.observe("device", "head:003:int8", 0.05)
    assert await later.keep("m", DIGEST, table, now=True)
    kept = await memory(tmp_path, clock).read("m", DIGEST)
    assert kept is not None
    assert dict(kept.device) == {"whole": pytest.approx(0.4), "head:003:int8": pytest.approx(0.05)}


NEGATIVE = b'{"schema":"midstream.costs/1.0","digest":"","engine":"onnx 1.0","device":{"whole":-1},"server":{}}'


@pytest.mark.parametrize("content", [b"", b"{", b'{"schema": "midstream.costs/9.0"}', NEGATIVE])
async def test_a_file_that_is_torn_or_foreign_is_as_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "m.json").write_bytes(content)
    assert await memory(tmp_path, FakeClock()).read("m", "") is None


async def test_a_disk_that_cannot_be_written_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "m.json").mkdir()
    assert not await memory(tmp_path, FakeClock()).keep("m", DIGEST, taught(0.4))

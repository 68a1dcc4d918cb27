"""The wire benchmark moves the same bytes by every way, through real processes; its figures are no test."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from benchmarks.wire import codec_keys, link_keys
from benchmarks.wire_codecs import Weighed
from benchmarks.wire_link import KB64, MB, Series, in_turns, peer


@pytest.mark.timeout(50)
def test_every_way_moves_the_bytes_plain_and_shaped(tmp_path: Path) -> None:
    with peer(str(tmp_path)) as ports, peer(str(ports["http"]), str(ports["raw"])) as shaped:
        ca_pem = (tmp_path / "ca.pem").read_text()
        secure = asyncio.run(in_turns(ports, 4_096, rounds=2, ca_pem=ca_pem))
        plain = asyncio.run(in_turns(ports, 4_096, rounds=2))
        slow = asyncio.run(in_turns(shaped, 4_096, rounds=2))
    assert {len(seconds) for seconds in secure.seconds.values()} == {2} and len(secure.seconds) == 5
    for series in (plain, slow):
        assert {way: len(seconds) for way, seconds in series.seconds.items()} == {"raw": 2, "http": 2, "frames": 2}
    assert min(min(seconds) for seconds in slow.seconds.values()) >= 0.02, "a round trip takes two delays"


def test_the_keys_are_those_of_the_default_way_and_of_each() -> None:
    series = [Series(size, {"raw": [0.001], "http": [0.003], "frames": [0.002]}) for size in (MB, KB64)]
    keys = link_keys(series, series)
    assert keys["default"] == "frames"
    assert keys["loopback_added_ms_1mb"] == keys["loopback_added_ms_1mb_frames"] == pytest.approx(1.0)
    assert keys["shaped_time_ratio_http"] == pytest.approx(3.0)
    told = codec_keys([Weighed("m", "001", 5.0, 0.01), Weighed("m", "002", 4.5, 0.002)])
    assert (told["int8_zstd_ratio_median"], told["int8_zstd_ratio_min"], told["error"]) == (4.75, 4.5, 0.01)

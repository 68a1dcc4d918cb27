"""The line that a request leaves in the log."""

from __future__ import annotations

import logging
import threading

import pytest
from attrs import evolve

from gateway.request_log import MAX_WAITING, RequestLog, request_line
from protocol.events import ArmSwitched, TextDone
from protocol.trace import entered

DONE = TextDone(
    at_s=1.0, request_id="abc", model="m", status="ok", prompt_tokens=7, completion_tokens=9, ttft_s=0.25, total_s=1.5,
    sides=(("device", 4), ("cloud", 5)), reason="complexity 0.8", level="heuristic", usd=0.002,
    trace=entered("", bytes(range(24))),
)  # fmt: skip


def test_a_line_tells_route_targets_tokens_time_and_fallback() -> None:
    assert request_line(DONE) == (
        "abc ok model=m level=heuristic targets=device:4 cloud:5 in=7 out=9 ttft_s=0.250 total_s=1.500 usd=0.002000 "
        f"cached=false fallback=true trace={bytes(range(16)).hex()} reason=complexity 0.8"
    )
    nobody = request_line(evolve(DONE, sides=(), ttft_s=None, trace=None, status="rate_limited", level=""))
    assert (
        "rate_limited" in nobody and "targets=nobody" in nobody and "ttft_s=-" in nobody and "fallback=false" in nobody
    )


def test_it_is_one_line_at_level_info_whatever_the_model_is_called(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="midstream.requests"):
        requests = RequestLog()
        requests(evolve(DONE, model="m\nroot: owned\u2028x"))
        requests(ArmSwitched(at_s=0.0, model="m", source="a", target="b", reason=""))
        requests.close()
        requests.close()
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert len(record.getMessage().splitlines()) == 1


def test_the_thread_ends_when_nothing_waits_and_another_writes_what_comes_later(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, logger="midstream.requests"):
        requests = RequestLog()
        for lines in (1, 2):
            requests(DONE)
            for thread in [t for t in threading.enumerate() if t.name == "midstream-requests"]:
                thread.join(10)
            assert len(caplog.records) == lines
        requests.close()
        requests(DONE)
    assert len(caplog.records) == 2


def test_above_info_nothing_is_kept(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="midstream.requests"):
        requests = RequestLog()
        requests(DONE)
        requests.close()
    assert not caplog.records


def test_a_log_that_is_too_slow_loses_lines_and_says_how_many(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="midstream.requests"):
        requests = RequestLog()
        caplog.handler.acquire()  # nothing is taken meanwhile
        try:
            for _ in range(MAX_WAITING + 700):
                requests(DONE)
        finally:
            caplog.handler.release()
        requests.close()
    lines = [record for record in caplog.records if record.levelno == logging.INFO]
    (lost,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(lines) + int(lost.split()[0]) == MAX_WAITING + 700

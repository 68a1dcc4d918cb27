"""Statistics over an audit: sums, shares, what all cloud would have cost, and a page that shows names as they are."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloud_stub.report_cli import report as report_command
from gateway.audit import FileAudit
from gateway.context import Caller
from gateway.ports import Findings, Invocation, Span, Spent
from gateway.report import MAX_NAMES, Prices, series, summarise
from gateway.report_page import as_csv, page, shadow_csv, text
from gateway.report_shadow import MAX_ROWS
from protocol.clock import WallTime

ROW: dict[str, Any] = {
    "kind": "invocation", "at_s": 7200.0, "tenant": "acme", "model": "m", "status": "ok", "level": "rules", "found": {},
    "redacted": False, "local_only": False, "cached": False, "saved_tokens": 0, "prompt_tokens": 100,
    "completion_tokens": 50, "cached_tokens": 0, "usd": 0.0, "sides": [["device", 50]], "ttft_s": 0.2, "total_s": 1.0,
}  # fmt: skip
SIDE = {
    "target": "device", "model": "m", "status": "ok", "finish": "stop", "chars": 9, "tokens": 50, "calls": [],
    "ttft_s": 0.2, "total_s": 1.0, "usd": 0.0,
}  # fmt: skip
SHADOW: dict[str, Any] = {
    "kind": "shadow", "at_s": 1.0, "intent": "qa", "level": "rules", "similarity_ratio": 0.7, "alike": True,
    "old": SIDE, "other": SIDE | {"target": "cloud", "model": "big", "usd": 0.02, "ttft_s": 0.6},
}  # fmt: skip
PAID = ROW | {"usd": 0.03, "sides": [["openai", 50]], "ttft_s": 0.6}


def test_the_headline_of_a_small_log() -> None:
    rows = [
        ROW,
        PAID,
        ROW | {"cached": True, "sides": [["cache", 4]], "prompt_tokens": 0, "completion_tokens": 0, "ttft_s": 0.0},
        PAID | {"sides": [["device", 20], ["openai", 30]], "usd": 0.02, "at_s": 11_000.0},
        ROW | {"status": "stream_lost", "sides": [], "completion_tokens": 0, "ttft_s": None, "at_s": 11_000.0},
        {"kind": "management", "at_s": 1.0, "who": "x"},
        SHADOW,
        SHADOW | {"alike": False, "similarity_ratio": 0.1},
        SHADOW | {"alike": False, "similarity_ratio": None, "other": SHADOW["other"] | {"status": "engine_crashed"}},
    ]
    found = summarise(rows).headline(Prices())
    assert found["requests"] == 5
    assert found["own_tokens_ratio"] == pytest.approx(54 / 154)
    assert found["cost_usd"] == pytest.approx(0.05)
    assert found["all_cloud_usd"] == pytest.approx(0.03 / 150 * (400 + 150))
    assert found["saved_ratio"] == pytest.approx(1 - 0.05 / 0.11)
    assert found["mean_ttft_s"] == pytest.approx((0.2 + 0.6 + 0.0 + 0.6) / 4)
    assert (found["cache_hit_ratio"], found["handed_over_ratio"], found["failed_ratio"]) == (0.2, 0.2, 0.2)
    assert (found["shadow_requests"], found["shadow_agreement_ratio"]) == (3, 0.5)
    assert found["shadow_cost_usd"] == pytest.approx(0.06)


def test_given_prices_stand_in_for_what_was_never_paid() -> None:
    found = summarise([ROW] * 10)
    assert found.headline(Prices())["all_cloud_usd"] is None
    assert found.headline(Prices(1e-6, 2e-6))["all_cloud_usd"] == pytest.approx(10 * (100e-6 + 100e-6))


def test_an_empty_log_is_no_error() -> None:
    found = summarise([])
    assert found.headline(Prices())["requests"] == 0
    assert all("unknown" in line or "0" in line for line in text(found, Prices()))
    assert page(found, Prices()).startswith("<!doctype html>") and len(as_csv(found).splitlines()) == 1


@given(st.lists(st.tuples(st.floats(0, 1e6), st.integers(0, 500), st.booleans()), max_size=40))
def test_periods_add_up_to_the_whole(requests: list[tuple[float, int, bool]]) -> None:
    rows = [
        (PAID if paid else ROW) | {"at_s": at_s, "sides": [["x", tokens]], "completion_tokens": tokens}
        for at_s, tokens, paid in requests
    ]
    found = summarise(rows, 1000.0)
    periods = series(found)
    assert sum(p.requests for p in periods) == len(rows)
    assert sum(p.own_tokens + p.paid_tokens for p in periods) == sum(tokens for _, tokens, _ in requests)
    assert [p.begins_s for p in periods] == sorted(p.begins_s for p in periods)
    share = found.own_share
    assert share is None or 0 <= share <= 1


def test_many_names_end_in_other() -> None:
    found = summarise([ROW | {"tenant": f"t{number}"} for number in range(3 * MAX_NAMES)])
    assert len(found.by_tenant) == MAX_NAMES + 1
    assert found.by_tenant["other"] == 2 * MAX_NAMES


def test_the_page_is_well_formed_and_escapes_names() -> None:
    evil = "<script>alert(1)</script>"
    rows = [ROW | {"model": evil, "at_s": 3600.0 * hour} for hour in range(5)] + [PAID | {"at_s": 9000.0}]
    html = page(summarise(rows), Prices())
    assert evil not in html and "&lt;script&gt;" in html
    assert "http" not in html
    drawings = re.findall(r"<svg.*?</svg>", html, re.DOTALL)
    assert len(drawings) >= 7
    for drawing in drawings:
        ElementTree.fromstring(drawing)


def test_the_csv_has_a_row_per_period() -> None:
    rows = list(csv.DictReader(io.StringIO(as_csv(summarise([ROW, PAID | {"at_s": 11_000.0}])))))
    assert [row["begins_utc"] for row in rows] == ["1970-01-01 02:00", "1970-01-01 03:00"]
    assert [row["usd"] for row in rows] == ["0.000000", "0.030000"]


def test_the_command_reads_a_real_audit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    audit = FileAudit(tmp_path / "audit", lambda: WallTime(1_000_000.0, True))
    spent = Spent(10, 20, 0, 0.5, (("openai", 20),))
    findings = Findings(spans=(Span("messages[0]", 0, 3, "email"),))
    for number in range(3):
        audit.invocation(
            Invocation(
                f"r{number}",
                Caller("acme"),
                "m",
                "chat",
                "ok",
                "rules",
                "why",
                findings,
                True,
                False,
                7,
                spent,
                0.1,
                0.5,
            )
        )
    audit.close()
    assert report_command(["--folder", str(tmp_path / "audit"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["requests"] == 3 and found["cost_usd"] == 1.5 and found["redacted_ratio"] == 1.0
    assert report_command(["--folder", str(tmp_path / "audit"), "--out", str(tmp_path / "out")]) == 0
    assert "email" in (tmp_path / "out" / "report.html").read_text()
    assert (tmp_path / "out" / "report.csv").read_text().count("\n") == 2
    assert report_command(["--folder", str(tmp_path / "audit"), "--since", "1d", "--json"]) == 0


def test_both_paths_stand_side_by_side_by_intent_level_and_model() -> None:
    found = summarise([SHADOW, SHADOW | {"alike": False, "similarity_ratio": None}, SHADOW | {"intent": None}])
    first, second = found.shadow.rows()
    assert (first["intent"], first["level"], first["model"], first["requests"]) == ("qa", "rules", "m", 2)
    assert (first["failed"], first["alike_ratio"], first["similarity_ratio"]) == (1, 1.0, 0.7)
    assert (first["old_ttft_s"], first["other_ttft_s"], first["other_usd"]) == pytest.approx((0.2, 0.6, 0.04))
    assert (second["intent"], second["requests"]) == ("unknown", 1)
    assert [row["intent"] for row in csv.DictReader(io.StringIO(shadow_csv(found)))] == ["qa", "unknown"]
    assert "other_ttft_s" in page(found, Prices()) and any("unknown" in line for line in text(found, Prices()))


def test_without_shadows_there_is_no_table_of_them() -> None:
    found = summarise([ROW])
    assert "shadow)" not in page(found, Prices()).split("</table>", 1)[1]
    assert not any("other path (shadow)" in line for line in text(found, Prices()))


def test_groups_of_shadows_are_bounded() -> None:
    found = summarise(SHADOW | {"intent": f"i{number}"} for number in range(3 * MAX_ROWS))
    assert len(found.shadow.groups) == MAX_ROWS + 1
    assert found.shadow.total.requests == 3 * MAX_ROWS


def test_an_empty_record_says_where_an_agents_own_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "audit").mkdir()
    (tmp_path / "audit" / "audit-000001.jsonl").touch()
    assert report_command(["--folder", str(tmp_path / "audit"), "--json"]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["requests"] == 0
    assert "no request is recorded" in shown.err and "--folder AGENT_STATE_DIR/audit" in shown.err

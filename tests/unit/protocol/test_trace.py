"""traceparent: what is written is read, what is not well formed is as if it were not there."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.trace import RANDOM_BYTES, TraceContext, child, entered, parsed

GOOD = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
IDS = st.binary(min_size=RANDOM_BYTES, max_size=RANDOM_BYTES)


@given(IDS, st.booleans())
def test_what_is_written_is_read(random: bytes, sampled: bool) -> None:
    made = entered("", random)
    context = TraceContext(made.trace_id, made.span_id, sampled)
    assert parsed(context.header) == context


@given(st.text(max_size=80))
def test_any_text_is_read_without_an_error(header: str) -> None:
    found = parsed(header)
    assert found is None or header[3:35] == found.trace_id


@given(IDS, IDS)
def test_a_request_stays_in_the_trace_that_it_came_with(first: bytes, second: bytes) -> None:
    above = entered("", first)
    inside = entered(above.header, second)
    assert (inside.trace_id, inside.parent_id, inside.sampled) == (above.trace_id, above.span_id, above.sampled)
    below = child(inside, first)
    assert (below.trace_id, below.parent_id) == (above.trace_id, inside.span_id)
    assert set(above.trace_id) | set(above.span_id) != {"0"}


@pytest.mark.parametrize(
    "header",
    [
        "", GOOD.upper(), GOOD[:-1], GOOD + "-", GOOD + "-more", "ff" + GOOD[2:], GOOD.replace("-", "_"),
        "00-" + "0" * 32 + GOOD[35:], GOOD[:36] + "0" * 16 + "-01", " " + GOOD, GOOD + "\n", "cc" + GOOD[2:] + "more",
        "cc" + GOOD[2:] + "-" + "x" * 400,
    ],
)  # fmt: skip
def test_what_the_specification_refuses_is_not_read(header: str) -> None:
    assert parsed(header) is None
    random = bytes(range(RANDOM_BYTES))
    assert entered(header, random) == TraceContext(random[:16].hex(), random[16:].hex())


def test_later_versions_may_say_more() -> None:
    found = parsed("cc" + GOOD[2:] + "-what-the-future-brings")
    assert found is not None and found.trace_id == GOOD[3:35]


def test_only_the_lowest_flag_means_sampled() -> None:
    assert [parsed(GOOD[:-2] + flags).sampled for flags in ("00", "01", "02", "03")] == [False, True, False, True]  # type: ignore[union-attr]


def test_ids_of_zeros_are_never_made() -> None:
    made = entered("", bytes(RANDOM_BYTES))
    assert parsed(made.header) == made

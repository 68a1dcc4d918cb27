"""Whether floats can be believed: numpy and the standard library judge alike."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import BadRequest
from protocol.tensors import Tensor
from split_models.sanity import all_finite, plainly_finite

LETTERS = {"FP16": "e", "FP32": "f", "FP64": "d"}


@given(st.sampled_from(sorted(LETTERS)), st.data())
def test_both_ways_judge_alike(datatype: str, data: st.DataObject) -> None:
    width = {"FP16": 16, "FP32": 32, "FP64": 64}[datatype]
    values = data.draw(st.lists(st.floats(width=width), max_size=20))
    tensor = Tensor("y", datatype, (len(values),), struct.pack(f"<{len(values)}{LETTERS[datatype]}", *values))
    assert plainly_finite(tensor) == all_finite(tensor) == all(v - v == 0 for v in values)


def test_what_does_not_fit_is_refused_by_both() -> None:
    for judge in (all_finite, plainly_finite):
        with pytest.raises(BadRequest):
            judge(Tensor("y", "FP32", (2,), bytes(6)))
    assert all_finite(Tensor("y", "INT8", (2,), b"\xff\xff"))

"""What judges answers of models without a recipe: sampled inputs, the user's own, and distances of outputs."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from engines.arrays import to_array, to_tensor
from protocol.tensors import TensorSpec, check_against
from split_models.task import MAX_CASES, SAMPLED_CASES, SampledTask, read_npz

IDS = (TensorSpec("input_ids", "INT64", (1, 16)), TensorSpec("attention_mask", "INT64", (1, 16)))
WAVE = (TensorSpec("wave", "FP32", (1, 400)),)


def npz(**arrays: Any) -> bytes:
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def test_made_up_inputs_fit_and_are_the_same_every_time() -> None:
    specs = (
        *IDS,
        *WAVE,
        TensorSpec("u", "UINT8", (4, 4)),
        TensorSpec("b", "BOOL", (3,)),
        TensorSpec("q", "INT8", (9,)),
    )
    first, again = (SampledTask(specs, {"input_ids": 50}).cases(()) for _ in range(2))
    assert len(first) == SAMPLED_CASES
    for case, same in zip(first, again, strict=True):
        for tensor, twin, spec in zip(case.made.inputs, same.made.inputs, specs, strict=True):
            check_against(tensor, spec)
            assert bytes(tensor.data) == bytes(twin.data)
    assert bytes(first[0].made.inputs[2].data) != bytes(first[1].made.inputs[2].data)


@given(rows=st.integers(1, 40_000))
def test_indices_stay_in_their_table_and_masks_are_masks(rows: int) -> None:
    for case in SampledTask(IDS, {"input_ids": rows}).cases(()):
        ids, mask = (to_array(tensor) for tensor in case.made.inputs)
        assert 0 <= ids.min() <= ids.max() < rows
        assert set(mask.reshape(-1).tolist()) <= {0, 1}
        assert mask[0, 0] == 1, "a sequence of no tokens is nobody's input"


def test_a_users_sample_is_used_instead_and_trusted() -> None:
    mine = np.linspace(-1, 1, 400, dtype=np.float32).reshape(1, 400)
    task = SampledTask(WAVE, {}, [npz(wave=mine)])
    (case,) = task.cases(())
    assert task.real
    assert (to_array(case.made.inputs[0]) == mine).all()
    assert not SampledTask(WAVE, {}).real


@pytest.mark.parametrize(
    "data",
    [
        b"", b"PK\x03\x04nonsense", npz(other=np.zeros((1, 400), np.float32)), npz(wave=np.zeros((1, 399), np.float32)),
        npz(wave=np.zeros((1, 400))), npz(wave=np.array([{"a": 1}], dtype=object)),
    ],
)  # fmt: skip
def test_a_sample_that_does_not_fit_is_left_out_and_nothing_is_unpickled(data: bytes) -> None:
    assert not read_npz(data, WAVE)
    assert len(SampledTask(WAVE, {}, [data]).cases(())) == SAMPLED_CASES


def test_a_sample_may_hold_several_inputs() -> None:
    waves = np.arange(1200, dtype=np.float32).reshape(3, 400)
    cases = SampledTask(WAVE, {}, [npz(wave=waves)]).cases(())
    assert [to_array(case.made.inputs[0]).tolist() for case in cases] == [[wave.tolist()] for wave in waves]
    many = npz(wave=np.zeros((100, 1, 400), np.float32))
    assert len(read_npz(many, WAVE)) == MAX_CASES


outputs = npst.arrays(np.float32, (2, 5), elements=st.floats(-1e3, 1e3, width=32))


@given(values=outputs)
def test_the_same_is_no_error_and_the_error_is_bounded(values: np.ndarray) -> None:
    task = SampledTask(WAVE, {})
    tensor = to_tensor("y", values)
    assert task.error_ratio([tensor], [tensor]) == 0.0
    assert 0.0 <= task.error_ratio([to_tensor("y", -values)], [tensor]) <= 1.0


@given(values=outputs, share=st.floats(0.0, 0.05))
def test_the_error_is_the_relative_distance(values: np.ndarray, share: float) -> None:
    task = SampledTask(WAVE, {})
    moved = to_tensor("y", (values * (1 + share)).astype(np.float32))
    error_ratio = task.error_ratio([moved], [to_tensor("y", values)])
    if np.linalg.norm(values.astype(np.float64)) < 1e-9:  # so near to nothing that it counts as zeros
        assert error_ratio <= share + 1e-4
    else:
        assert error_ratio == pytest.approx(share, abs=1e-4)


def test_a_clear_maximum_that_moves_is_an_error_and_a_tie_is_none() -> None:
    task = SampledTask(WAVE, {})
    clear, tied = np.array([[0.0, 1.0, 0.2]], "f4"), np.array([[0.5, 0.5001, 0.0]], "f4")
    assert task.error_ratio([to_tensor("y", np.roll(clear, 1, axis=1))], [to_tensor("y", clear)]) == 1.0
    swapped = np.array([[0.5001, 0.5, 0.0]], "f4")
    assert task.error_ratio([to_tensor("y", swapped)], [to_tensor("y", tied)]) < 0.01


@pytest.mark.parametrize("wrong", [np.full((1, 3), np.nan, "f4"), np.zeros((1, 4), "f4"), np.zeros((1, 3), "f8")])
def test_what_is_not_finite_or_another_shape_is_wrong(wrong: np.ndarray) -> None:
    reference = to_tensor("y", np.ones((1, 3), "f4"))
    assert SampledTask(WAVE, {}).error_ratio([to_tensor("y", wrong)], [reference]) == 1.0
    assert SampledTask(WAVE, {}).error_ratio([], [reference]) == 1.0

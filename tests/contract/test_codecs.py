"""One suite over every codec: what it does to an activation is bounded, and its size is what it says."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from engines.arrays import to_array, to_tensor
from split_models.codec import (
    CODECS,
    FP16,
    INT8,
    RAW,
    Affine,
    Coarseness,
    affine_for,
    dequantise,
    halve,
    quantise,
    wire_bytes,
)

values = npst.arrays(
    np.float32,
    st.tuples(st.just(1), st.integers(1, 5), st.integers(1, 4), st.integers(1, 4)),
    elements=st.floats(-1e6, 1e6, width=32),
)


def ranges(array: np.ndarray) -> Affine:
    rows = np.moveaxis(array, 1, 0).reshape(array.shape[1], -1)
    return affine_for(rows.min(axis=1).tolist(), rows.max(axis=1).tolist())


def through(codec: str, array: np.ndarray) -> tuple[np.ndarray, int, float]:
    """The array after the wire, the bytes on it, and the largest error the codec may make."""
    if codec == RAW:
        tensor = to_tensor("t", array)
        return to_array(tensor), tensor.size_bytes, 0.0
    if codec == FP16:
        halves = halve(array)
        inside = np.minimum(np.abs(array), 65504.0)
        cut_off = float((np.abs(array) - inside).max())
        return halves.astype(np.float32), halves.nbytes, cut_off / 0.51 + float(inside.max()) * 2**-10 + 2**-24
    affine = ranges(array)
    codes = to_tensor("t", quantise(array, affine))
    return to_array(dequantise(codes, affine)), codes.size_bytes, max(affine.scales)


@pytest.mark.parametrize("codec", CODECS)
@given(array=values)
def test_error_and_size_are_bounded(codec: str, array: np.ndarray) -> None:
    after, size_bytes, step = through(codec, array)
    assert after.shape == array.shape
    assert after.dtype == np.float32
    assert size_bytes == wire_bytes(codec, [("t", "FP32", array.shape)])
    assert np.abs(after.astype(np.float64) - array).max() <= step * 0.51 + 1e-3 * step + 1e-9


@given(array=values, levels=st.integers(15, 255), even=st.floats(0.0, 1.0))
def test_coarser_forms_keep_their_range_and_their_step(array: np.ndarray, levels: int, even: float) -> None:
    rows = np.moveaxis(array, 1, 0).reshape(array.shape[1], -1)
    form = Coarseness(levels=levels, evenness=even)
    affine = affine_for(rows.min(axis=1).tolist(), rows.max(axis=1).tolist(), coarseness=form)
    after = to_array(dequantise(to_tensor("t", quantise(array, affine)), affine))
    step = max(affine.scales)
    assert np.abs(after.astype(np.float64) - array).max() <= step * 0.51 + 1e-3 * step + 1e-9
    assert (after[array == 0.0] == 0.0).all()


@pytest.mark.parametrize("axis", [1, 2, -1])
def test_channels_lie_along_the_axis(axis: int) -> None:
    array = np.zeros((1, 4, 4), dtype=np.float32)
    places = np.moveaxis(array, axis, 0)
    for index in range(4):
        places[index] = np.linspace(0, 10.0**index, 4)
    rows = places.reshape(4, -1)
    affine = affine_for(rows.min(axis=1).tolist(), rows.max(axis=1).tolist(), axis)
    after = np.moveaxis(to_array(dequantise(to_tensor("t", quantise(array, affine)), affine)), axis, 0)
    assert all(np.abs(after[k] - places[k]).max() <= 10.0**k / 500 for k in range(4))


@pytest.mark.parametrize("codec", CODECS)
def test_zero_stays_zero(codec: str) -> None:
    array = np.array([[[[0.0, 3.7]], [[-2.0, 0.0]]]], dtype=np.float32)
    after, _, _ = through(codec, array)
    assert after[0, 0, 0, 0] == 0.0
    assert after[0, 1, 0, 1] == 0.0


@given(array=values)
def test_int8_saturates_and_never_wraps(array: np.ndarray) -> None:
    affine = ranges(array)
    wild = np.concatenate([array * 1e3, array * -1e3], axis=2)
    codes = quantise(wild, affine)
    after = to_array(dequantise(to_tensor("t", codes), affine))
    assert (np.sign(after) * np.sign(wild) >= 0).all(), "a value changed its sign"


def test_fp16_never_makes_an_infinity() -> None:
    wild = np.array([[1e30, -1e30, 65505.0, 1e-30]], dtype=np.float32)
    assert np.isfinite(halve(wild)).all()


def test_channels_have_ranges_of_their_own() -> None:
    array = np.stack([np.linspace(0, 1e-3, 16), np.linspace(0, 1e3, 16)]).reshape(1, 2, 4, 4).astype(np.float32)
    after, _, _ = through(INT8, array)
    assert np.abs(after[0, 0] - array[0, 0]).max() < 3e-6

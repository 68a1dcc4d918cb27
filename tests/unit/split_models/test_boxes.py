"""Components, rectangles and IoU on maps drawn by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from split_models.boxes import clockwise_from_top_left, components, grown, hull, iou, least_rectangle, mean_inside

SQUARE = np.array([[0.0, 0.0], [10.0, 0.0], [10.0, 10.0], [0.0, 10.0]])


def painted(*boxes: tuple[int, int, int, int], size: tuple[int, int] = (40, 60)) -> np.ndarray:
    canvas = np.zeros(size, dtype=np.float32)
    for x0, y0, x1, y1 in boxes:
        canvas[y0:y1, x0:x1] = 0.9
    return canvas


def test_two_regions_largest_first_and_specks_dropped() -> None:
    found = components(painted((2, 2, 6, 5), (10, 10, 50, 20), (55, 30, 56, 31)), 0.3, min_pixels=4)
    assert len(found) == 2
    assert found[0][:, 0].min() == pytest.approx(10 - 2 / 3)
    assert found[0][:, 0].max() == pytest.approx(49 + 2 / 3)


def test_corners_that_touch_are_one_region() -> None:
    assert len(components(painted((2, 2, 6, 6), (6, 6, 10, 10)), 0.3, min_pixels=4)) == 1
    assert len(components(painted((2, 2, 6, 6), (7, 7, 11, 11)), 0.3, min_pixels=4)) == 2


def test_a_snake_is_one_region() -> None:
    snake = painted((0, 0, 60, 1), (59, 1, 60, 3), (0, 2, 60, 3), (0, 3, 1, 5), (0, 4, 60, 5))
    assert len(components(snake, 0.3, min_pixels=4)) == 1


def test_an_empty_and_a_full_map() -> None:
    assert components(painted(), 0.3, min_pixels=4) == []
    assert len(components(np.ones((8, 8), dtype=np.float32), 0.3, min_pixels=4)) == 1


@given(npst.arrays(np.bool_, st.tuples(st.integers(1, 12), st.integers(1, 12))))
def test_regions_are_those_of_a_flood_fill(mask: np.ndarray) -> None:
    found = components(mask.astype(np.float32), 0.5, min_pixels=1)
    assert len(found) == flood_count(mask)


def flood_count(mask: np.ndarray) -> int:
    left = {(int(y), int(x)) for y, x in zip(*np.nonzero(mask), strict=True)}
    count = 0
    while left:
        count += 1
        todo = [left.pop()]
        while todo:
            y, x = todo.pop()
            near = {(y + dy, x + dx) for dy in (-1, 0, 1) for dx in (-1, 0, 1)} & left
            left -= near
            todo += near
    return count


def test_a_small_change_of_the_map_moves_the_box_a_little() -> None:
    before = painted((10, 10, 50, 20))
    after = before.copy()
    before[9, 10:50], after[9, 10:50] = 0.299, 0.301
    boxes = [least_rectangle(components(m, 0.3, min_pixels=4)[0])[0] for m in (before, after)]
    assert iou(*boxes) > 0.97


@pytest.mark.parametrize("degrees", [0, 7, 30, 45, 60, 89])
def test_the_rectangle_of_a_turned_bar(degrees: int) -> None:
    turn = np.radians(degrees)
    axes = np.array([[np.cos(turn), np.sin(turn)], [-np.sin(turn), np.cos(turn)]])
    bar = np.array([[u, v] for u in np.linspace(-20, 20, 41) for v in np.linspace(-3, 3, 7)]) @ axes + 50
    corners, first, second = least_rectangle(bar)
    assert sorted([first, second]) == pytest.approx([6, 40], rel=1e-6)
    assert iou(corners, np.array([[-20, -3], [20, -3], [20, 3], [-20, 3]]) @ axes + 50) > 0.999


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), min_size=1, max_size=40))
def test_the_rectangle_holds_every_point(points: list[tuple[int, int]]) -> None:
    array = np.array(points, dtype=np.float64)
    corners, first, second = least_rectangle(array)
    assert first >= 0
    assert second >= 0
    side_u, side_v = corners[1] - corners[0], corners[3] - corners[0]
    for side, length in ((side_u, first), (side_v, second)):
        if length > 1e-6:
            along = (array - corners[0]) @ (side / length)
            assert along.min() > -1e-6
            assert along.max() < length + 1e-6


def test_degenerate_hulls() -> None:
    assert len(hull(np.array([[3.0, 3.0]]))) == 1
    assert len(hull(np.array([[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]))) == 2
    assert least_rectangle(np.array([[3.0, 3.0], [3.0, 3.0]]))[1:] == (0.0, 0.0)


def test_growing_adds_the_distance_on_each_side() -> None:
    bigger = grown(SQUARE, 2.0)
    assert bigger.min(axis=0) == pytest.approx([-2, -2])
    assert bigger.max(axis=0) == pytest.approx([12, 12])


def test_corners_start_top_left_and_go_clockwise() -> None:
    for shift in range(4):
        assert np.array_equal(clockwise_from_top_left(np.roll(SQUARE, shift, axis=0)), SQUARE)
    assert np.array_equal(clockwise_from_top_left(SQUARE[::-1]), SQUARE)


def test_iou_of_known_squares() -> None:
    assert iou(SQUARE, SQUARE) == pytest.approx(1.0)
    assert iou(SQUARE, SQUARE + np.array([5.0, 0.0])) == pytest.approx(50 / 150)
    assert iou(SQUARE, SQUARE + np.array([20.0, 0.0])) == pytest.approx(0.0)
    diamond = np.array([[5.0, -2.0], [12.0, 5.0], [5.0, 12.0], [-2.0, 5.0]])
    assert iou(SQUARE, diamond) == pytest.approx(iou(diamond, SQUARE))


def test_the_mean_is_taken_inside_only() -> None:
    values = painted((10, 10, 20, 20))
    assert mean_inside(values, np.array([[10.0, 10], [19, 10], [19, 19], [10, 19]])) == pytest.approx(0.9)
    assert mean_inside(values, np.array([[30.0, 30], [35, 30], [35, 35], [30, 35]])) == 0.0

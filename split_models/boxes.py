"""From a text-probability map to quadrilaterals, in numpy alone: components, hulls, rectangles of least area, IoU."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MAX_COMPONENTS = 4_000
"""Noise can make one component per few pixels; the largest ones are kept."""


def components(values: NDArray[np.float32], threshold: float, min_pixels: int) -> list[NDArray[np.float64]]:
    """The 8-connected regions above `threshold` in `values` [h, w], largest first, each as outline points (x, y).

    Outline points lie where the map crosses the threshold between two pixel centres: a map that changes a little moves
    the outline a little, and never by a whole pixel at once.
    """
    import numpy as np

    mask = values > threshold
    rows, starts, ends = _runs(mask)
    if rows.size == 0:
        return []
    _, labels = np.unique(_join(rows, starts, ends), return_inverse=True)
    sizes = np.bincount(labels, weights=ends - starts)
    label_map = np.full(mask.shape, -1, dtype=np.int64)
    label_map[mask] = np.repeat(labels, ends - starts)
    points, owners = _crossings(values, label_map, threshold)
    order = np.argsort(owners, kind="stable")
    groups = np.split(points[order], np.searchsorted(owners[order], np.arange(1, sizes.size)))
    by_size = np.argsort(-sizes, kind="stable")[:MAX_COMPONENTS]
    return [groups[label] for label in by_size if sizes[label] >= min_pixels]


def _crossings(
    values: NDArray[np.float32], label_map: NDArray[np.int64], threshold: float
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Points (x, y) where the map falls through the threshold towards one of four neighbours, and their regions."""
    import numpy as np

    height, width = values.shape
    around = np.pad(values.astype(np.float64), 1, constant_values=0.0)
    points: list[NDArray[np.float64]] = []
    owners: list[NDArray[np.int64]] = []
    for dx, dy in ((1, 0), (-1, 0), (0, 1), (0, -1)):
        beside = around[1 + dy : 1 + dy + height, 1 + dx : 1 + dx + width]
        ys, xs = np.nonzero((label_map >= 0) & (beside <= threshold))
        here = values[ys, xs].astype(np.float64)
        share = (here - threshold) / (here - beside[ys, xs])
        points.append(np.stack([xs + dx * share, ys + dy * share], axis=1))
        owners.append(label_map[ys, xs])
    return np.concatenate(points), np.concatenate(owners)


def _runs(mask: NDArray[np.bool_]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Horizontal runs of True: their row, first column, and column after the last."""
    import numpy as np

    padded = np.zeros((mask.shape[0], mask.shape[1] + 2), dtype=np.int8)
    padded[:, 1:-1] = mask
    edges = np.diff(padded, axis=1)
    rows, starts = np.nonzero(edges == 1)
    ends = np.nonzero(edges == -1)[1]
    return rows.astype(np.int64), starts.astype(np.int64), ends.astype(np.int64)


def _join(rows: NDArray[np.int64], starts: NDArray[np.int64], ends: NDArray[np.int64]) -> NDArray[np.int64]:
    """A label per run; runs of neighbouring rows that touch, corners included, share it."""
    import numpy as np

    span = int(ends.max()) + 4
    left = np.searchsorted(rows * span + ends, (rows - 1) * span + starts, side="left")
    right = np.searchsorted(rows * span + starts, (rows - 1) * span + ends, side="right")
    counts = np.maximum(right - left, 0)
    below = np.repeat(np.arange(rows.size), counts)
    above = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts) + np.repeat(left, counts)
    labels = np.arange(rows.size)
    while True:
        low = np.minimum(labels[below], labels[above])
        before = labels.copy()
        np.minimum.at(labels, below, low)
        np.minimum.at(labels, above, low)
        labels = labels[labels]
        if np.array_equal(before, labels):
            return labels


def hull(points: NDArray[np.float64]) -> NDArray[np.float64]:
    """Convex hull, counter-clockwise, by monotone chains; degenerate inputs give fewer than three points.

    Of each column only the lowest and the highest point can lie on it: half of an outline's points for either chain.
    """
    import numpy as np

    ordered = points[np.lexsort((points[:, 1], points[:, 0]))]
    if np.array_equal(ordered[:1], ordered[-1:]):
        return ordered[:1]
    edge = ordered[1:, 0] != ordered[:-1, 0]
    low = ordered[np.concatenate(([True], edge))].tolist()
    high = ordered[np.concatenate((edge, [True]))][::-1].tolist()
    there = _chain([*low, ordered[-1].tolist()])
    back = _chain([*high, ordered[0].tolist()])
    return np.array([*there[:-1], *back[:-1]], dtype=np.float64)


def _chain(points: list[list[float]]) -> list[list[float]]:
    """The points at which the way past all of them turns to the left."""
    chain: list[list[float]] = []
    for point in points:
        x, y = point
        while len(chain) > 1:
            (ax, ay), (bx, by) = chain[-2], chain[-1]
            if (bx - ax) * (y - ay) - (by - ay) * (x - ax) > 0:
                break
            chain.pop()
        chain.append(point)
    return chain


def least_rectangle(points: NDArray[np.float64]) -> tuple[NDArray[np.float64], float, float]:
    """Corners [4, 2] of the rectangle of least area around the points, with its two side lengths.

    One side of that rectangle lies on an edge of the convex hull.
    """
    import numpy as np

    outline = hull(points)
    if len(outline) == 1:
        return np.repeat(outline, 4, axis=0), 0.0, 0.0
    edges = np.roll(outline, -1, axis=0) - outline
    along = edges / np.linalg.norm(edges, axis=1, keepdims=True)
    across = np.stack([-along[:, 1], along[:, 0]], axis=1)
    u, v = outline @ along.T, outline @ across.T
    low_u, high_u, low_v, high_v = u.min(0), u.max(0), v.min(0), v.max(0)
    best = int(np.argmin(np.round((high_u - low_u) * (high_v - low_v), 6)))
    corners = [
        a * along[best] + b * across[best]
        for a, b in (
            (low_u[best], low_v[best]),
            (high_u[best], low_v[best]),
            (high_u[best], high_v[best]),
            (low_u[best], high_v[best]),
        )
    ]
    return np.array(corners), float(high_u[best] - low_u[best]), float(high_v[best] - low_v[best])


def grown(corners: NDArray[np.float64], distance: float) -> NDArray[np.float64]:
    """The rectangle moved outward by `distance` on each side."""
    import numpy as np

    first, second = corners[1] - corners[0], corners[3] - corners[0]
    along = first / max(float(np.linalg.norm(first)), 1e-9)
    across = second / max(float(np.linalg.norm(second)), 1e-9)
    signs = np.array([[-1, -1], [1, -1], [1, 1], [-1, 1]], dtype=np.float64)
    moved: NDArray[np.float64] = corners + distance * (signs[:, :1] * along + signs[:, 1:] * across)
    return moved


def clockwise_from_top_left(corners: NDArray[np.float64]) -> NDArray[np.float64]:
    """Corners in image order: top left, top right, bottom right, bottom left."""
    import numpy as np

    centre = corners.mean(axis=0)
    angles = np.arctan2(corners[:, 1] - centre[1], corners[:, 0] - centre[0])
    ordered = corners[np.argsort(angles, kind="stable")]
    first = int(np.argmin(np.round(ordered.sum(axis=1), 6)))
    turned: NDArray[np.float64] = np.roll(ordered, -first, axis=0)
    return turned


def mean_inside(values: NDArray[np.float32], corners: NDArray[np.float64]) -> float:
    """Mean of `values` [h, w] over the pixels whose centre lies in the convex quadrilateral."""
    import numpy as np

    height, width = values.shape
    low = np.clip(np.floor(corners.min(0)).astype(int), 0, [width - 1, height - 1])
    high = np.clip(np.ceil(corners.max(0)).astype(int), 0, [width - 1, height - 1])
    ys, xs = np.mgrid[low[1] : high[1] + 1, low[0] : high[0] + 1]
    inside = np.ones(xs.shape, dtype=bool)
    ring = clockwise_from_top_left(corners)
    for (x0, y0), (x1, y1) in zip(ring, np.roll(ring, -1, axis=0), strict=True):
        inside &= (x1 - x0) * (ys - y0) - (y1 - y0) * (xs - x0) >= -1e-6
    patch = values[low[1] : high[1] + 1, low[0] : high[0] + 1]
    return float(patch[inside].mean()) if inside.any() else 0.0


def iou(first: NDArray[np.float64], second: NDArray[np.float64]) -> float:
    """Intersection over union of two convex quadrilaterals [4, 2]."""
    a, b = clockwise_from_top_left(first), clockwise_from_top_left(second)
    shared = _area(_clip([(float(x), float(y)) for x, y in a], [(float(x), float(y)) for x, y in b]))
    union = _area([tuple(p) for p in a.tolist()]) + _area([tuple(p) for p in b.tolist()]) - shared
    return shared / union if union > 0 else float(a.tolist() == b.tolist())


def _clip(subject: list[tuple[float, float]], window: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Sutherland and Hodgman: cut the subject by each side of the window in turn."""
    for (x0, y0), (x1, y1) in zip(window, window[1:] + window[:1], strict=True):
        kept: list[tuple[float, float]] = []
        sides = [(x1 - x0) * (y - y0) - (y1 - y0) * (x - x0) for x, y in subject]
        for index, point in enumerate(subject):
            here, before, previous = sides[index], sides[index - 1], subject[index - 1]
            if (here >= 0) != (before >= 0):
                share = before / (before - here)
                kept.append(
                    (previous[0] + share * (point[0] - previous[0]), previous[1] + share * (point[1] - previous[1]))
                )
            if here >= 0:
                kept.append(point)
        subject = kept
    return subject


def _area(ring: list[tuple[float, ...]] | list[tuple[float, float]]) -> float:
    total = 0.0
    for index, point in enumerate(ring):
        total += ring[index - 1][0] * point[1] - point[0] * ring[index - 1][1]
    return abs(total) / 2

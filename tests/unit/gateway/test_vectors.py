"""One suite over both indexes, and scopes that never meet."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import usearch.index as usearch

from gateway.vectors import FlatIndex, HnswIndex, ScopedIndex

DIMENSIONS = 32


def unit(count: int, seed: int = 1) -> np.ndarray:
    rows = np.random.default_rng(seed).normal(size=(count, DIMENSIONS)).astype(np.float32)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


@pytest.fixture(params=[FlatIndex, HnswIndex])
def make(request: pytest.FixtureRequest) -> Callable[[int], FlatIndex | HnswIndex]:
    return request.param


def test_the_nearest_is_found_with_its_cosine(make: Callable[[int], FlatIndex | HnswIndex]) -> None:
    index, rows = make(DIMENSIONS), unit(300)
    index.add(list(range(300)), rows)
    for place in range(0, 300, 17):
        near = index.nearest(rows[place], 3)
        assert near[0].entry == place and near[0].cosine == pytest.approx(1.0, abs=2e-3)
        assert [n.cosine for n in near] == sorted((n.cosine for n in near), reverse=True)


def test_removed_entries_are_gone_and_the_others_stay(make: Callable[[int], FlatIndex | HnswIndex]) -> None:
    index, rows = make(DIMENSIONS), unit(300)
    index.add(list(range(300)), rows)
    for entry in range(0, 300, 2):
        index.remove(entry)
        index.remove(entry)
    assert len(index) == 150
    found = [index.nearest(rows[place], 1)[0].entry for place in range(300)]
    assert all(entry % 2 for entry in found)
    assert sum(found[place] == place for place in range(1, 300, 2)) >= 147


def test_a_key_added_again_moves(make: Callable[[int], FlatIndex | HnswIndex]) -> None:
    index, rows = make(DIMENSIONS), unit(4)
    index.add([7, 8], rows[:2])
    index.add([7], rows[2:3])
    assert len(index) == 2
    assert index.nearest(rows[2], 1)[0].entry == 7
    assert index.nearest(rows[0], 1)[0].cosine < 0.99


def test_an_empty_index_has_no_neighbours(make: Callable[[int], FlatIndex | HnswIndex]) -> None:
    index = make(DIMENSIONS)
    assert index.nearest(unit(1)[0], 3) == []
    index.add([1], unit(1))
    index.remove(1)
    assert index.nearest(unit(1)[0], 3) == [] and len(index) == 0


def test_scopes_never_meet_however_large() -> None:
    index, rows = ScopedIndex(DIMENSIONS, flat_limit=50), unit(200)
    index.add("a", list(range(100)), rows[:100])
    index.add("b", [1000], rows[100:101])
    assert [n.entry for n in index.nearest("b", rows[3], 5)] == [1000]
    assert index.nearest("a", rows[3], 1)[0].entry == 3
    assert [scope for scope, _ in index.graphs()] == ["a"]
    index.remove("b", 1000)
    assert index.nearest("b", rows[3], 5) == [] and len(index) == 100


def test_a_file_that_is_no_graph_is_refused(tmp_path: Path) -> None:
    index = HnswIndex(DIMENSIONS)
    index.add([1], unit(1))
    (tmp_path / "x").write_bytes(b"nonsense" * 20)
    assert not index.load(tmp_path / "x")
    assert len(index) == 0
    other = HnswIndex(8)
    other.add([1], np.eye(8, dtype=np.float32)[:1])
    other.save(tmp_path / "y")
    assert not index.load(tmp_path / "y")


def test_a_graph_of_an_earlier_release_with_fewer_links_is_made_anew(tmp_path: Path) -> None:
    thin = usearch.Index(ndim=DIMENSIONS, metric="cos", dtype="f16", connectivity=16)
    thin.add(np.arange(3, dtype=np.uint64), unit(3))
    thin.save(str(tmp_path / "thin"))
    index = HnswIndex(DIMENSIONS)
    assert not index.load(tmp_path / "thin") and len(index) == 0
    index.add([1], unit(1))
    index.save(tmp_path / "whole")
    assert HnswIndex(DIMENSIONS).load(tmp_path / "whole")


def test_a_graph_that_grows_one_by_one_is_the_one_that_is_built_at_once(tmp_path: Path) -> None:
    rows, files = unit(3_000), (tmp_path / "at_once", tmp_path / "one_by_one", tmp_path / "again")
    for file, step in zip(files, (3_000, 1, 3_000), strict=True):
        index = HnswIndex(DIMENSIONS)
        for first in range(0, len(rows), step):
            index.add(list(range(first, first + step)), rows[first : first + step])
        index.save(file)
    at_once, one_by_one, again = (file.read_bytes() for file in files)
    assert at_once == one_by_one
    assert at_once == again

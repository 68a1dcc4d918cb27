"""Nearest vectors, scope by scope: exact while a scope is small, HNSW (usearch) once it is large.

A scope is one tenant, model, system prompt and history. Vectors of two scopes never meet, so that no filter stands
between a question and its neighbours, and a scope of one neighbour finds it (vllm-project/semantic-router#702, #2313).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

from attrs import define, field, frozen

from protocol.errors import ConfigError
from protocol.extras import install_step

FLAT_LIMIT = 2_000
"""Up to here a product with all vectors is quicker than a walk through a graph, and exact."""

HOLES_RATIO = 0.25
"""A graph with more removed nodes than this share is built anew: walks through holes lose neighbours."""

CONNECTIVITY = 48
EXPANSION_ADD = 128
EXPANSION_SEARCH = 224
"""HNSW's M, ef_construction and ef_search (arXiv 1603.09320, section 4). Of 800 questions to 200,000 entries, groups of
fifty around a few thousand, 11 missed their nearest with M = 32 (of another draw 3), none with 48."""

ADDING_THREADS = 1
"""usearch's concurrent add() leaves entries that searches pass by (unum-cloud/USearch#735): of 1,400 questions to
300,000 entries 24 missed their nearest with two threads, 6 with one. One thread makes the same graph each time, whether
entries come at once or one by one."""


def _numpy() -> Any:
    import numpy

    return numpy


@frozen
class Neighbour:
    """An entry and its cosine with the question."""

    entry: int
    cosine: float


class VectorIndex(Protocol):
    """Unit vectors of one length under integer keys. Blocking; one thread at a time."""

    def __len__(self) -> int: ...

    def add(self, entries: Sequence[int], vectors: Any) -> None:
        """vectors: float32 (n, dimensions), each of length 1. A key that is there already is replaced."""
        ...

    def remove(self, entry: int) -> None:
        """Forget a key; one that is not there is ignored."""
        ...

    def nearest(self, vector: Any, count: int) -> list[Neighbour]:
        """Up to `count` neighbours, nearest first."""
        ...


class FlatIndex:
    """All vectors in one matrix; exact."""

    def __init__(self, dimensions: int) -> None:
        self._np = _numpy()
        self._rows = self._np.zeros((16, dimensions), dtype=self._np.float32)
        self._entries: list[int] = []
        self._places: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, entries: Sequence[int], vectors: Any) -> None:
        """See VectorIndex."""
        for entry, vector in zip(entries, vectors, strict=True):
            place = self._places.get(entry)
            if place is None:
                place = self._new_place(entry)
            self._rows[place] = vector

    def _new_place(self, entry: int) -> int:
        place = len(self._entries)
        if place == len(self._rows):
            self._rows = self._np.concatenate([self._rows, self._np.zeros_like(self._rows)])
        self._entries.append(entry)
        self._places[entry] = place
        return place

    def remove(self, entry: int) -> None:
        """The last row takes the place of the one that goes."""
        place = self._places.pop(entry, None)
        if place is None:
            return
        last = self._entries.pop()
        if last != entry:
            self._rows[place] = self._rows[len(self._entries)]
            self._entries[place] = last
            self._places[last] = place

    def nearest(self, vector: Any, count: int) -> list[Neighbour]:
        """See VectorIndex."""
        cosines = self._rows[: len(self._entries)] @ self._np.asarray(vector, dtype=self._np.float32)
        best = self._np.argsort(-cosines)[:count]
        return [Neighbour(self._entries[place], float(cosines[place])) for place in best]

    def content(self) -> tuple[list[int], Any]:
        """Keys and vectors, for an index that takes over."""
        return list(self._entries), self._rows[: len(self._entries)]


class HnswIndex:
    """usearch with half-precision vectors; built anew when too many nodes were removed."""

    def __init__(self, dimensions: int) -> None:
        self._np = _numpy()
        self._dimensions = dimensions
        self._index = self._make()
        self._holes = 0

    def _make(self) -> Any:
        try:
            import usearch.index as usearch
        except ImportError as err:
            raise ConfigError("a semantic cache of this size needs usearch", next_step=install_step("cache")) from err
        return usearch.Index(
            ndim=self._dimensions,
            metric="cos",
            dtype="f16",
            connectivity=CONNECTIVITY,
            expansion_add=EXPANSION_ADD,
            expansion_search=EXPANSION_SEARCH,
        )

    def __len__(self) -> int:
        return int(self._index.size)

    @property
    def memory_bytes(self) -> int:
        """What the graph and its vectors take."""
        return int(self._index.memory_usage)

    def add(self, entries: Sequence[int], vectors: Any) -> None:
        """See VectorIndex."""
        for entry in entries:
            self.remove(entry)
        keys = self._np.asarray(entries, dtype=self._np.uint64)
        self._index.add(keys, self._np.asarray(vectors, dtype=self._np.float32), threads=ADDING_THREADS)

    def remove(self, entry: int) -> None:
        """See VectorIndex."""
        if not self._index.contains(entry):
            return
        self._index.remove(entry)
        self._holes += 1
        if self._holes > HOLES_RATIO * (len(self) + self._holes):
            self._rebuild()

    def _rebuild(self) -> None:
        old, self._index, self._holes = self._index, self._make(), 0
        keys = self._np.asarray(old.keys, dtype=self._np.uint64)
        if len(keys):
            rows = self._np.asarray(old.get(keys), dtype=self._np.float32)
            self._index.add(keys, rows, threads=ADDING_THREADS)

    def nearest(self, vector: Any, count: int) -> list[Neighbour]:
        """See VectorIndex."""
        if not len(self):
            return []
        found = self._index.search(self._np.asarray(vector, dtype=self._np.float32), count, threads=1)
        return [
            Neighbour(int(key), 1.0 - float(distance))
            for key, distance in zip(found.keys, found.distances, strict=True)
        ]

    def entries(self) -> set[int]:
        """Every key."""
        return set(self._np.asarray(self._index.keys, dtype=self._np.uint64).tolist())

    def save(self, file: Path) -> None:
        """Whole index into a file; the caller replaces the old one."""
        self._index.save(str(file))

    def load(self, file: Path) -> bool:
        """Take a saved index; False, and empty, when the file is no index of this kind, with as many links."""
        try:
            self._index.load(str(file))
        except (RuntimeError, ValueError, OSError):  # usearch's reader, for a damaged file
            self._index = self._make()
            return False
        if (int(self._index.ndim), int(self._index.connectivity)) != (self._dimensions, CONNECTIVITY):
            self._index = self._make()
            return False
        self._holes = 0
        return True


@define(eq=False)
class ScopedIndex:
    """One index per scope; a scope that outgrows FLAT_LIMIT gets a graph."""

    dimensions: int
    flat_limit: int = FLAT_LIMIT
    _scopes: dict[str, FlatIndex | HnswIndex] = field(factory=dict, init=False)

    def __len__(self) -> int:
        return sum(len(index) for index in self._scopes.values())

    def add(self, scope: str, entries: Sequence[int], vectors: Any) -> None:
        """vectors: float32 (n, dimensions), unit length."""
        index = self._scopes.get(scope)
        if index is None:
            index = self._scopes[scope] = FlatIndex(self.dimensions)
        if isinstance(index, FlatIndex) and len(index) + len(entries) > self.flat_limit:
            index = self._scopes[scope] = self._grown(index)
        index.add(entries, vectors)

    def _grown(self, flat: FlatIndex) -> HnswIndex:
        graph = HnswIndex(self.dimensions)
        keys, rows = flat.content()
        if keys:
            graph.add(keys, rows)
        return graph

    def remove(self, scope: str, entry: int) -> None:
        """Forget one entry; an empty scope goes with it."""
        index = self._scopes.get(scope)
        if index is None:
            return
        index.remove(entry)
        if not len(index):
            del self._scopes[scope]

    def size(self, scope: str) -> int:
        """Entries of one scope."""
        return len(self._scopes.get(scope, ()))

    def clear(self, scope: str) -> None:
        """Forget all entries of one scope, at once."""
        self._scopes.pop(scope, None)

    def nearest(self, scope: str, vector: Any, count: int) -> list[Neighbour]:
        """Nearest first; nothing from any other scope."""
        index = self._scopes.get(scope)
        return index.nearest(vector, count) if index is not None else []

    @property
    def memory_bytes(self) -> int:
        """What graphs take; small scopes are not counted."""
        return sum(graph.memory_bytes for _, graph in self.graphs())

    def graphs(self) -> Iterable[tuple[str, HnswIndex]]:
        """Scopes that have a graph: what is worth saving."""
        return [(scope, index) for scope, index in self._scopes.items() if isinstance(index, HnswIndex)]

    def adopt(self, scope: str, graph: HnswIndex) -> None:
        """Put a loaded graph in a scope's place."""
        self._scopes[scope] = graph

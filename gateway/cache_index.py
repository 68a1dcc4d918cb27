"""The vectors' index on disk: large graphs are saved, everything else is made anew from the store at start."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path

from engines.digest import file_sha256
from gateway.cache_store import CacheStore, Vector
from gateway.vectors import HnswIndex, ScopedIndex
from protocol.durable import read_durable, remove_durable, write_durable

BATCH = 4_096
"""Vectors added in one call."""


def load_graphs(folder: Path | None, index: ScopedIndex, store: CacheStore, embedder_id: str) -> int:
    """Fill an empty index: saved graphs first, corrected by the store, then every vector that no graph has; returns how
    many those were.
    """
    import numpy

    added = 0
    for scope, vectors in groupby(store.vectors(embedder_id), key=lambda vector: vector.scope):
        rows = list(vectors)
        present = _adopted(folder, index, scope, embedder_id, {row.id for row in rows})
        for batch in _batches(row for row in rows if row.id not in present):
            data = numpy.frombuffer(b"".join(row.data for row in batch), dtype="<f2")
            index.add(scope, [row.id for row in batch], data.reshape(len(batch), -1).astype(numpy.float32))
            added += len(batch)
    return added


def save_graphs(folder: Path, index: ScopedIndex, embedder_id: str) -> None:
    """Each large scope's graph into a file of its own; a crash in between leaves the old one or none."""
    wanted = set()
    for scope, graph in index.graphs():
        file = _file(folder, scope, embedder_id)
        wanted.add(file.name)
        fresh = file.with_suffix(".new")
        graph.save(fresh)
        digest = file_sha256(fresh)
        fresh.replace(file)
        write_durable(_mark(file), digest.encode())
    for file in folder.glob("*.usearch"):
        if file.name not in wanted:
            file.unlink(missing_ok=True)
            remove_durable(_mark(file))


def _adopted(folder: Path | None, index: ScopedIndex, scope: str, embedder_id: str, kept: set[int]) -> set[int]:
    """Entries that a saved graph brings, those that the store no longer has taken out."""
    file = _file(folder, scope, embedder_id) if folder is not None and len(kept) > index.flat_limit else None
    if file is None or not _whole(file):
        return set()
    graph = HnswIndex(index.dimensions)
    if not graph.load(file):
        return set()
    present = graph.entries()
    for entry in present - kept:
        graph.remove(entry)
    index.adopt(scope, graph)
    return present & kept


def _whole(file: Path) -> bool:
    """Whether the file is the one whose digest was noted: a native reader is not given a torn one."""
    noted = read_durable(_mark(file), bytes.decode)
    return noted is not None and file.exists() and file_sha256(file) == noted


def _mark(file: Path) -> Path:
    return file.with_suffix(".sha256")


def _file(folder: Path, scope: str, embedder_id: str) -> Path:
    return folder / f"{hashlib.sha256(f'{embedder_id}/{scope}'.encode()).hexdigest()[:32]}.usearch"


def _batches(vectors: Iterable[Vector]) -> Iterator[list[Vector]]:
    batch: list[Vector] = []
    for vector in vectors:
        batch.append(vector)
        if len(batch) == BATCH:
            yield batch
            batch = []
    if batch:
        yield batch

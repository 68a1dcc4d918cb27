"""The answer cache: exact, then semantic. It never mixes tenants, models or embedders, and prefers a miss to a guess.

A semantic hit needs three agreements: the vectors' cosine, the words (gateway/likeness.py), and, where a checker is
given, its yes. Work on disk and index happens in one thread of its own.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

from attrs import define, evolve, field, frozen

from gateway.cache_index import load_graphs, save_graphs
from gateway.cache_key import LookupKey, lookup_key
from gateway.cache_store import MAX_ANSWER_BYTES, CacheStore
from gateway.likeness import difference, fingerprint
from gateway.ports import CachedAnswer, CacheKey
from gateway.vectors import ScopedIndex
from protocol.clock import WallClock, wall_now
from protocol.durable import sqlite_error
from protocol.errors import Full, MidstreamError

log = logging.getLogger("midstream.gateway.cache")

T = TypeVar("T")

NEIGHBOURS = 4
"""The nearest may differ by a number while the second asks the same; more would be luck."""

FILE = "answers.sqlite"

BUSY_S = 1.0
"""A lookup that has waited so long for the cache's thread is a miss: a graph that is made anew there takes minutes."""

SWEEP = 256
"""Entries that one sweep forgets at most, so that no lookup waits long behind it."""


class Embedder(Protocol):
    """Texts to unit vectors. `id` names model, weights and pooling: vectors of two ids are never compared."""

    @property
    def id(self) -> str: ...

    @property
    def dimensions(self) -> int: ...

    async def embed(self, texts: Sequence[str]) -> Sequence[Sequence[float]]:
        """float vectors (n, dimensions), each of length 1. Raises Full, EngineError or LinkError."""
        ...


Check = Callable[[str, str], Awaitable[bool]]
"""(kept question, new question) -> whether one answer serves both; asked last, for example of the edge model."""


@frozen
class CacheSettings:
    """Bounds of the cache.

    threshold: least cosine of a semantic hit; it belongs to `threshold_embedder`, and with any other embedder there are
    no semantic hits until it is tuned anew (vllm-project/semantic-router#2165). ttl_s: an older entry is a miss.
    """

    folder: Path | None = None
    max_entries: int = 100_000
    ttl_s: float = 24 * 3600.0
    threshold: float = 0.8
    threshold_embedder: str = ""
    flat_limit: int = 2_000


@frozen
class CacheHit:
    """What was found and how. `cosine` is 1 for an exact hit."""

    answer: CachedAnswer
    kind: Literal["exact", "semantic"]
    cosine: float
    age_s: float


@define
class CacheCounts:
    """How lookups ended. `near_misses` were near enough and asked something else; by what told them apart. faults: of
    the disk, each a miss or an answer that is not kept."""

    exact: int = 0
    semantic: int = 0
    misses: int = 0
    faults: int = 0
    near_misses: dict[str, int] = field(factory=dict)


class SemanticCache:
    """All methods are for the event loop's thread. Without an embedder only exact hits happen."""

    def __init__(
        self,
        settings: CacheSettings,
        embedder: Embedder | None = None,
        check: Check | None = None,
        wall: WallClock = wall_now,
    ) -> None:
        self._settings = settings
        self._embedder = embedder
        self._check = check
        self._wall = wall
        self.counts = CacheCounts()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="midstream-cache")
        self._store: CacheStore | None = None
        self._index: ScopedIndex | None = None

    @property
    def embedder_id(self) -> str:
        """For the cache's keys."""
        return self._embedder.id if self._embedder is not None else ""

    @property
    def semantic(self) -> bool:
        """Whether near questions may be answered: an embedder, and a threshold that was tuned for it."""
        return self._embedder is not None and self._settings.threshold_embedder == self._embedder.id

    @property
    def index(self) -> ScopedIndex | None:
        """The vectors, for benches; None before start() and without an embedder."""
        return self._index

    async def start(self) -> None:
        """Open the store and make the index from it. Raises ConfigError when the folder cannot be used."""
        await self._do(self._open)

    async def close(self) -> None:
        """Save large graphs, close the store; idempotent."""
        await self._do(self._shut)
        self._thread.shutdown()

    async def find(self, key: CacheKey) -> CachedAnswer | None:
        """A kept answer to this request, or None. A fault of the embedder or of the disk is a miss."""
        try:
            hit = await self.look_up(key)
        except MidstreamError as err:
            hit = None
            self._failed(err)
        return evolve(hit.answer, source=f"{hit.kind} cache, first made by {hit.answer.source}") if hit else None

    async def look_up(self, key: CacheKey) -> CacheHit | None:
        """As `find`, with what the hit rests on. Raises Full while the cache makes a graph anew, LinkError and its kin
        for faults of the disk.
        """
        if key.personal or self._store is None:
            return None
        wanted = lookup_key(key, self.embedder_id)
        hit = await self._soon(self._exact, wanted)
        if hit is None and wanted.question and self.semantic:
            hit = await self._near(wanted)
        if hit is None:
            self.counts.misses += 1
        elif hit.kind == "exact":
            self.counts.exact += 1
        else:
            self.counts.semantic += 1
        return hit

    async def store(self, key: CacheKey, answer: CachedAnswer) -> None:
        """Keep a whole answer; a personal, cut, empty or too long one is passed over, and so is one that the disk does
        not take."""
        size_bytes = sum(len(piece.encode("utf-8", "surrogatepass")) for piece in answer.pieces)
        if key.personal or self._store is None or answer.finish != "stop" or not 0 < size_bytes <= MAX_ANSWER_BYTES:
            return
        wanted = lookup_key(key, self.embedder_id)
        vector = await self._vector(wanted.question) if wanted.question and self.semantic else None
        try:
            await self._do(self._keep, wanted, key.tenant, answer, vector)
        except MidstreamError as err:
            self._failed(err)

    def _failed(self, err: MidstreamError) -> None:
        """A cache that cannot be used costs an answer its speed, never the answer."""
        self.counts.faults += 1
        if self.counts.faults.bit_count() == 1:  # the first, and ever fewer: requests are many
            log.warning("fault %d of the cache: %s", self.counts.faults, err)

    async def forget(self, tenant: str | None = None) -> int:
        """Drop everything of one tenant, or everything; returns how much it was."""
        return await self._do(self._forget_tenant, tenant)

    async def _near(self, key: LookupKey) -> CacheHit | None:
        vector = await self._vector(key.question)
        if vector is None:
            return None
        for hit, question in await self._soon(self._candidates, key, vector):
            if self._check is None or await self._check(question, key.question):
                return hit
            self._told_apart("check")
        return None

    async def _vector(self, question: str) -> Any:
        assert self._embedder is not None
        try:
            made = await self._embedder.embed([question])
        except MidstreamError:
            return None
        import numpy

        return numpy.asarray(made[0], dtype=numpy.float32)

    async def _soon(self, work: Callable[..., T], *arguments: Any) -> T:
        """As `_do`, for who can do without. Raises Full when the cache's thread has something longer to do."""
        try:
            async with asyncio.timeout(BUSY_S):
                return await self._do(work, *arguments)
        except TimeoutError as err:
            raise Full("the cache's thread is busy", retry_after_s=1.0) from err

    async def _do(self, work: Callable[..., T], *arguments: Any) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)
        except sqlite3.Error as err:
            raise sqlite_error(err, (self._settings.folder or Path()) / FILE) from err

    # Below: the cache's own thread only.

    def _open(self) -> None:
        folder = self._settings.folder
        self._store = CacheStore(folder / FILE if folder is not None else None)
        if self._embedder is None:
            return
        self._index = ScopedIndex(self._embedder.dimensions, self._settings.flat_limit)
        added = load_graphs(folder, self._index, self._store, self._embedder.id)
        if folder is not None and added > self._settings.flat_limit:
            save_graphs(folder, self._index, self._embedder.id)  # a kill before close() costs it no second time

    def _shut(self) -> None:
        store, self._store = self._store, None
        if store is None:
            return
        if self._settings.folder is not None and self._index is not None and self._embedder is not None:
            save_graphs(self._settings.folder, self._index, self._embedder.id)
        store.close()

    def _opened(self) -> CacheStore:
        assert self._store is not None, "start() comes first"
        return self._store

    def _exact(self, key: LookupKey) -> CacheHit | None:
        entry = self._opened().exact(key.exact)
        if entry is None:
            return None
        age_s = self._wall().unix_s - entry.created_unix_s
        if not 0 <= age_s <= self._settings.ttl_s:
            self._drop(entry.id, entry.scope)
            return None
        self._opened().used(entry.id)
        return CacheHit(entry.answer, "exact", 1.0, age_s)

    def _candidates(self, key: LookupKey, vector: Any) -> list[tuple[CacheHit, str]]:
        """Neighbours that are near, fresh and not told apart by their words; nearest first.

        Only the first where no checker could refuse it: the others would be read for nothing, and count as used.
        """
        assert self._index is not None
        mine = fingerprint(key.question)
        found = []
        for near in self._index.nearest(key.scope, vector, NEIGHBOURS):
            if near.cosine < self._settings.threshold:
                break
            entry = self._opened().entry(near.entry)
            if entry is None or entry.scope != key.scope:
                self._index.remove(key.scope, near.entry)
                continue
            age_s = self._wall().unix_s - entry.created_unix_s
            if not 0 <= age_s <= self._settings.ttl_s:
                self._drop(entry.id, entry.scope)
                continue
            apart = difference(mine, fingerprint(entry.question))
            if apart:
                self._told_apart(apart)
                continue
            self._opened().used(entry.id)
            found.append((CacheHit(entry.answer, "semantic", near.cosine, age_s), entry.question))
            if self._check is None:
                break
        return found

    def _told_apart(self, why: str) -> None:
        self.counts.near_misses[why] = self.counts.near_misses.get(why, 0) + 1

    def _keep(self, key: LookupKey, tenant: str, answer: CachedAnswer, vector: Any) -> None:
        store = self._opened()
        old = store.exact(key.exact)
        if old is not None and self._index is not None:
            self._index.remove(old.scope, old.id)
        data = vector.astype("<f2").tobytes() if vector is not None else None
        embedder = self.embedder_id
        now_unix_s = self._wall().unix_s
        number = store.put(key.exact, key.scope, tenant, embedder, key.question, data, answer, now_unix_s)
        if vector is not None and self._index is not None:
            self._index.add(key.scope, [number], vector.reshape(1, -1))
        self._sweep()

    def _sweep(self) -> None:
        """Old entries go, then those that served longest ago; their vectors go with them."""
        store = self._opened()
        for entry, scope in store.older_than(self._wall().unix_s - self._settings.ttl_s, SWEEP):
            self._drop(entry, scope)
        over = len(store) - self._settings.max_entries
        if over > 0:
            for entry, scope in store.least_used(min(SWEEP, over)):
                self._drop(entry, scope)

    def _drop(self, entry: int, scope: str) -> None:
        self._opened().drop(entry)
        if self._index is not None:
            self._index.remove(scope, entry)

    def _forget_tenant(self, tenant: str | None) -> int:
        store = self._opened()
        entries = store.of_tenant(tenant)
        with store.together():
            for entry, _ in entries:
                store.drop(entry)
        if self._index is not None:
            for scope, gone in Counter(scope for _, scope in entries).items():
                if self._index.size(scope) <= gone:  # a tenant has its scopes to itself
                    self._index.clear(scope)
            for entry, scope in entries:
                self._index.remove(scope, entry)
        return len(entries)

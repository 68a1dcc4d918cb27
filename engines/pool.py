"""Residency of all models under one memory budget: leases, and least recently used out first among the unleased.

Used by both ways: a value is anything with a close(). "Loaded" is this module's answer.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Generic, Protocol, TypeVar, cast

from attrs import define, field, frozen

from protocol.errors import EngineError, Full

MEMORY_RATIOS = {".gguf": 1.2}
"""Resident size of a loaded model over its file's size; GGUF files are mapped and not unpacked."""

MEMORY_RATIO = 6.0
"""For every other format. Of the shipped ONNX models onnxruntime takes 0.7 to 7 times the file: int8 weights that it
unpacks take the most."""

MEMORY_FLOOR_BYTES = 8 << 20
"""What a session takes however small its file is: activations of a head."""

RETRY_AFTER_S = 1.0
"""When leases block a load: they last for single requests, so a second later some have ended."""


class Closable(Protocol):
    def close(self) -> None: ...


T = TypeVar("T", bound=Closable)


def estimate_bytes(file: Path) -> int:
    """Memory that a model will take once loaded, from the size of its file."""
    return int(file.stat().st_size * MEMORY_RATIOS.get(file.suffix, MEMORY_RATIO)) + MEMORY_FLOOR_BYTES


@frozen
class Resident:
    """One loaded model: its key, what it is counted for, and how many use it now."""

    key: str
    size_bytes: int
    leases: int


@define(eq=False)
class _Place:
    """Memory set aside for one key; `value` is None while it loads."""

    size_bytes: int
    used: int
    value: Closable | None = None
    leases: int = 0
    stale: bool = False
    ready: threading.Event = field(factory=threading.Event)
    error: BaseException | None = None


class Lease(Generic[T]):
    """The right to use a loaded model until release(); as a context manager it releases at the end."""

    def __init__(self, pool: ModelPool, place: _Place) -> None:
        self._pool = pool
        self._place: _Place | None = place
        self.value: T = cast(T, place.value)

    def release(self) -> None:
        """Give the model back; idempotent."""
        place, self._place = self._place, None
        if place is not None:
            self._pool._release(place)

    def __enter__(self) -> T:
        return self.value

    def __exit__(self, *exc: object) -> None:
        self.release()


class ModelPool:
    """Loads on demand and forgets the least recently used. Every method may be called from any thread."""

    def __init__(self, budget_bytes: int) -> None:
        if budget_bytes <= 0:
            raise ValueError("budget_bytes must be above 0")
        self._budget_bytes = budget_bytes
        self._lock = threading.Lock()
        self._places: dict[str, _Place] = {}
        self._tick = 0

    @property
    def used_bytes(self) -> int:
        """Memory counted for loaded and loading models."""
        with self._lock:
            return self._used()

    def loaded(self, key: str) -> bool:
        """Whether `key` could be leased now without loading."""
        with self._lock:
            place = self._places.get(key)
            return place is not None and place.value is not None

    def residents(self) -> tuple[Resident, ...]:
        """What is loaded, least recently used first."""
        with self._lock:
            ordered = sorted(self._places.items(), key=lambda item: item[1].used)
            return tuple(Resident(key, p.size_bytes, p.leases) for key, p in ordered if p.value is not None)

    def try_acquire(self, key: str) -> Lease[Closable] | None:
        """A lease on a model that is loaded already, else None; never blocks."""
        with self._lock:
            place = self._places.get(key)
            return self._leased(place) if place is not None and place.value is not None else None

    def acquire(self, key: str, size_bytes: int, load: Callable[[], T], *, spare: bool = False) -> Lease[T]:
        """A lease on `key`, loading it with `load` when it is not resident. Blocks while it loads: not for the loop.

        spare: it takes room that is free, and puts nothing out. Of several callers one loads and the others wait.
        Raises EngineError when the model is larger than the whole budget, Full when leased models (spare: any) hold the
        memory it needs, or whatever `load` raised.
        """
        while True:
            victims: list[Closable] = []
            with self._lock:
                place = self._places.get(key)
                if place is not None and place.value is not None:
                    return cast("Lease[T]", self._leased(place))
                mine = place is None
                if place is None:
                    victims = self._make_room(key, size_bytes, spare)
                    place = self._places[key] = _Place(size_bytes, self._next())
            for victim in victims:
                victim.close()
            if mine:
                return cast("Lease[T]", self._fill(key, place, load))
            place.ready.wait()
            if place.error is not None:
                raise place.error

    def drop(self, key: str) -> None:
        """Forget `key` (its file changed): closed now, or when its last lease ends.

        What is being loaded serves who loads it, and the next one loads anew.
        """
        with self._lock:
            place = self._places.get(key)
            if place is None:
                return
            place.stale = True
            if place.value is None:
                return
            del self._places[key]
            value = place.value if place.leases == 0 else None
        if value is not None:
            value.close()

    def close(self) -> None:
        """Close every model that nobody uses now; the others close when their last lease ends."""
        with self._lock:
            keys = list(self._places)
        for key in keys:
            self.drop(key)

    def _fill(self, key: str, place: _Place, load: Callable[[], Closable]) -> Lease[Closable]:
        with self._failing(key, place):
            value = load()
        with self._lock:
            place.value = value
            if place.stale:
                del self._places[key]
            lease = self._leased(place)
        place.ready.set()
        return lease

    @contextlib.contextmanager
    def _failing(self, key: str, place: _Place) -> Iterator[None]:
        """A load that fails gives its memory back and tells those who wait for it."""
        try:
            yield
        except BaseException as err:
            with self._lock:
                del self._places[key]
            place.error = err if isinstance(err, Exception) else EngineError(f"loading {key} was interrupted")
            place.ready.set()
            raise

    def _leased(self, place: _Place) -> Lease[Closable]:
        place.leases += 1
        place.used = self._next()
        return Lease(self, place)

    def _release(self, place: _Place) -> None:
        with self._lock:
            place.leases -= 1
            value = place.value if place.stale and place.leases == 0 else None
        if value is not None:
            value.close()

    def _make_room(self, key: str, size_bytes: int, spare: bool) -> list[Closable]:
        """Take the least recently used unleased models out until `size_bytes` fit; to be closed. spare: none."""
        if size_bytes > self._budget_bytes:
            raise EngineError(
                f"{key} needs about {size_bytes >> 20} MiB, the budget for models is {self._budget_bytes >> 20} MiB",
                next_step="raise the memory budget for models, or use a smaller model",
            )
        idle = [k for k, p in self._places.items() if p.leases == 0 and p.value is not None and not spare]
        free_bytes = self._budget_bytes - self._used()
        chosen: list[str] = []
        for candidate in sorted(idle, key=lambda k: self._places[k].used):
            if free_bytes >= size_bytes:
                break
            free_bytes += self._places[candidate].size_bytes
            chosen.append(candidate)
        if free_bytes < size_bytes:
            who = "other models" if spare else "models in use"
            raise Full(f"{who} hold the memory that {key} needs", retry_after_s=RETRY_AFTER_S)
        return [cast(Closable, self._places.pop(k).value) for k in chosen]

    def _used(self) -> int:
        return sum(place.size_bytes for place in self._places.values())

    def _next(self) -> int:
        self._tick += 1
        return self._tick

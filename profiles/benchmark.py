"""The device's benchmark: a bounded schedule over probes that others bring, and the document that keeps the results.

A result is kept as long as what it depends on is the same: the model's digest, the engine's version and the CPU. So a
new engine or another model costs its own probes only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from attrs import evolve, field, frozen

from protocol.clock import Clock
from protocol.decode import check_schema, decode, encode
from protocol.device import Measured
from protocol.errors import MidstreamError

BENCHMARK_SCHEMA = "midstream.benchmark/1.0"
MAX_DOCUMENT_BYTES = 1 << 20
MAX_RESULTS = 2000

_CLOSE_RATIO = 1.05


class Probe(Protocol):
    """One measurement. `run` blocks, for about `expected_s` seconds, and raises MidstreamErrors only."""

    @property
    def name(self) -> str:
        """Unique and stable: model, engine, threads and what is measured."""
        ...

    @property
    def expected_s(self) -> float: ...

    @property
    def run(self) -> Callable[[], Measured]: ...


@frozen
class Basis:
    """What results depend on: digests of the models at hand, engine versions by name, and the CPU's identity."""

    digests: frozenset[str]
    engines: Mapping[str, str]
    cpu: str

    @property
    def key(self) -> str:
        """Hash over all of it; the profile carries it."""
        lines = [*sorted(self.digests), "", *(f"{k}={v}" for k, v in sorted(self.engines.items())), "", self.cpu]
        return hashlib.sha256("\n".join(lines).encode("utf-8")).hexdigest()[:32]


@frozen
class Result:
    """A measurement with the probe that made it and the version of the engine it ran on."""

    name: str
    measured: Measured
    engine_version: str = ""


@frozen
class BenchmarkDocument:
    """All results of one device. skipped: probes the time did not suffice for; failed: probe name -> why."""

    key: str
    cpu: str
    results: tuple[Result, ...] = ()
    skipped: tuple[str, ...] = ()
    failed: Mapping[str, str] = field(factory=dict)
    schema: str = BENCHMARK_SCHEMA

    @property
    def measured(self) -> tuple[Measured, ...]:
        """The bare measurements, as the profile carries them."""
        return tuple(result.measured for result in self.results)

    @property
    def complete(self) -> bool:
        """True when no probe was left out for lack of time; failed ones count as done."""
        return not self.skipped


@frozen
class Progress:
    """done of total probes are behind us; `name` runs now (empty at the end)."""

    done: int
    total: int
    name: str
    spent_s: float


def run_benchmark(
    probes: Sequence[Probe],
    held: BenchmarkDocument | None,
    basis: Basis,
    budget_s: float,
    clock: Clock,
    *,
    progress: Callable[[Progress], None] = lambda step: None,
    cancelled: Callable[[], bool] = lambda: False,
) -> BenchmarkDocument:
    """Run what is missing, in the order given, and no longer than `budget_s` seconds plus one probe's overrun.

    A probe that would not fit is skipped while shorter ones behind it still run. Blocking; call it from a thread of its
    own. Results of `held` that still hold are reused whether or not their probe is in `probes`.
    """
    kept = {result.name: result for result in still_valid(held, basis)}
    missing = [probe for probe in probes if probe.name not in kept]
    started = clock()
    skipped: list[str] = []
    failed: dict[str, str] = {}
    for number, probe in enumerate(missing):
        spent_s = clock() - started
        if cancelled() or spent_s + probe.expected_s > budget_s:
            skipped.append(probe.name)
            continue
        progress(Progress(number, len(missing), probe.name, spent_s))
        try:
            measured = probe.run()
        except MidstreamError as err:
            failed[probe.name] = str(err)[:200]
            continue
        kept[probe.name] = Result(probe.name, measured, basis.engines.get(measured.engine, ""))
    progress(Progress(len(missing), len(missing), "", clock() - started))
    results = tuple(kept[name] for name in sorted(kept))[:MAX_RESULTS]
    return BenchmarkDocument(basis.key, basis.cpu, results, tuple(skipped), failed)


def still_valid(held: BenchmarkDocument | None, basis: Basis) -> tuple[Result, ...]:
    """The results of `held` that nothing has changed for."""
    if held is None or held.cpu != basis.cpu:
        return ()
    return tuple(
        result
        for result in held.results
        if result.measured.digest in basis.digests | {""}
        and basis.engines.get(result.measured.engine, "") == result.engine_version
    )


def encode_benchmark(document: BenchmarkDocument) -> bytes:
    """The document for disk."""
    return encode(document)


def decode_benchmark(data: bytes) -> BenchmarkDocument:
    """Read it back; raises ProtocolError for another schema or a torn file."""
    document = decode(BenchmarkDocument, data, what="benchmark", max_bytes=MAX_DOCUMENT_BYTES)
    check_schema(document.schema, BENCHMARK_SCHEMA)
    return evolve(document, results=document.results[:MAX_RESULTS])


def best_threads(measured: Sequence[Measured], digest: str, engine: str, what: str) -> int | None:
    """The fewest threads within 5 % of the fastest; None when nothing was measured.

    More threads than that only take cores from everyone else, and with every core taken decoding collapses under
    contention.
    """
    found = [m for m in measured if (m.digest, m.engine, m.what) == (digest, engine, what)]
    if not found:
        return None
    fastest = min(_seconds(m) for m in found)
    return min(m.threads for m in found if _seconds(m) <= fastest * _CLOSE_RATIO)


def fastest_engine(measured: Sequence[Measured], digest: str, engines: Sequence[str], what: str) -> str | None:
    """The engine of `engines` that is fastest at its best number of threads; None when none was measured."""
    found = [m for m in measured if m.digest == digest and m.what == what and m.engine in engines]
    return min(found, key=_seconds).engine if found else None


def _seconds(measured: Measured) -> float:
    return measured.median_s if measured.per_token_s is None else measured.per_token_s

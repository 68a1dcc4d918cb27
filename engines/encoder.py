"""The sentence encoder of one house, and which of its two copies runs: as it came, or with products in eight bits.

Vectors of both lie so near each other (cosine from NEAR_COSINE on, looked at before the quick one is used) that they
share one id: what was kept, tuned or fitted with one serves with the other. Which is quicker is a matter of the
processor and the runtime, so it is tried at the first start, and again when either of them or the model is new.
"""

from __future__ import annotations

import asyncio
import logging
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

from attrs import define, frozen

from engines.digest import file_sha256
from engines.executor import BoundedExecutor
from engines.local import LocalEndpoint
from engines.pool import ModelPool
from engines.port import TensorRuntime
from engines.quick_encoder import COPY_VERSION, write_quick_copy
from engines.registry import engine_class
from engines.sentences import SentenceEmbedder
from engines.store import ModelStore
from protocol.clock import Clock
from protocol.decode import decode, encode
from protocol.durable import read_durable, remove_durable, write_durable
from protocol.errors import EngineError, MidstreamError

log = logging.getLogger("midstream.engines.encoder")

ENCODER, TOKENIZER, DIMENSIONS = "minilm-int8", "minilm-tokenizer", 384
QUICK = "minilm-int8-quick"

POOL_BYTES = 320 << 20
"""Both copies are there while they are tried: of 23 MB on disk each, counted as 141 MiB (engines/pool.py)."""

NEAR_COSINE = 0.995
GAIN_RATIO = 0.9
"""The quick copy is taken when it needs at most this much of the other's time."""

TURNS = 7
_TEXTS = (
    "what will the weather be like in Oslo tomorrow",
    "turn the heating down to 19 degrees at night",
    "why does the build fail after I renamed the module",
)


@frozen
class Choice:
    """What was found at the first start. mark: of model, runtime and processor; copy_sha256: of the quick copy."""

    mark: str
    quick: bool
    copy_sha256: str = ""


@define
class _Timed:
    """Seconds per embedding, and the vectors of _TEXTS."""

    seconds: list[float]
    vectors: Sequence[Sequence[float]] = ()


class Encoder:
    """Made and used on one event loop; `start` before the first text, or the copy as it came answers.

    Args:
        folder: where the quick copy and the choice are kept.
    Raises NotFound when model or tokenizer are not on this machine, ConfigError without the libraries.
    """

    def __init__(
        self,
        models: ModelStore,
        folder: Path,
        *,
        clock: Clock = time.perf_counter,
        make_copy: Callable[[Path, Path], int] = write_quick_copy,
    ) -> None:
        entry, tokenizer = models.entry(ENCODER), models.path(TOKENIZER)
        self._file = models.path(ENCODER)
        self._sha256 = entry.sha256
        self._folder = folder
        self._clock = clock
        self._make_copy = make_copy
        runtimes: dict[str, TensorRuntime] = {"onnx": engine_class("onnx")()}
        self._executor = BoundedExecutor("sentences", 1)
        self._pool = ModelPool(POOL_BYTES)
        self.endpoint = LocalEndpoint(models, self._pool, self._executor, runtimes, threads=1)
        self.embedder = SentenceEmbedder(self.endpoint, ENCODER, tokenizer, entry.sha256, DIMENSIONS)

    @property
    def quick(self) -> bool:
        """Whether the quick copy answers."""
        return self.embedder.model == QUICK

    async def start(self) -> bool:
        """Use the quicker copy; without one, for whatever reason, the encoder stays as it came.

        Returns whether a copy had to be made and tried, which leaves some 130 MB with the C library.
        """
        quick = tried = False
        try:
            choice = await asyncio.to_thread(self._kept)
            if choice is None:
                tried = True
                choice = await self._tried()
                await asyncio.to_thread(write_durable, self._choice_file, encode(choice))
            if choice.quick:
                self.endpoint.register(QUICK, self._copy, choice.copy_sha256)
            quick = choice.quick
        except (MidstreamError, OSError) as err:
            log.info("the sentence encoder runs as it came: %s", err)
        finally:  # a start that was cancelled, too
            self.embedder.model = QUICK if quick else ENCODER
            self.endpoint.unregister(ENCODER if quick else QUICK)
        return tried

    async def close(self) -> None:
        """Free the model; idempotent."""
        await self.endpoint.close()
        self._executor.close()
        self._pool.close()

    @property
    def _copy(self) -> Path:
        return self._folder / f"{QUICK}.onnx"

    @property
    def _choice_file(self) -> Path:
        return self._folder / "encoder.json"

    @property
    def _mark(self) -> str:
        return f"{self._sha256}/{COPY_VERSION} {self.endpoint.versions()} {platform.machine()} {_processor()}"

    def _kept(self) -> Choice | None:
        """The choice of an earlier start, if it still holds and its copy is whole."""
        kept = read_durable(self._choice_file, lambda data: decode(Choice, data, what=self._choice_file.name))
        if kept is None or kept.mark != self._mark:
            return None
        whole = not kept.quick or (self._copy.is_file() and file_sha256(self._copy) == kept.copy_sha256)
        return kept if whole else None

    async def _tried(self) -> Choice:
        """Whether the quick copy is worth its place.

        Raises ConfigError where none can be made; EngineError or OSError for what may go better at the next start.
        """
        try:
            await asyncio.to_thread(remove_durable, self._copy)  # no previous copy is kept: it is as large
            await asyncio.to_thread(self._make_copy, self._file, self._copy)
            digest = await asyncio.to_thread(file_sha256, self._copy)
            self.endpoint.register(QUICK, self._copy, digest)
            good = await self._in_turns()
        except EngineError as err:  # a runtime without this operator
            if isinstance(err.__cause__, (MemoryError, OSError)):  # or a machine that was busy, time-outs are OSErrors
                raise
            log.info("there is no quick copy of the encoder: %s", err.message)
            good = False
        if not good:
            await asyncio.to_thread(remove_durable, self._copy)
        return Choice(self._mark, good, digest if good else "")

    async def _in_turns(self) -> bool:
        """Both copies over the same texts, in turns: is the quick one quicker, and does it say the same?"""
        timed = {ENCODER: _Timed([]), QUICK: _Timed([])}
        for turn in range(TURNS + 1):
            for name, one in timed.items():
                self.embedder.model = name
                began_s = self._clock()
                one.vectors = [(await self.embedder.embed([text]))[0] for text in _TEXTS]
                if turn > 0:  # the first loads
                    one.seconds.append(self._clock() - began_s)
        ratio = median(timed[QUICK].seconds) / max(1e-9, median(timed[ENCODER].seconds))
        pairs = zip(timed[ENCODER].vectors, timed[QUICK].vectors, strict=True)
        cosine = min(sum(float(a) * float(b) for a, b in zip(*pair, strict=True)) for pair in pairs)
        log.info(
            "the sentence encoder's copy with products in eight bits (%s) takes %.2f of its time, at a cosine of %.4f",
            self._copy, ratio, cosine,
        )  # fmt: skip
        return ratio <= GAIN_RATIO and cosine >= NEAR_COSINE


def _processor() -> str:
    """The model name of the first core, where the system tells it; else its kind."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.lower().startswith(("model name", "cpu part")):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor()

"""The one thread that owns a model's context: batches of decode steps and pieces of prompts of several sequences.

Everything native happens here; the event loop hands in jobs and gets results by callbacks. A sequence that has no
credit is simply not scheduled, and one that was cancelled leaves before the next batch, or aborts the running one if
that is long; what others had in it is evaluated again, which costs them less than the rest of a foreign prompt.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from attrs import evolve

from engines.decoding import BATCH_TOKENS, Aborted, DecodingModel, Entry, NoRoom
from engines.sampling import Chosen, Sampler
from protocol.errors import EngineError, MidstreamError
from protocol.text import Sampling

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

PREFILL_TOKENS = 128
"""Prompt tokens per batch: bounds how long other sequences wait for their next token."""

Load = Callable[[Callable[[], bool]], DecodingModel]
"""Loads the model, on the owner's thread, with the question whether the batch that runs shall end."""

Job = Callable[[DecodingModel], Any]
Done = Callable[[Any, MidstreamError | None], None]


class Generation:
    """One generation as the owner sees it. Fields without a lock are written by one side only.

    limit: tokens to sample at the most.
    on_prefilled(cached): all of `pending` was evaluated. on_token(chosen, piece, ends): a token was sampled.
    on_failed(error): nothing more will come.
    """

    def __init__(
        self,
        ids: Sequence[int],
        sampling: Sampling,
        limit: int,
        *,
        on_prefilled: Callable[[int], None],
        on_token: Callable[[Chosen, bytes, bool], None],
        on_failed: Callable[[MidstreamError], None],
    ) -> None:
        self.pending: deque[int] = deque(ids)
        self.held: list[int] = []
        self.slot = -1
        self.cached = 0
        self.reported = False
        self.logits: NDArray[np.float32] | None = None
        self.sampler = Sampler(sampling)
        self.allowed = 0
        """Tokens that may be sampled altogether; moved up by start() and by acknowledgements."""
        self.limit = limit
        self.sampled = 0
        self.over = False
        self.on_prefilled = on_prefilled
        self.on_token = on_token
        self.on_failed = on_failed

    @property
    def may_sample(self) -> bool:
        """Whether credit and limit leave room for one more token."""
        return self.sampled < min(self.allowed, self.limit)


class ContextOwner:
    """Runs until `close()`. Thread-safe; callbacks come on the owner's thread and must not block."""

    def __init__(self, load: Load, *, name: str, slots: int) -> None:
        self._load = load
        self._model: DecodingModel | None = None
        self._change = threading.Condition()
        self._jobs: deque[tuple[Job, Done]] = deque()
        self._arriving: deque[Generation] = deque()
        self._running: list[Generation] = []
        self._in_batch: list[Generation] = []
        self._caches: dict[int, list[int]] = {slot: [] for slot in range(slots)}
        self._closed = False
        self._why: MidstreamError = EngineError(f"the engine of {name} was closed")
        self._thread = threading.Thread(target=self._live, name="context-owner", daemon=True)
        self._thread.start()

    def call(self, job: Job, done: Done) -> None:
        """Run `job` between batches; `done(result, error)` on the owner's thread."""
        with self._change:
            if self._closed:
                done(None, self._why)
                return
            self._jobs.append((job, done))
            self._change.notify()

    def add(self, sequence: Generation) -> None:
        """Schedule a new sequence; the caller keeps their number within the slots."""
        with self._change:
            if self._closed:
                sequence.on_failed(self._why)
                return
            self._arriving.append(sequence)
            self._change.notify()

    def extend(self, sequence: Generation, ids: Sequence[int], limit: int) -> None:
        """Append ids that another engine made; `limit` as at construction."""
        with self._change:
            sequence.pending.extend(ids)
            sequence.limit = limit
            sequence.reported = False
            self._change.notify()

    def allow(self, sequence: Generation, tokens: int) -> None:
        """Let `sequence` sample until it has `tokens` altogether."""
        with self._change:
            if tokens > sequence.allowed:
                sequence.allowed = tokens
                self._change.notify()

    def remove(self, sequence: Generation) -> None:
        """Cancel: no callback comes after the batch that runs, which is aborted unless it is short."""
        with self._change:
            sequence.over = True
            self._change.notify()
        self._interrupt(sequence)

    def close(self) -> None:
        """End the thread and free the context; blocks until the running batch is over."""
        with self._change:
            self._closed = True
            self._change.notify()
        if (model := self._model) is not None:
            model.interrupt()
        self._thread.join()

    def _interrupt(self, sequence: Generation) -> None:
        model = self._model
        if model is not None and sequence in self._in_batch:
            model.interrupt()

    def _live(self) -> None:
        try:
            model = self._model = self._load(self._should_abort)
        except MidstreamError as err:
            self._refuse_all(err)
            return
        try:
            while self._wait():
                self._run_jobs(model)
                self._drop_over(model)
                self._step(model)
        finally:
            self._model = None
            self._refuse_all(self._why)
            model.close()

    def _wait(self) -> bool:
        """Until there is something to do; False at the end."""
        with self._change:
            while not (self._closed or self._jobs or self._arriving or any(map(_busy, self._running))):
                self._change.wait()
            while self._arriving:
                self._running.append(self._arriving.popleft())
            return not self._closed

    def _refuse_all(self, err: MidstreamError) -> None:
        """Answer everybody, now and from now on."""
        with self._change:
            self._closed, self._why = True, err
            waiting, jobs = [*self._running, *self._arriving], list(self._jobs)
            self._running, self._arriving = [], deque()
            self._jobs.clear()
        for sequence in waiting:
            if not sequence.over:
                sequence.on_failed(err)
        for _, done in jobs:
            done(None, err)

    def _run_jobs(self, model: DecodingModel) -> None:
        while True:
            with self._change:
                if not self._jobs:
                    return
                job, done = self._jobs.popleft()
            try:
                result = job(model)
            except MidstreamError as err:
                done(None, err)
            else:
                done(result, None)

    def _drop_over(self, model: DecodingModel) -> None:
        for sequence in [one for one in self._running if one.over]:
            self._release(model, sequence)

    def _release(self, model: DecodingModel, sequence: Generation) -> None:
        """Leave the slot, with what it holds as a cache for the next that begins alike."""
        self._running.remove(sequence)
        if sequence.slot >= 0:
            kept = min(len(sequence.held), model.held(sequence.slot))
            self._caches[sequence.slot] = sequence.held[:kept]

    def _fail(self, model: DecodingModel, sequence: Generation, err: MidstreamError) -> None:
        sequence.over = True
        self._release(model, sequence)
        sequence.on_failed(err)

    def _step(self, model: DecodingModel) -> None:
        """Sample where logits wait and credit allows, then evaluate one batch."""
        for sequence in self._running:
            self._settle(model, sequence)
            self._sample(model, sequence)
        entries, users = self._batch()
        if not entries:
            return
        try:
            self._in_batch = users
            model.decode(entries)
        except NoRoom as err:
            if not self._free_a_cache(model):
                self._fail(model, users[-1], EngineError(err.message, next_step="lower context_tokens or slots"))
            return
        except Aborted:
            self._undo(model, users)
            return
        except EngineError as err:
            for sequence in users:
                self._fail(model, sequence, err)
            model.clear()
            self._caches = {slot: [] for slot in self._caches}
            return
        finally:
            self._in_batch = []
        self._absorb(model, entries, users)

    def _settle(self, model: DecodingModel, sequence: Generation) -> None:
        """Give a new sequence the free slot whose cache begins most like it."""
        if sequence.slot >= 0:
            return
        taken = {one.slot for one in self._running}
        ids = list(sequence.pending)
        shared = {slot: _common(cache, ids) for slot, cache in self._caches.items() if slot not in taken}
        slot = max(shared, key=lambda one: (shared[one], -len(self._caches[one])))
        # The last token is evaluated again: its logits are wanted.
        kept = model.keep(slot, min(shared[slot], len(ids) - 1))
        sequence.slot, sequence.cached = slot, kept
        sequence.held = ids[:kept]
        self._caches[slot] = []
        with self._change:
            for _ in range(kept):
                sequence.pending.popleft()

    def _sample(self, model: DecodingModel, sequence: Generation) -> None:
        if sequence.logits is None or sequence.pending or sequence.over or not sequence.may_sample:
            return
        chosen = sequence.sampler.choose(sequence.logits)
        sequence.logits = None
        sequence.sampled += 1
        ends = model.ends(chosen.id)
        if not ends and sequence.sampled < sequence.limit:
            with self._change:
                sequence.pending.append(chosen.id)
        if chosen.top:
            chosen = evolve(chosen, top_pieces=tuple((model.piece(one), logprob) for one, logprob in chosen.top))
        sequence.on_token(chosen, b"" if ends else model.piece(chosen.id), ends)

    def _batch(self) -> tuple[list[Entry], list[Generation]]:
        entries: list[Entry] = []
        users: list[Generation] = []
        # Decode steps first, so that a long prompt never holds a running answer up by more than one batch.
        for sequence in sorted(self._running, key=lambda one: len(one.pending)):
            room = min(len(sequence.pending), PREFILL_TOKENS, BATCH_TOKENS - len(entries))
            if sequence.over or room < 1:
                continue
            users.append(sequence)
            for offset in range(room):
                last = offset == len(sequence.pending) - 1
                position = len(sequence.held) + offset
                entries.append(Entry(sequence.pending[offset], position, sequence.slot, last))
        return entries, users

    def _undo(self, model: DecodingModel, users: Sequence[Generation]) -> None:
        """What was in an aborted batch for sequences that go on is evaluated again with the next one."""
        for sequence in users:
            kept = model.keep(sequence.slot, len(sequence.held))
            with self._change:
                # A memory that drops all or nothing loses what stood before the batch too.
                sequence.pending.extendleft(reversed(sequence.held[kept:]))
                del sequence.held[kept:]

    def _absorb(self, model: DecodingModel, entries: Sequence[Entry], users: Sequence[Generation]) -> None:
        for sequence in users:
            places = [place for place, entry in enumerate(entries) if entry.sequence == sequence.slot]
            with self._change:
                for _ in places:
                    sequence.held.append(sequence.pending.popleft())
                done = not sequence.pending
            if entries[places[-1]].logits:
                sequence.logits = model.logits(places[-1])
            if done and not sequence.reported:
                sequence.reported = True
                sequence.on_prefilled(sequence.cached)

    def _free_a_cache(self, model: DecodingModel) -> bool:
        taken = {one.slot for one in self._running}
        for slot, cache in self._caches.items():
            if slot not in taken and cache:
                model.keep(slot, 0)
                self._caches[slot] = []
                return True
        return False

    def _should_abort(self) -> bool:
        return self._closed or any(one.over for one in self._in_batch)


def _busy(sequence: Generation) -> bool:
    """Whether the owner has something to do for this sequence."""
    return sequence.over or bool(sequence.pending) or (sequence.logits is not None and sequence.may_sample)


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    count = 0
    for one, other in zip(left, right, strict=False):
        if one != other:
            break
        count += 1
    return count

"""How long a text request would wait for a slot, and whether it may: from measured rates and a wait target. Pure.

An answer keeps a slot for its prefill and its tokens, so the wait is the work ahead in tokens over the rate at which
the slots make them: what is left of the answers that run and all of those that wait, divided by the slots (Little's
law with the work known, J. D. C. Little, Operations Research 9(3), 1961). How long an answer becomes is not known
ahead: the mean of those seen, or less where the request allows no more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from attrs import frozen

from engines.admission import MAX_WAITING, Decision, ServiceTime

PRIOR_ANSWER_TOKENS = 128
"""Length of an answer before any was seen."""

LEAST_SAMPLE_TOKENS = 2
REMEMBERED_ANSWERS = 64
LEFT_PART = 4
"""An answer that is longer than expected is taken to have one part in this many of an answer still before it."""

PREFILL_BATCH_TOKENS = 128
STOP_S = 0.5
LEAST_BATCH_TOKENS, MOST_BATCH_TOKENS = 16, 512


def prefill_batch(tokens_per_s: float | None) -> int:
    """Tokens per prefill batch so that one takes at most STOP_S at this prefill rate: a power of two, 128 unmeasured.

    For engines that can end a prefill only between two batches: it is what a departed client still costs.

    >>> prefill_batch(1000), prefill_batch(40), prefill_batch(5), prefill_batch(None)
    (256, 16, 16, 128)
    """
    if tokens_per_s is None:
        return PREFILL_BATCH_TOKENS
    fits = max(LEAST_BATCH_TOKENS, min(MOST_BATCH_TOKENS, int(tokens_per_s * STOP_S)))
    return 1 << (fits.bit_length() - 1)


@frozen
class Work:
    """What is known of a request: size of its prompt, and the most tokens that it may become."""

    prompt_bytes: int
    max_tokens: int


@frozen
class Running:
    """A request that holds a slot: `made` tokens so far, None while its prompt is read."""

    work: Work
    made: int | None


class TextAdmission:
    """Decides about newcomers. Ended answers teach it; until one did, one request per slot may wait.

    Args:
        slots: answers at once.
        wait_target_s: longest wait for a slot that a request is let in for. One may always wait, or a slot that
            becomes free would stand idle until somebody asks again.
    """

    def __init__(self, slots: int, wait_target_s: float) -> None:
        if slots < 1:
            raise ValueError("slots must be above 0")
        self._slots = slots
        self._wait_target_s = 0.0
        self.set_wait_target(wait_target_s)
        self._token_s = ServiceTime(float(slots))
        self._byte_s = ServiceTime(float(slots))
        self._lengths: deque[int] = deque(maxlen=REMEMBERED_ANSWERS)
        self._prior_token_s: float | None = None

    def set_wait_target(self, seconds: float) -> None:
        """Let requests wait up to `seconds` from now on. ValueError unless above 0."""
        if seconds <= 0:
            raise ValueError("the wait target must be above 0")
        self._wait_target_s = seconds

    def expect(self, tokens_per_s: float | None) -> None:
        """A decode rate that was measured elsewhere (a device's profile); holds until an answer was seen here."""
        self._prior_token_s = 1.0 / tokens_per_s if tokens_per_s else None

    def learn_prefill(self, prompt_bytes: int, seconds: float, running: int) -> None:
        """A prompt was read while `running` requests, itself included, held slots."""
        if prompt_bytes > 0:
            self._byte_s.add(seconds / prompt_bytes, float(running))

    def learn_decode(self, tokens: int, seconds: float, running: int) -> None:
        """`tokens` came within `seconds` after the one before them, whether or not the answer went on to its end."""
        if tokens >= LEAST_SAMPLE_TOKENS - 1:
            self._token_s.add(seconds / tokens, float(running))

    def learn_length(self, tokens: int) -> None:
        """An answer ended by itself after `tokens`."""
        self._lengths.append(tokens)

    @property
    def token_s(self) -> float | None:
        """Seconds a token, as a slot makes them; None before anything was measured."""
        return self._prior_token_s if self._token_s.seconds is None else self._token_s.seconds

    @property
    def service_s(self) -> float | None:
        """Seconds that a usual answer decodes; None before anything was measured."""
        return None if self.token_s is None else self._usual_tokens() * self.token_s

    @property
    def capacity(self) -> int:
        """How many usual answers may wait."""
        if self.service_s is None:
            return self._slots
        return max(1, min(MAX_WAITING, int(self._wait_target_s * self._slots / max(1e-9, self.service_s))))

    def wait_s(self, running: Sequence[Running], waiting: Sequence[Work]) -> float:
        """Seconds until a newcomer behind these would have a slot; 0 while one is free or nothing was measured."""
        token_s = self.token_s
        if token_s is None or (len(running) < self._slots and not waiting):
            return 0.0
        left_s = sum(self._left_s(one, token_s) for one in running)
        return (left_s + sum(self._service_s(one, token_s) for one in waiting)) / self._slots

    def decide(self, running: Sequence[Running], waiting: Sequence[Work]) -> Decision:
        """Let a newcomer in, or refuse it with the time after which it would be let in."""
        if len(running) < self._slots and not waiting:
            return Decision("queue", "a slot is free")
        wait_s = self.wait_s(running, waiting)
        fits = wait_s <= self._wait_target_s if self.token_s is not None else len(waiting) < self._slots
        if not waiting or (fits and len(waiting) < MAX_WAITING):
            return Decision("queue", f"{len(waiting)} wait, {wait_s:.1f} s")
        reason = f"{len(waiting)} wait, a slot would take {wait_s:.1f} s, the target is {self._wait_target_s:g} s"
        return Decision("refuse", reason, max(0.0, wait_s - self._wait_target_s))

    def _usual_tokens(self) -> float:
        return sum(self._lengths) / len(self._lengths) if self._lengths else float(PRIOR_ANSWER_TOKENS)

    def _tokens(self, work: Work) -> float:
        return min(float(work.max_tokens), self._usual_tokens())

    def _service_s(self, work: Work, token_s: float) -> float:
        return work.prompt_bytes * (self._byte_s.seconds or 0.0) + self._tokens(work) * token_s

    def _left_s(self, one: Running, token_s: float) -> float:
        if one.made is None:
            return self._service_s(one.work, token_s)
        expected = max(self._tokens(one.work) - one.made, self._usual_tokens() / LEFT_PART)
        return max(0.0, min(expected, one.work.max_tokens - one.made)) * token_s

"""Finding the coordinator: candidates from four sources, tried in parallel; TLS identity decides which is real.

mDNS and the broker only name candidates: neither proves that anybody is there, nor who.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import logging
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, Literal

from attrs import frozen

from links.port import ClockNotSet
from protocol.errors import LinkClosed, LinkError, MidstreamError

log = logging.getLogger("midstream.agent.discovery")

Origin = Literal["static", "last_good", "mdns", "broker", "join"]
ORDER: tuple[Origin, ...] = ("static", "last_good", "mdns", "broker", "join")

# Bounds what a hostile network can make us try.
MAX_CANDIDATES = 32
# A later source waits this long for an earlier one, so that the preferred address wins when both answer.
STAGGER_S = 0.2
# A join token's address is as old as the token: a search gets this head start, or less when it ends sooner.
JOIN_BEHIND_SEARCH_S = 4.0
ATTEMPT_TIMEOUT_S = 5.0
MAX_MESSAGE_CHARS = 200
_MAX_HOST_CHARS, _MAX_REASON_CHARS = 60, 60
_REASONS = {
    errno.ECONNREFUSED: "refused",
    errno.EHOSTUNREACH: "no route",
    errno.ENETUNREACH: "no network",
    errno.ECONNRESET: "closed",
}


@frozen
class Candidate:
    """An address where the coordinator may be. `broker_port` is known from mDNS or the broker only."""

    host: str
    port: int
    origin: Origin
    broker_port: int | None = None


Check = Callable[[Candidate], Awaitable[None]]
"""Connects and verifies TLS identity; raises LinkError when it is not our coordinator."""

Source = Callable[[], Awaitable[Sequence[Candidate]]]


def ordered(candidates: Iterable[Candidate]) -> tuple[Candidate, ...]:
    """By source, then global before link-local addresses; each address once; at most MAX_CANDIDATES.

    >>> [c.origin for c in ordered([Candidate("a", 1, "mdns"), Candidate("b", 1, "static")])]
    ['static', 'mdns']
    """
    seen: set[tuple[str, int]] = set()
    kept: list[Candidate] = []
    for candidate in sorted(candidates, key=lambda c: (ORDER.index(c.origin), _distance(c.host))):
        key = (candidate.host, candidate.port)
        if key not in seen and candidate.host and 0 < candidate.port < 65536:
            seen.add(key)
            kept.append(candidate)
    return tuple(kept[:MAX_CANDIDATES])


def _distance(host: str) -> int:
    """Container bridges come last: hosts list them first, and they are rarely the way."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return 0
    if address.is_link_local:
        return 2
    return 1 if address in _BRIDGES else 0


_BRIDGES = ipaddress.ip_network("172.17.0.0/16")


def reason(error: BaseException) -> str:
    """Why an attempt failed, in a few words: the address stands beside it already."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, LinkClosed):
            return "closed"
        if isinstance(cause, OSError):
            return _system_reason(cause)
        cause = cause.__cause__
    text = error.message if isinstance(error, MidstreamError) else str(error)
    return text if len(text) <= _MAX_REASON_CHARS else text[: _MAX_REASON_CHARS - 1] + "…"


def _system_reason(error: OSError) -> str:
    if isinstance(error, ssl.SSLError):
        return "is not of this fleet" if isinstance(error, ssl.SSLCertVerificationError) else "TLS failed"
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, socket.gaierror):
        return "unknown name"
    return _REASONS.get(error.errno or 0, "not reachable")


def listed(failures: Sequence[str]) -> str:
    """Each failure once, as many as a short line takes, and how many more there were."""
    different = list(dict.fromkeys(failures))
    room = MAX_MESSAGE_CHARS - len("no coordinator found: ") - len("; 99 more")
    kept: list[str] = []
    for failure in different:
        if len("; ".join([*kept, failure])) > room:
            break
        kept.append(failure)
    more = len(different) - len(kept)
    return "; ".join([*kept, *([f"{more} more"] if more else [])])


async def locate(
    known: Sequence[Candidate], sources: Sequence[Source], check: Check, *, timeout_s: float = ATTEMPT_TIMEOUT_S
) -> Candidate:
    """The first candidate that passes `check`, earlier ones preferred by a small head start.

    Args:
        known: candidates at hand (static, last good, broker).
        sources: slower ways to candidates (mDNS), asked at the same time.
        check: verifies one candidate.
        timeout_s: bound on each single attempt.

    Raises:
        ClockNotSet: somebody answered whose certificate is not valid at this machine's time.
        LinkError: nothing answered with the fleet's identity; the message lists what was tried.
    """
    race = _Race(check, timeout_s)
    try:
        race.searches.update(asyncio.ensure_future(source()) for source in sources)
        race.enter(ordered(known))
        return await race.winner()
    finally:
        await race.cancel()


class _Race:
    """Attempts and searches under way; owned by one `locate` call."""

    def __init__(self, check: Check, timeout_s: float) -> None:
        self._check = check
        self._timeout_s = timeout_s
        self._attempts: dict[asyncio.Future[None], Candidate] = {}
        self._entered: set[tuple[str, int]] = set()
        self._failures: list[str] = []
        self._clock_error: ClockNotSet | None = None
        self.searches: set[asyncio.Future[Sequence[Candidate]]] = set()

    def enter(self, candidates: Sequence[Candidate]) -> None:
        for rank, candidate in enumerate(candidates):
            key = (candidate.host, candidate.port)
            if key in self._entered:
                self._know_better(candidate)
                continue
            if len(self._entered) >= MAX_CANDIDATES:
                continue
            self._entered.add(key)
            self._attempts[asyncio.ensure_future(self._attempt(candidate, rank * STAGGER_S))] = candidate

    def _know_better(self, candidate: Candidate) -> None:
        """A fresher source names an address that is being tried already."""
        for attempt, tried in self._attempts.items():
            same = (tried.host, tried.port) == (candidate.host, candidate.port)
            if same and ORDER.index(candidate.origin) < ORDER.index(tried.origin):
                self._attempts[attempt] = candidate

    async def winner(self) -> Candidate:
        while self._attempts or self.searches:
            waiting: set[asyncio.Future[Any]] = {*self._attempts, *self.searches}
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for attempt in [a for a in self._attempts if a.done()]:
                candidate = self._attempts.pop(attempt)
                error = attempt.exception()
                if error is None:
                    return candidate
                self._note(f"{candidate.host[:_MAX_HOST_CHARS]}:{candidate.port}", error)
            for search in [s for s in self.searches if s.done()]:
                self.searches.discard(search)
                error = search.exception()
                if error is None:
                    self.enter(ordered(search.result()))
                else:
                    self._note("search:", error)
        if self._clock_error is not None:
            raise self._clock_error
        raise LinkError(
            f"no coordinator found: {listed(self._failures) or 'no address is known and mDNS found none'}",
            next_step="check that it runs, or set its static address (coordinator = host:port)",
        )

    async def _attempt(self, candidate: Candidate, delay_s: float) -> None:
        if candidate.origin == "join":
            await self._after_searches()
        await asyncio.sleep(delay_s)
        try:
            await asyncio.wait_for(self._check(candidate), self._timeout_s)
        except TimeoutError as err:
            raise LinkError(f"no answer in {self._timeout_s:g} s") from err

    async def _after_searches(self) -> None:
        if self.searches:
            await asyncio.wait(self.searches, timeout=JOIN_BEHIND_SEARCH_S)

    def _note(self, what: str, error: BaseException) -> None:
        if not isinstance(error, MidstreamError):
            raise error
        if isinstance(error, ClockNotSet):
            self._clock_error = error
        log.debug("%s %s", what, error.message)
        self._failures.append(f"{what} {reason(error)}")

    async def cancel(self) -> None:
        tasks: list[asyncio.Future[Any]] = [*self._attempts, *self.searches]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

"""The connected track: search for the coordinator, point both planes at it, search again when something breaks.

Everything here is an improvement of service, never a condition of it: the device answers alone all the while.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from attrs import evolve, frozen

from agent.discovery import Candidate, Check, Source, locate
from agent.health import Health
from agent.identity import Enrolment
from agent.last_good import LastGood
from links.port import ClockNotSet, ControlState
from protocol.clock import Clock
from protocol.documents import CoordinatorInfo, CoordinatorState
from protocol.errors import LinkError, NotAllowed

log = logging.getLogger("midstream.agent.connecting")

REFUSED_STEP = "see `midstream fleet list`: revoked, join under another device_id; else join again, or check its fleet"

# A connection that lived this long counts as good and ends the backing off.
GOOD_AFTER_S = 30.0


@frozen
class Pauses:
    """Between searches: a doubling span from first_s to longest_s, of which a random part is waited.

    down_s: the channel reconnects by itself; only after this long may the coordinator have moved.
    """

    first_s: float = 1.0
    longest_s: float = 60.0
    down_s: float = 10.0


class Session(Protocol):
    """A control session (agent.control.Control)."""

    state: ControlState

    async def start(self) -> None: ...
    def dial_now(self) -> None: ...
    async def stop(self, goodbye: str = "offline") -> None: ...


class DataPlane(Protocol):
    """The data link as this track sees it."""

    available: bool

    def mark_available(self) -> None: ...


async def not_asked(found: Candidate) -> CoordinatorInfo | None:
    """An `ask` for tracks that live with what they know."""
    return None


def not_kept(enrolment: Enrolment) -> None:
    """A `keep` for tracks that live as long as what they know."""


@frozen(kw_only=True)
class ConnectorPorts:
    """What the track acts through.

    check: proves that a candidate is our coordinator. open_session: a control session to a broker, not yet started.
    point_data: leads the data link to an address. step: moves the connected track. fixed_broker: the broker that this
    device's configuration names; nothing overrides it. ask: what the coordinator says of its broker, None when it
    cannot say; raises NotAllowed when it does not know us as a member. keep: takes an enrolment with another broker.
    """

    check: Check
    ask: Callable[[Candidate], Awaitable[CoordinatorInfo | None]] = not_asked
    keep: Callable[[Enrolment], None] = not_kept
    sources: Sequence[Source]
    open_session: Callable[[str, int], Session]
    point_data: Callable[[Candidate], Awaitable[None]]
    data: DataPlane
    step: Callable[[str], None]
    health: Health
    clock: Clock
    last_good: LastGood
    static: Candidate | None = None
    fixed_broker: tuple[str, int] | None = None
    pauses: Pauses = Pauses()
    may_search: Callable[[], bool] = lambda: True
    """False while the device has no network at all, as its host says; `kick` when it may be true again."""


class Connector:
    """Runs the track; `run` ends only by cancellation."""

    def __init__(self, enrolment: Enrolment, ports: ConnectorPorts) -> None:
        self._enrolment = enrolment
        self._ports = ports
        self._wake = asyncio.Event()
        self._session: Session | None = None
        self._broker: tuple[str, int] | None = None
        self._told: tuple[Candidate, ...] = ()
        self._deaf = False
        self._urgent = False
        self._tries = 0
        self._good_since_s: float | None = None
        self._was_up = False
        self._renew = False
        self.found: Candidate | None = None
        self.goodbye = "offline"
        """What the fleet is told when the track ends."""

    @property
    def session(self) -> Session | None:
        """The control session in use."""
        return self._session

    @property
    def broker(self) -> tuple[str, int] | None:
        """Host and port of the broker in use."""
        return self._broker

    async def run(self) -> None:
        """Keep the device connected for as long as the task lives."""
        try:
            first = self._first_broker()
            if first is not None:
                await self._use_broker(*first)
            while True:
                self._urgent = False
                while not self._ports.may_search():
                    await self._woken_within(self._ports.pauses.longest_s)
                    self._wake.clear()
                await self._search()
                await self._until_trouble()
        finally:
            await self._end_session(self.goodbye)

    def renew(self) -> None:
        """End the control session in order and begin another: what it was made with has changed."""
        self._renew = True
        self.kick("the control session is made anew")

    def kick(self, reason: str) -> None:
        """Search again now."""
        log.debug("searching again: %s", reason)
        self._urgent = True
        self._wake.set()

    def on_trouble(self, error: LinkError) -> None:
        """The data link broke."""
        self.kick(error.message)

    def on_deaf(self) -> None:
        """The control session takes and gives nothing back."""
        self._deaf = True
        self.kick("the control session is deaf")

    def on_state(self, state: ControlState) -> None:
        """The control session changed."""
        now_s = self._ports.clock()
        if state == "up":
            self._good_since_s = now_s
            self._was_up = True
            self._ports.health.clear("control")
        else:
            self._settle(now_s)
            self._warn_control(state)
        self._ports.step({"clock": "clock_wrong"}.get(state, state))
        self._wake.set()

    def on_coordinator(self, state: CoordinatorState) -> None:
        """The broker told where the coordinator is: candidates, no more."""
        self._told = tuple(
            Candidate(address, state.port, "broker", state.broker_port) for address in state.addresses[:8]
        )
        here = (self.found.host, self.found.port) if self.found else None
        if not self._ports.data.available or here not in [(c.host, c.port) for c in self._told]:
            self.kick("the broker names another address of the coordinator")

    async def _search(self) -> None:
        # A search changes nothing about a broker that refuses us, so it must not hide the refusal.
        if self._session is None or self._session.state not in ("up", "refused"):
            self._ports.step("search")
        try:
            found = await locate(self._known(), self._ports.sources, self._ports.check)
        except ClockNotSet as err:
            self._ports.step("clock_wrong")
            self._ports.health.warn("clock", err.message, err.next_step)
        except LinkError as err:
            self._ports.step("nothing_found")
            self._ports.health.warn("coordinator", err.message, err.next_step)
        else:
            self._ports.health.clear("clock")
            self._ports.health.clear("coordinator")
            await self._use(found)

    def _known(self) -> list[Candidate]:
        known = list(self._told)
        if self._ports.static is not None:
            known.append(self._ports.static)
        remembered = self._ports.last_good.read()
        if remembered is not None:
            known.append(remembered)
        known.append(Candidate(self._enrolment.coordinator_host, self._enrolment.coordinator_port, "join"))
        return known

    async def _use(self, found: Candidate) -> None:
        moved = self.found is None or (self.found.host, self.found.port) != (found.host, found.port)
        back = moved or not self._ports.data.available
        if moved:
            log.info("coordinator at %s:%d (%s)", found.host, found.port, found.origin)
            await self._ports.point_data(found)
        else:
            self._ports.data.mark_available()
        self.found = found
        host, port = await self._broker_of(found)
        await self._use_broker(*(self._ports.fixed_broker or (host, port)))
        if back and self._session is not None and self._session.state == "down":
            # Its own pause may still be long. Only when the way is new: searches must not set the rate of dialling.
            self._session.dial_now()

    def _first_broker(self) -> tuple[str, int] | None:
        """A broker that does not live with the coordinator is used before that is found."""
        if self._ports.fixed_broker is not None:
            return self._ports.fixed_broker
        return (self._enrolment.broker_host, self._enrolment.broker_port) if self._enrolment.broker_host else None

    async def _broker_of(self, found: Candidate) -> tuple[str, int]:
        """The broker may have moved since we joined: the coordinator itself knows best, and is remembered."""
        told = await self._ask(found)
        if told is None:
            self._ports.last_good.write(found)
            return self._enrolment.broker_host or found.host, found.broker_port or self._enrolment.broker_port
        self._ports.last_good.write(evolve(found, broker_port=told.broker_port))
        now = evolve(
            self._enrolment, broker_host=told.broker_host, broker_port=told.broker_port, broker_tls=told.broker_tls,
            broker_version=told.broker_version,
        )  # fmt: skip
        if now != self._enrolment:
            log.info("the fleet's broker is now at %s:%d", told.broker_host or found.host, told.broker_port)
            self._renew = self._renew or now.broker_tls != self._enrolment.broker_tls
            self._enrolment = now
            self._ports.keep(now)
        return told.broker_host or found.host, told.broker_port

    async def _ask(self, found: Candidate) -> CoordinatorInfo | None:
        try:
            told = await self._ports.ask(found)
        except NotAllowed as err:
            self._ports.health.warn("fleet", err.message, err.next_step)
            return None
        except LinkError as err:
            log.info("the coordinator did not say where its broker is: %s", err)
            return None
        if told is not None:
            self._ports.health.clear("fleet")
        return told

    async def _use_broker(self, host: str, port: int) -> None:
        if self._session is not None and self._broker == (host, port) and not self._deaf and not self._renew:
            return
        # The same broker hears from us again at once: nobody need take us for gone.
        staying = self._renew and self._broker == (host, port)
        await self._end_session("online" if staying else "offline")
        self._deaf = self._renew = False
        self._broker = (host, port)
        self._was_up = False
        self._ports.step("found")
        self._session = self._ports.open_session(host, port)
        await self._session.start()

    async def _end_session(self, goodbye: str) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.stop(goodbye)

    async def _until_trouble(self) -> None:
        """Return when a search makes sense: soon after fresh trouble, after a pause while it lasts."""
        while not self._urgent:
            self._wake.clear()
            if self._well():
                self._tries = 0
                await self._wake.wait()
            elif not await self._woken_within(self._next_pause_s()):
                return
        # Trouble that returns at once must not become a storm.
        await asyncio.sleep(random.uniform(0.2, 1.0) * self._ports.pauses.first_s)

    def _next_pause_s(self) -> float:
        """Full jitter over a doubling span; a control session that is merely down gets time to come back by itself."""
        pauses = self._ports.pauses
        span_s: float = min(pauses.longest_s, pauses.first_s * 2.0**self._tries)
        self._tries = min(self._tries + 1, 10)
        pause_s = random.uniform(0.3, 1.0) * span_s
        return max(pause_s, pauses.down_s) if self._ports.data.available else pause_s

    async def _woken_within(self, pause_s: float) -> bool:
        try:
            async with asyncio.timeout(pause_s):
                await self._wake.wait()
        except TimeoutError:
            return False
        return True

    def _well(self) -> bool:
        return self._session is not None and self._session.state == "up" and self._ports.data.available

    def _settle(self, now_s: float) -> None:
        if self._good_since_s is not None and now_s - self._good_since_s >= GOOD_AFTER_S:
            self._tries = 0
        self._good_since_s = None

    def _warn_control(self, state: ControlState) -> None:
        host, port = self._broker or ("", 0)
        down = ("the control connection is down", "it reconnects by itself; requests are answered here")
        if not self._was_up:
            down = (
                f"no broker answers at {host}:{port}",
                "check that it runs, and its host, port and TLS; or set `broker`",
            )
        text, step = {
            "refused": ("the broker refuses this device", REFUSED_STEP),
            "duplicate": (
                "another device uses this device's identity",
                "give each device its own state folder; restart this one when that is done",
            ),
            "clock": ("the clock is not set, so the coordinator cannot be verified", "it is tried again when it is"),
        }.get(state, down)
        self._ports.health.warn("control", text, step)

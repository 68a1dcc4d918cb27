"""The gateway's side of the control channel: sessions that outlive connections, and connections that are reaped.

A session is a number line in each direction (protocol/control_frames.py). Results are on disk before they are
acknowledged. What an app shall do is a state (route, model), told again to whoever comes back, so that a gateway that
was restarted needs to remember no instruction.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import Callable, Sequence

from attrs import define, evolve, field, frozen

from gateway.channel_places import SessionPlaces
from gateway.context import Caller
from gateway.freed_memory import give_back
from gateway.ports import KeyRing
from gateway.result_store import ResultStore
from links.port import FrameRoute, FrameStream, Request
from protocol.clock import Clock
from protocol.control_frames import (
    PATH,
    Ack,
    Beat,
    Bye,
    Frame,
    Hello,
    Instruction,
    Outbox,
    Result,
    Welcome,
    read_frame,
    write_frame,
)
from protocol.errors import ConfigError, LinkError, MidstreamError, ProtocolError
from protocol.policy import Policy

log = logging.getLogger("midstream.gateway.channel")

DEVICE, CLOUD = "device", "cloud"
GOODBYE_S = 0.2
"""Longest wait for an app to take the goodbye of a gateway that stops; all wait at once."""

HELLO_S = 10.0
SEND_S = 5.0
SWEEPS_PER_BEAT = 4
ROUTE, SWITCH = "route", "switch"
STATES = (ROUTE, SWITCH)
"""Ids of what is told anew to every connection; older tellings of it need not arrive."""

CROWD = 500
"""So many connections that ended leave enough memory behind to give it back."""

SILENT_BEATS = 1.5
"""Apps send a frame at least twice a heartbeat; with the time between two sweeps, two heartbeats are not passed."""

OnResult = Callable[[Caller, str, Result], None]
"""(who, session, what), once for each result, after it is kept."""


@frozen
class ChannelSettings:
    """heartbeat_s: no connection is silent for two of them. sessions: at once, connected or not; the one that was gone
    longest goes first, and no tenant takes all (gateway/channel_places.py). waiting: instructions that one session may
    leave unacknowledged; the oldest is lost to one more. away_s: a session without a connection is forgotten after it,
    with what waits for it. send_s: an app that takes no frame for so long is gone; nobody else waits for it."""

    heartbeat_s: float = 15.0
    sessions: int = 20_000
    waiting: int = 1_000
    away_s: float = 86_400.0
    send_s: float = SEND_S


@frozen
class Desired:
    """What apps shall use: `target` for `auto`, `model` where none is named; empty leaves it as it is."""

    target: str = ""
    model: str = ""
    reason: str = ""


@define(eq=False)
class _Session:
    caller: Caller
    id: str
    outbox: Outbox
    hello: Hello
    heard_s: float
    received: int = 0
    stream: FrameStream | None = None
    handler: asyncio.Task[None] | None = None
    told: Desired = field(factory=Desired)
    greeted: bool = False

    @property
    def key(self) -> tuple[str, str]:
        return self.caller.tenant, self.id


@frozen
class Connected:
    """A session as others see it. waiting: instructions without an acknowledgement. lost: of those, how many went to
    make room since the app was last told how many."""

    tenant: str
    session: str
    device: str
    engines: tuple[str, ...]
    models: tuple[str, ...]
    connected: bool
    waiting: int
    lost: int = 0


def desired_by(policy: Policy) -> Desired:
    """What a policy wants of apps: the side that answers first, and the device's model for `auto`."""
    sides = policy.routing.targets
    if policy.privacy.local_only or CLOUD not in sides:
        target, reason = DEVICE, "policy keeps requests on the device"
    else:
        target = CLOUD if policy.dispatch.start == CLOUD or DEVICE not in sides else DEVICE
        reason = f"policy.dispatch.start = {policy.dispatch.start}"
    return Desired(target, policy.routing.models.get("edge", ""), reason)


class ControlChannel:
    """All methods are for the event loop's thread. `route()` is mounted; start() and stop() frame it."""

    def __init__(
        self,
        keys: KeyRing,
        store: ResultStore,
        desired: Callable[[], Desired],
        clock: Clock,
        settings: ChannelSettings | None = None,
        on_result: OnResult = lambda caller, session, result: None,
        crowd_left: Callable[[], None] = give_back,
    ) -> None:
        self._keys = keys
        self._store = store
        self._desired = desired
        self._clock = clock
        self._settings = settings or ChannelSettings()
        self._on_result = on_result
        self._sessions: SessionPlaces[_Session] = SessionPlaces(self._settings.sessions)
        self._sweeper: asyncio.Task[None] | None = None
        self._crowd_left = crowd_left
        self._ended = self._ended_before = 0
        self.reaped = 0

    def route(self) -> FrameRoute:
        """Where apps connect."""
        return FrameRoute(PATH, self.handle, work=False)

    async def start(self) -> None:
        """Begin to look for connections that fell silent."""
        self._sweeper = asyncio.create_task(self._sweep_on())

    async def stop(self) -> None:
        """Say goodbye to everybody; sessions go on where the next gateway opens the same store."""
        if self._sweeper is not None:
            self._sweeper.cancel()
            await asyncio.wait({self._sweeper})
        bye = write_frame(Bye(reason="the gateway stops"))
        await asyncio.gather(*(self._dismiss(session, bye) for session in self._sessions.all()))
        await self._store.close()

    @property
    def sessions(self) -> Sequence[Connected]:
        """Every session that is remembered here."""
        return [
            Connected(
                s.caller.tenant,
                s.id,
                s.hello.device,
                s.hello.engines,
                s.hello.models,
                s.stream is not None,
                len(s.outbox),
                s.outbox.lost,
            )
            for s in self._sessions.all()
        ]

    async def instruct(self, instruction: Instruction, tenant: str | None = None, session: str | None = None) -> int:
        """Give an instruction to all sessions, to a tenant's, or to one; returns to how many."""
        chosen = [
            one for one in self._sessions.all() if tenant in (None, one.caller.tenant) and session in (None, one.id)
        ]
        await asyncio.gather(*(self._give(one, instruction) for one in chosen))
        return len(chosen)

    async def refresh(self) -> None:
        """The desired state changed: tell every session what is new to it."""
        await asyncio.gather(*(self._tell(session) for session in self._sessions.all() if session.stream is not None))

    async def handle(self, request: Request, stream: FrameStream) -> None:
        """One connection. Returns when it ended; a fault of the app's frames is told to it before that."""
        try:
            caller = self._keys.caller(request.headers, request.remote)
            async with asyncio.timeout(HELLO_S):
                hello = await self._next(stream)
            if not isinstance(hello, Hello):
                raise ProtocolError("the first frame is no hello", field="type")
            session, resumed = await self._attach(caller, hello, stream)
        except (TimeoutError, LinkError):
            return
        except MidstreamError as err:
            with contextlib.suppress(LinkError):
                await stream.send(write_frame(Bye(reason=_told(err))))
            return
        try:
            await self._greet(session, stream, resumed)
            await self._serve(session, stream)
        except LinkError:
            pass
        except MidstreamError as err:
            with contextlib.suppress(LinkError):
                await stream.send(write_frame(Bye(reason=_told(err))))
        finally:
            self._ended += 1
            if session.stream is stream:
                session.stream = session.handler = None
                self._sessions.left(session.key, self._clock())

    async def _dismiss(self, session: _Session, bye: bytes) -> None:
        """End a connection with a goodbye, which its app may not take, or leave at."""
        stream, handler = session.stream, session.handler
        if stream is None or handler is None:
            return
        with contextlib.suppress(LinkError, TimeoutError):
            async with asyncio.timeout(GOODBYE_S):
                await stream.send(bye)
        handler.cancel()

    async def _attach(self, caller: Caller, hello: Hello, stream: FrameStream) -> tuple[_Session, bool]:
        """The session of this hello, on this connection, and whether it was known. An older connection of it ends."""
        received = await self._store.received(caller.tenant, hello.session)
        key = (caller.tenant, hello.session)
        session = self._sessions.get(key)
        resumed = session is not None or received > 0
        if session is None:
            self._sessions.make_room(caller.tenant)
            outbox = Outbox(self._settings.waiting, hello.received)
            session = _Session(caller, hello.session, outbox, hello, self._clock())
        elif session.handler is not None:
            session.handler.cancel()
        self._sessions.connected(key, session)
        session.stream, session.handler = stream, asyncio.current_task()
        session.hello, session.caller, session.heard_s = hello, caller, self._clock()
        session.received = received
        session.told, session.greeted = Desired(), False
        session.outbox.resume(hello.received)
        session.outbox.keep(lambda frame: isinstance(frame, Instruction) and frame.id not in STATES)
        return session, resumed

    async def _greet(self, session: _Session, stream: FrameStream, resumed: bool) -> None:
        """Welcome, what waits, and the present route and model."""
        lost, beat_s = session.outbox.lost, self._settings.heartbeat_s
        welcome = Welcome(received=session.received, heartbeat_s=beat_s, resumed=resumed, lost=lost)
        await stream.send(write_frame(welcome))
        session.outbox.lost -= lost
        sent = 0
        while waiting := session.outbox.numbered(sent):
            for _, frame in waiting:
                await stream.send(frame)
            sent = waiting[-1][0]
        session.greeted = True
        await self._tell(session)

    async def _serve(self, session: _Session, stream: FrameStream) -> None:
        while (frame := await self._next(stream)) is not None:
            session.heard_s = self._clock()
            if isinstance(frame, Result):
                await self._keep(session, stream, frame)
            elif isinstance(frame, Ack):
                session.outbox.acknowledge(frame.seq)
            elif isinstance(frame, Beat):
                await stream.send(write_frame(Beat()))
            elif isinstance(frame, Bye):
                return
            else:
                raise ProtocolError(f"an app sends no {frame.type} here", field="type")

    async def _keep(self, session: _Session, stream: FrameStream, result: Result) -> None:
        before = session.received
        session.received = await self._store.keep(session.caller.tenant, session.id, (result,))
        await stream.send(write_frame(Ack(seq=session.received)))
        if before < result.seq <= session.received:
            self._on_result(session.caller, session.id, result)

    async def _next(self, stream: FrameStream) -> Frame | None:
        """The next frame that is known; None at the end."""
        while (data := await stream.receive()) is not None:
            frame = read_frame(data)
            if frame is not None:
                return frame
        return None

    async def _tell(self, session: _Session) -> None:
        """Route and model, where they differ from what this connection was told."""
        desired = self._desired()
        told, session.told = session.told, desired
        reason = desired.reason[:500]
        if desired.target and desired.target != told.target:
            await self._give(session, Instruction(id=ROUTE, do="route", target=desired.target, reason=reason))
        if desired.model and desired.model != told.model:
            await self._give(session, Instruction(id=SWITCH, do="switch", model=desired.model, reason=reason))

    async def _give(self, session: _Session, instruction: Instruction) -> None:
        """Never refused: the oldest that was not acknowledged is lost to it, and the app is told so when it is back."""
        if len(session.outbox) >= self._settings.waiting:
            session.outbox.drop_first()
        data = session.outbox.put(evolve(instruction, id=instruction.id or uuid.uuid4().hex))
        await self._sent(session, data)

    async def _sent(self, session: _Session, data: bytes) -> None:
        """A connection that takes nothing more is ended; what waits is sent to the next one."""
        stream, handler = session.stream, session.handler
        if stream is None or not session.greeted:  # what comes during the greeting is sent by it, in its turn
            return
        try:
            async with asyncio.timeout(self._settings.send_s):
                await stream.send(data)
        except TimeoutError:
            if handler is not None and session.stream is stream:
                handler.cancel()
        except LinkError:
            pass

    async def _sweep_on(self) -> None:
        while True:
            await asyncio.sleep(self._settings.heartbeat_s / SWEEPS_PER_BEAT)
            self.sweep(self._clock())
            self._tidy()
            await self.refresh()

    def _tidy(self) -> None:
        """Once a crowd has gone and nobody else went since the last look."""
        quiet, self._ended_before = self._ended == self._ended_before, self._ended
        if quiet and self._ended >= CROWD:
            self._ended = self._ended_before = 0
            self._crowd_left()

    def sweep(self, now_s: float) -> int:
        """End connections that fell silent; returns how many. Sessions that were away for too long are forgotten."""
        self._sessions.forget_away(now_s - self._settings.away_s)
        silent = [
            session
            for session in self._sessions.all()
            if session.handler is not None and now_s - session.heard_s > SILENT_BEATS * self._settings.heartbeat_s
        ]
        for session in silent:
            assert session.handler is not None
            session.handler.cancel()
            session.stream = session.handler = None
            if any(_once(data) for data in session.outbox.waiting()):
                self._sessions.left(session.key, now_s)
            else:
                self._sessions.drop(session.key)
        self.reaped += len(silent)
        return len(silent)


def _told(err: MidstreamError) -> str:
    """What an app may know: faults of this machine's disk are its operator's."""
    if isinstance(err, ConfigError):
        log.warning("the control channel cannot keep what apps tell: %s", err)
        return "results cannot be kept here now; connect again later"
    return f"{err.message}; {err.next_step}"[:2000]


def _once(data: bytes) -> bool:
    """Whether this instruction is not told again to whoever comes back."""
    frame = read_frame(data)
    return isinstance(frame, Instruction) and frame.do == "warm"

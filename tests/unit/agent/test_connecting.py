"""The connected track with everything injected: clocks that are wrong, brokers that lie, coordinators that move."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from agent.connecting import Connector, ConnectorPorts, Pauses
from agent.discovery import Candidate
from agent.health import Health
from agent.identity import Enrolment
from agent.last_good import LastGood
from links.port import ClockNotSet, ControlState
from protocol.clock import FakeClock
from protocol.documents import CoordinatorInfo, CoordinatorState
from protocol.errors import LinkError, NotAllowed

ENROLMENT = Enrolment(
    device_id="pi", fleet="f", cert_pem="", ca_pem="", policy_keys={}, coordinator_host="joined", coordinator_port=1,
    broker_host=None, broker_port=8883,
)  # fmt: skip


class FakeSession:
    """A control session that is up or down as the test says."""

    def __init__(self, world: World, where: tuple[str, int]) -> None:
        self.world = world
        self.where = where
        self.state: ControlState = "down"
        self.stopped = False
        self.goodbye = ""
        self.dials = 0

    async def start(self) -> None:
        self.go(self.world.first_state)

    def dial_now(self) -> None:
        self.dials += 1

    async def stop(self, goodbye: str = "offline") -> None:
        self.stopped = True
        self.goodbye = goodbye

    def go(self, state: ControlState) -> None:
        self.state = state
        self.world.connector.on_state(state)


class Data:
    def __init__(self) -> None:
        self.available = False

    def mark_available(self) -> None:
        self.available = True


class World:
    """Where the coordinator is, and what it says when it is tried."""

    def __init__(self, tmp_path: Path, enrolment: Enrolment = ENROLMENT, **ports: object) -> None:
        self.kept: list[Enrolment] = []
        self.real: set[str] = {"joined"}
        self.error: LinkError | None = None
        self.info: CoordinatorInfo | NotAllowed | None = None
        self.first_state: ControlState = "up"
        self.checks: list[str] = []
        self.sessions: list[FakeSession] = []
        self.steps: list[str] = []
        self.pointed: list[str] = []
        self.data = Data()
        self.health = Health(FakeClock())
        self.path = tmp_path / "last_good.json"
        settings: dict[str, object] = {
            "check": self.check, "ask": self.ask, "keep": self.kept.append,
            "sources": (), "open_session": self.open, "point_data": self.point,
            "data": self.data, "step": self.steps.append, "health": self.health, "clock": FakeClock(),
            "last_good": LastGood(self.path), "pauses": Pauses(0.01, 0.05, 0.02),
        } | ports  # fmt: skip
        self.connector = Connector(enrolment, ConnectorPorts(**settings))  # type: ignore[arg-type]

    async def check(self, candidate: Candidate) -> None:
        self.checks.append(candidate.host)
        if self.error is not None:
            raise self.error
        if candidate.host not in self.real:
            raise LinkError("refused")

    def open(self, host: str, port: int) -> FakeSession:
        self.sessions.append(FakeSession(self, (host, port)))
        return self.sessions[-1]

    async def ask(self, found: Candidate) -> CoordinatorInfo | None:
        if isinstance(self.info, NotAllowed):
            raise self.info
        return self.info

    async def point(self, found: Candidate) -> None:
        self.pointed.append(found.host)
        self.data.available = True

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self.connector.run())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def warned(self) -> set[str]:
        return {warning.name for warning in self.health.warnings}


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.005)


async def test_found_connected_and_remembered(tmp_path: Path) -> None:
    world = World(tmp_path)
    async with world.running():
        await until(lambda: "up" in world.steps)
        assert world.sessions[0].where == ("joined", 8883)
        assert world.pointed == ["joined"]
        await asyncio.sleep(0.1)
        assert len(world.checks) == 1, "a connection that is well is left alone"
    assert world.sessions[0].stopped
    remembered = LastGood(world.path).read()
    assert remembered is not None and (remembered.host, remembered.origin) == ("joined", "last_good")


async def test_nothing_there_is_tried_again_and_warned_of_once(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.real = set()
    async with world.running():
        await until(lambda: len(world.checks) >= 4)
        assert world.warned() == {"coordinator"}
        world.real = {"joined"}
        await until(lambda: "up" in world.steps)
        assert world.warned() == set()


async def test_a_clock_that_is_not_set_is_waited_for_and_needs_no_restart(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.error = ClockNotSet("the certificate is not valid at this machine's time")
    async with world.running():
        await until(lambda: "clock" in world.warned() and "clock_wrong" in world.steps)
        assert "up" not in world.steps
        world.error = None
        await until(lambda: "up" in world.steps)
        assert world.warned() == set()


async def test_a_data_link_that_breaks_starts_a_search_and_the_same_place_is_taken_up_again(tmp_path: Path) -> None:
    world = World(tmp_path)
    async with world.running():
        await until(lambda: "up" in world.steps)
        world.data.available = False
        world.connector.on_trouble(LinkError("reset"))
        await until(lambda: world.data.available)
        assert world.pointed == ["joined"], "the link to an unchanged address is kept"
        assert len(world.sessions) == 1


async def test_the_broker_names_a_new_address_and_both_planes_move(tmp_path: Path) -> None:
    world = World(tmp_path)
    async with world.running():
        await until(lambda: "up" in world.steps)
        world.real = {"moved"}
        state = CoordinatorState(addresses=("dead", "moved"), port=2, broker_port=9, fingerprint="", epoch=2)
        world.connector.on_coordinator(state)
        await until(lambda: world.pointed[-1] == "moved")
        await until(lambda: len(world.sessions) == 2)
        assert world.sessions[1].where == ("moved", 9)
        assert world.sessions[0].stopped
        found = world.connector.found
        assert found is not None and found.origin == "broker"


async def test_a_deaf_session_is_replaced(tmp_path: Path) -> None:
    world = World(tmp_path)
    async with world.running():
        await until(lambda: "up" in world.steps)
        world.connector.on_deaf()
        await until(lambda: len(world.sessions) == 2)
        assert world.sessions[0].stopped


async def test_a_broker_of_its_own_is_used_before_the_coordinator_is_found(tmp_path: Path) -> None:
    world = World(tmp_path, fixed_broker=("broker", 8883))
    world.real = set()
    async with world.running():
        await until(lambda: bool(world.sessions))
        assert world.sessions[0].where == ("broker", 8883)
        state = CoordinatorState(addresses=("told",), port=2, broker_port=8883, fingerprint="", epoch=1)
        world.real = {"told"}
        world.connector.on_coordinator(state)
        await until(lambda: world.pointed == ["told"])
        assert len(world.sessions) == 1


async def test_the_coordinator_tells_of_another_broker_and_it_is_remembered(tmp_path: Path) -> None:
    world = World(tmp_path)
    async with world.running():
        await until(lambda: "up" in world.steps)
        world.info = CoordinatorInfo(fleet="f", broker_host="elsewhere", broker_port=8884)
        world.sessions[0].go("down")
        await until(lambda: len(world.sessions) == 2)
        assert world.sessions[1].where == ("elsewhere", 8884)
        world.info = None
        world.sessions[1].go("down")
        await until(lambda: len(world.checks) >= 3)
        assert len(world.sessions) == 2, "a coordinator that cannot say does not lead back"
    (kept,) = world.kept
    again = World(tmp_path, kept)
    again.real = set()
    async with again.running():
        await until(lambda: bool(again.sessions))
        assert again.sessions[0].where == ("elsewhere", 8884), "before the coordinator is found"


async def test_a_broker_that_speaks_tls_now_is_dialled_again(tmp_path: Path) -> None:
    world = World(tmp_path)
    async with world.running():
        await until(lambda: "up" in world.steps)
        world.info = CoordinatorInfo(fleet="f", broker_port=8883, broker_tls=False)
        world.connector.kick("test")
        await until(lambda: len(world.sessions) == 2)
        assert world.kept[-1].broker_tls is False


async def test_a_device_that_is_no_member_any_more_is_told(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.info = NotAllowed("the coordinator refuses this device", next_step="see midstream fleet list")
    async with world.running():
        await until(lambda: "fleet" in world.warned())
        world.info = CoordinatorInfo(fleet="f", broker_port=8883)
        world.connector.kick("test")
        await until(lambda: "fleet" not in world.warned())


async def test_a_broker_that_never_answered_is_named(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.first_state = "down"
    async with world.running():
        await until(lambda: "down" in world.steps)
        (warning,) = world.health.warnings
        assert "joined:8883" in warning.text
        assert "check" in warning.next_step


async def test_a_control_session_that_stays_down_makes_it_search(tmp_path: Path) -> None:
    world = World(tmp_path)
    async with world.running():
        await until(lambda: "up" in world.steps)
        world.sessions[0].go("down")
        await until(lambda: len(world.checks) >= 2)
        assert "control" in world.warned()
        world.sessions[0].go("up")
        await until(lambda: "control" not in world.warned())


async def test_a_coordinator_that_is_back_ends_the_pause_of_a_control_session_that_is_down(tmp_path: Path) -> None:
    world = World(tmp_path)
    async with world.running():
        await until(lambda: "up" in world.steps)
        (session,) = world.sessions
        session.go("down")
        await until(lambda: len(world.checks) >= 3)
        assert session.dials == 0, "searches alone do not set the rate of dialling"
        world.data.available = False
        world.connector.on_trouble(LinkError("reset"))
        await until(lambda: world.data.available)
        await until(lambda: session.dials == 1)


async def test_nothing_is_tried_while_the_host_says_that_there_is_no_network(tmp_path: Path) -> None:
    network = [False]
    world = World(tmp_path, may_search=lambda: network[0])
    async with world.running():
        await asyncio.sleep(0.2)
        assert world.checks == []
        network[0] = True
        world.connector.kick("the network is back")
        await until(lambda: "up" in world.steps)


async def test_a_renewed_session_does_not_make_the_device_look_gone(tmp_path: Path) -> None:
    world = World(tmp_path)
    async with world.running():
        await until(lambda: "up" in world.steps)
        world.connector.renew()
        await until(lambda: len(world.sessions) == 2)
        assert world.sessions[0].goodbye == "online"
        world.connector.goodbye = "sleeping"
    assert world.sessions[1].goodbye == "sleeping"


@pytest.mark.parametrize("state", ["refused", "duplicate"])
async def test_refusal_and_duplicates_are_said_in_words(tmp_path: Path, state: ControlState) -> None:
    world = World(tmp_path)
    async with world.running():
        await until(lambda: "up" in world.steps)
        world.sessions[0].go(state)
        (warning,) = world.health.warnings
        assert "identity" in warning.text or "refuses" in warning.text
        assert warning.next_step


async def test_a_static_address_is_tried_first(tmp_path: Path) -> None:
    async def mdns() -> Sequence[Candidate]:
        return [Candidate("found", 1, "mdns")]

    world = World(tmp_path, static=Candidate("static", 1, "static"), sources=(mdns,))
    world.real = {"static", "found", "joined"}
    async with world.running():
        await until(lambda: bool(world.pointed))
    assert world.pointed == ["static"]


def test_a_damaged_memory_of_the_last_address_is_no_harm(tmp_path: Path) -> None:
    for content in (b"", b"[]", b'{"host": 3}', b'{"host": "a", "port": "b"}'):
        (tmp_path / "l").write_bytes(content)
        assert LastGood(tmp_path / "l").read() is None

"""Joining: one secret, one device, one key; repeats of the same are harmless, everything else is refused clearly."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve, frozen

from cloud_stub.authority import open_authority
from cloud_stub.enrolment import BrokerAddress, Enrolment
from cloud_stub.join_secrets import FAILURES_PER_MINUTE, MAX_OPEN_SECRETS, WINDOW_S, JoinSecrets
from cloud_stub.registry import SqliteRegistry
from protocol.clock import FakeClock, WallTime
from protocol.decode import decode, encode
from protocol.documents import JoinAnswer, JoinRequest
from protocol.errors import Full, NotAllowed, ProtocolError
from tests.unit.cloud_stub.device_side import NOW_S, new_device

LIFE_S = 3600.0


@frozen
class Desk:
    """An enrolment with its parts."""

    enrolment: Enrolment
    secrets: JoinSecrets
    registry: SqliteRegistry
    clock: FakeClock
    now_s: list[float]

    def mint(self) -> str:
        return self.secrets.mint(LIFE_S, self.now_s[0])


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    clock, now_s = FakeClock(), [NOW_S]
    registry = SqliteRegistry(tmp_path / "registry.sqlite")
    secrets = JoinSecrets(tmp_path / "join.json", clock)
    enrolment = Enrolment(
        open_authority(tmp_path, "lab", NOW_S),
        secrets,
        registry,
        lambda: BrokerAddress(None, 8883),
        lambda: WallTime(now_s[0], True),
    )
    return Desk(enrolment, secrets, registry, clock, now_s)


async def test_a_device_joins_once_and_may_repeat(desk: Desk) -> None:
    device, secret = new_device(), desk.mint()
    request = JoinRequest(secret=secret, device_id="pi-1", csr_pem=device.csr_pem)
    answer = decode(JoinAnswer, encode(await desk.enrolment.join(request)), what="answer")
    assert "BEGIN CERTIFICATE" in answer.cert_pem
    assert (answer.fleet, answer.broker_host, answer.broker_port) == ("lab", None, 8883)
    assert all(len(key) == 32 for key in answer.policy_keys.values())
    assert (await desk.enrolment.join(request)).ca_pem == answer.ca_pem, "the reply may have been lost"


async def test_a_used_secret_is_bound_to_device_and_key(desk: Desk) -> None:
    secret = desk.mint()
    await desk.enrolment.join(JoinRequest(secret=secret, device_id="pi-1", csr_pem=new_device().csr_pem))
    with pytest.raises(NotAllowed, match="another device"):
        await desk.enrolment.join(JoinRequest(secret=secret, device_id="pi-2", csr_pem=new_device("pi-2").csr_pem))
    with pytest.raises(NotAllowed, match="another key"):
        await desk.enrolment.join(JoinRequest(secret=secret, device_id="pi-1", csr_pem=new_device().csr_pem))


async def test_an_id_is_not_taken_over_with_a_fresh_secret(desk: Desk) -> None:
    await desk.enrolment.join(JoinRequest(secret=desk.mint(), device_id="pi-1", csr_pem=new_device().csr_pem))
    taken = JoinRequest(secret=desk.mint(), device_id="pi-1", csr_pem=new_device().csr_pem)
    with pytest.raises(NotAllowed, match="another key") as caught:
        await desk.enrolment.join(taken)
    assert "fleet forget pi-1" in caught.value.next_step
    desk.registry.forget("pi-1")
    assert (await desk.enrolment.join(taken)).cert_pem


async def test_revoked_devices_and_reserved_names_stay_out(desk: Desk) -> None:
    device = new_device()
    await desk.enrolment.join(JoinRequest(secret=desk.mint(), device_id="pi-1", csr_pem=device.csr_pem))
    desk.registry.revoke("pi-1")
    with pytest.raises(NotAllowed, match="revoked"):
        await desk.enrolment.join(JoinRequest(secret=desk.mint(), device_id="pi-1", csr_pem=device.csr_pem))
    desk.registry.forget("pi-1")
    with pytest.raises(NotAllowed, match="with this key was revoked"):
        await desk.enrolment.join(JoinRequest(secret=desk.mint(), device_id="pi-1", csr_pem=device.csr_pem))
    anew = JoinRequest(secret=desk.mint(), device_id="pi-1", csr_pem=new_device().csr_pem)
    assert (await desk.enrolment.join(anew)).cert_pem
    own = new_device("coordinator")
    with pytest.raises(NotAllowed, match="taken"):
        await desk.enrolment.join(JoinRequest(secret=desk.mint(), device_id="coordinator", csr_pem=own.csr_pem))


async def test_secrets_expire(desk: Desk) -> None:
    secret = desk.mint()
    desk.now_s[0] += LIFE_S + 1
    with pytest.raises(NotAllowed, match="expired") as caught:
        await desk.enrolment.join(JoinRequest(secret=secret, device_id="pi-1", csr_pem=new_device().csr_pem))
    assert "coordinator token" in caught.value.next_step


async def test_a_refused_request_leaves_the_secret_unused(desk: Desk) -> None:
    secret = desk.mint()
    with pytest.raises(ProtocolError) as caught:
        await desk.enrolment.join(JoinRequest(secret=secret, device_id="pi-1", csr_pem="nonsense"))
    assert caught.value.field == "csr_pem"
    with pytest.raises(ProtocolError) as caught:
        await desk.enrolment.join(JoinRequest(secret=secret, device_id="PI 1", csr_pem=new_device().csr_pem))
    assert caught.value.field == "device_id"
    request = JoinRequest(secret=secret, device_id="pi-1", csr_pem=new_device().csr_pem)
    with pytest.raises(ProtocolError):
        await desk.enrolment.join(evolve(request, schema="midstream.join/2.0"))
    assert (await desk.enrolment.join(request)).cert_pem


async def test_guessing_is_slowed_but_a_right_secret_always_passes(desk: Desk) -> None:
    secret = desk.mint()
    wrong = JoinRequest(secret="guess", device_id="pi-1", csr_pem="x")
    for _ in range(FAILURES_PER_MINUTE):
        with pytest.raises(NotAllowed):
            await desk.enrolment.join(wrong)
    with pytest.raises(Full) as caught:
        await desk.enrolment.join(wrong)
    assert 0 < caught.value.retry_after_s <= WINDOW_S
    assert (
        await desk.enrolment.join(JoinRequest(secret=secret, device_id="pi-1", csr_pem=new_device().csr_pem))
    ).cert_pem
    desk.clock.advance(WINDOW_S + 1)
    with pytest.raises(NotAllowed):
        await desk.enrolment.join(wrong)


def test_secrets_survive_a_restart_hashed_and_bounded(tmp_path: Path) -> None:
    path = tmp_path / "join.json"
    secrets = JoinSecrets(path, FakeClock())
    made = [secrets.mint(LIFE_S, NOW_S) for _ in range(MAX_OPEN_SECRETS + 3)]
    again = JoinSecrets(path, FakeClock())
    for secret in made[3:]:
        assert again.check(secret, "pi-1", NOW_S).device_id == ""
    assert not any(secret.encode() in path.read_bytes() for secret in made)
    with pytest.raises(NotAllowed):
        again.check(made[0], "pi-1", NOW_S)


async def test_joins_at_the_same_time_leave_the_secret_with_one_and_the_loop_free(desk: Desk) -> None:
    secret, ticks = desk.mint(), 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0)

    requests = [JoinRequest(secret=secret, device_id="pi-1", csr_pem=new_device().csr_pem) for _ in range(4)]
    ticking = asyncio.create_task(tick())
    found = await asyncio.gather(*(desk.enrolment.join(request) for request in requests), return_exceptions=True)
    ticking.cancel()
    assert [type(answer) for answer in found].count(JoinAnswer) == 1
    assert all(isinstance(answer, JoinAnswer | NotAllowed) for answer in found)
    assert ticks > 4 * len(requests), "the loop ran while threads wrote and signed"


async def test_a_join_whose_caller_left_binds_the_secret_once(desk: Desk) -> None:
    """Its thread goes on while the next join already waits for the secret."""
    secret, first, second = desk.mint(), new_device(), new_device()
    with desk.secrets._one_at_a_time:
        left = asyncio.create_task(
            desk.enrolment.join(JoinRequest(secret=secret, device_id="pi-1", csr_pem=first.csr_pem))
        )
        await asyncio.sleep(0.05)
        left.cancel()
        await asyncio.gather(left, return_exceptions=True)
    record = await asyncio.to_thread(desk.secrets.check, secret, "pi-1", NOW_S)
    await asyncio.to_thread(desk.secrets.redeem, record, "pi-1", "first")
    with pytest.raises(NotAllowed, match="another key"):
        await asyncio.to_thread(desk.secrets.redeem, record, "pi-1", "second")
    with pytest.raises(NotAllowed, match="another key"):
        await desk.enrolment.join(JoinRequest(secret=secret, device_id="pi-1", csr_pem=second.csr_pem))


class SlowlySigning(Enrolment):
    """Signs when it is told to."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.signing, self.go_on = threading.Event(), threading.Event()

    def _issue(self, *parts: Any) -> str:
        self.signing.set()
        assert self.go_on.wait(5)
        return super()._issue(*parts)


async def test_a_device_that_is_revoked_while_its_certificate_is_signed_stays_out(desk: Desk) -> None:
    device, plain = new_device(), desk.enrolment
    await desk.enrolment.join(JoinRequest(secret=desk.mint(), device_id="pi-1", csr_pem=device.csr_pem))
    slow = SlowlySigning(plain._authority, desk.secrets, desk.registry, plain._broker, plain._wall)
    again = JoinRequest(secret=desk.mint(), device_id="pi-1", csr_pem=device.csr_pem)
    joining = asyncio.create_task(slow.join(again))
    assert await asyncio.to_thread(slow.signing.wait, 5)
    desk.registry.revoke("pi-1")
    slow.go_on.set()
    with pytest.raises(NotAllowed, match="revoked"):
        await joining
    known = desk.registry.device("pi-1")
    assert known is not None and known.revoked

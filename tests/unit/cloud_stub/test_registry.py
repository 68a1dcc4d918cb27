"""The registry: presence by epoch, survival, damage, bounds."""

from __future__ import annotations

import sqlite3
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from attrs import evolve

from cloud_stub.registry import Counts, PublishedPolicy, SqliteRegistry, open_registry, summary, supersedes
from protocol.device import DeviceProfile
from protocol.documents import Presence, Registration, Reported
from protocol.errors import ConfigError

NOW_S = 1_800_000_000.0


def birth(epoch: int, state: str = "online") -> Presence:
    return Presence(s=state, epoch=epoch, boot=f"b{epoch}")  # type: ignore[arg-type]


def registration(device_id: str = "pi-1", **labels: str) -> Registration:
    return Registration(profile=DeviceProfile(device_id=device_id, labels=labels, cores=4), epoch=1, models=("det",))


def test_a_will_that_was_overtaken_by_the_next_birth_is_dropped(tmp_path: Path) -> None:
    registry = SqliteRegistry(tmp_path / "r.sqlite")
    assert registry.note_presence("pi-1", birth(7), NOW_S)
    assert registry.note_presence("pi-1", birth(8), NOW_S)
    assert not registry.note_presence("pi-1", birth(7, "offline"), NOW_S), "the will of the session before"
    device = registry.device("pi-1")
    assert device is not None and device.online
    assert registry.note_presence("pi-1", birth(8, "offline"), NOW_S)
    device = registry.device("pi-1")
    assert device is not None and not device.online
    assert registry.counts() == Counts(1, 0)
    assert registry.note_presence("pi-1", birth(9, "sleeping"), NOW_S)
    registry.close()


@pytest.mark.parametrize(
    ("held", "incoming", "taken"),
    [
        (None, birth(1), True),
        (birth(2), birth(1), False),
        (birth(2), birth(2, "offline"), True),
        (birth(2), birth(3), True),
    ],
)
def test_presence_rule(held: Presence | None, incoming: Presence, taken: bool) -> None:
    assert supersedes(incoming, held) is taken


def test_everything_survives_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "r.sqlite"
    registry = SqliteRegistry(path)
    registry.enrol("pi-1", "k" * 64, NOW_S)
    registry.note_presence("pi-1", birth(1), NOW_S)
    assert registry.note_registration("pi-1", registration(room="kitchen"), NOW_S)
    assert not registry.note_registration("pi-1", registration(room="kitchen"), NOW_S), "nothing new"
    registry.note_reported("pi-1", Reported(version=3, epoch=1, accepted=True, code="accepted", held_version=3), NOW_S)
    registry.close()
    again = open_registry(path)
    assert not again.fresh
    (device,) = again.registry.devices()
    assert device.labels == {"room": "kitchen"}
    assert again.registry.labels() == {"pi-1": {"room": "kitchen"}}
    assert again.registry.ids() == ["pi-1"]
    assert again.registry.counts() == Counts(1, 1)
    assert again.registry.may_enter("pi-1", "k" * 64) and again.registry.may_enter("pi-9", "x" * 64)
    line = summary(device, NOW_S + 5)
    assert (line["state"], line["policy"], line["cores"], line["seen_before_s"]) == ("online", 3, 4, 5.0)
    assert again.registry.revoke("pi-1") and not again.registry.revoke("pi-9")
    assert not again.registry.may_enter("pi-1", "k" * 64)
    assert summary(again.registry.devices()[0], NOW_S)["state"] == "revoked"
    assert again.registry.forget("pi-1") and again.registry.device("pi-1") is None
    again.registry.close()


@pytest.mark.parametrize("damage", [b"garbage" * 100, b"SQLite format 3\0" + b"\xff" * 4080])
def test_a_damaged_file_is_moved_aside_and_a_new_one_begun(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "r.sqlite"
    path.write_bytes(damage)
    opened = open_registry(path)
    assert opened.fresh
    assert opened.moved_to is not None and opened.moved_to.read_bytes() == damage
    assert opened.registry.note_presence("pi-1", birth(1), NOW_S), "devices are born again into it"
    opened.registry.close()
    path.write_bytes(damage)
    for side in ("-wal", "-shm"):
        path.with_name(path.name + side).unlink(missing_ok=True)
    second = open_registry(path)
    assert second.moved_to is not None and second.moved_to != opened.moved_to
    second.registry.close()


def test_a_newer_file_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "r.sqlite"
    SqliteRegistry(path).close()
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version=99")
    db.close()
    with pytest.raises(ConfigError, match="newer release"):
        open_registry(path)
    assert path.exists()


def test_a_full_disk_is_told_and_nothing_is_half_written(tmp_path: Path) -> None:
    registry = SqliteRegistry(tmp_path / "r.sqlite")
    registry.note_presence("pi-1", birth(1), NOW_S)
    pages = registry._db.execute("PRAGMA page_count").fetchone()[0]
    registry._db.execute(f"PRAGMA max_page_count={pages}")
    big = evolve(registration(), models=tuple(f"model-{n}" for n in range(4000)))
    with pytest.raises(ConfigError, match="full") as caught:
        registry.note_registration("pi-1", big, NOW_S)
    assert "free some space" in caught.value.next_step
    device = registry.device("pi-1")
    assert device is not None and device.registration is None and device.online
    registry.close()


def test_policy_history_is_newest_first(tmp_path: Path) -> None:
    registry = SqliteRegistry(tmp_path / "r.sqlite")
    for epoch, version in ((1, 1), (1, 2), (2, 1)):
        registry.add_policy(PublishedPolicy(epoch, version, NOW_S, "", b"{}"))
    assert [(p.epoch, p.version) for p in registry.policies()] == [(2, 1), (1, 2), (1, 1)]
    with pytest.raises(ConfigError):
        registry.add_policy(PublishedPolicy(2, 1, NOW_S, "", b"{}"))
    registry.close()


def test_checkpoints_run_beside_readers_and_writers_and_empty_the_log(tmp_path: Path) -> None:
    path = tmp_path / "r.sqlite"
    registry = SqliteRegistry(path)
    try:
        main_bytes = path.read_bytes()
        for number in range(300):
            registry.note_presence(f"pi-{number}", birth(number), 1.0)
        assert path.read_bytes() == main_bytes, "writes go to the log alone"
        with ThreadPoolExecutor(1) as thread:
            ended = thread.submit(registry.checkpoint)
            registry.note_presence("pi-last", birth(1), 2.0)
            ended.result(10)
        assert path.read_bytes() != main_bytes
        assert registry.counts().devices == 301
    finally:
        registry.close()
    again = SqliteRegistry(path)
    assert again.counts().online == 301
    again.close()


def test_forgetting_leaves_no_certificate_valid(tmp_path: Path) -> None:
    path = tmp_path / "r.sqlite"
    registry = SqliteRegistry(path)
    assert registry.may_enter("pi-9", "k" * 64), "certificates outlive a lost registry"
    registry.enrol("pi-1", "a" * 64, NOW_S)
    assert registry.may_enter("pi-1", "a" * 64)
    assert not registry.may_enter("pi-1", "b" * 64)
    assert not registry.may_enter("pi-1", None)
    assert registry.forget("pi-1")
    assert not registry.may_enter("pi-1", "a" * 64)
    assert registry.note_presence("pi-1", birth(9, "offline"), NOW_S)
    assert registry.ids() == [], "the will of its last session does not bring it back"
    registry.enrol("pi-1", "b" * 64, NOW_S)
    assert registry.may_enter("pi-1", "b" * 64)
    assert not registry.may_enter("pi-1", "a" * 64)
    registry.revoke("pi-1")
    registry.forget("pi-1")
    registry.enrol("pi-1", "c" * 64, NOW_S)
    registry.close()
    again = SqliteRegistry(path)
    assert again.was_revoked("b" * 64) and not again.was_revoked("a" * 64)
    assert [again.may_enter("pi-1", key * 64) for key in "abc"] == [False, False, True]
    again.close()

"""Policy in the agent: accepted, bounded, kept, swapped; refused documents change nothing and are reported."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from attrs import evolve

from agent.apply import Queueing, apply, set_log_level, set_wait_target
from agent.bounds import changed_sections, clamp
from agent.config import PolicyBounds
from agent.policy import PolicyHolder, PolicyPorts
from protocol.clock import WallTime
from protocol.decode import encode
from protocol.errors import ConfigError
from protocol.events import PolicyJudged, RecordingEmit
from protocol.policy import EnginesPolicy, LimitsPolicy, Policy, PrivacyPolicy, SplitPolicy
from protocol.signature import encode_envelope, key_id_of, public_key, sign

SEED = bytes(range(32))
OTHER_SEED = bytes(32)
KEY_ID = key_id_of(public_key(SEED))
NOW_S = 1_800_000_000.0


def signed(policy: Policy, seed: bytes = SEED) -> bytes:
    return encode_envelope(sign(encode(policy), seed, KEY_ID))


def policy(version: int, epoch: int = 1) -> Policy:
    return Policy(fleet="f", epoch=epoch, version=version, split=SplitPolicy(periods=version + 1))


def holder(
    tmp_path: Path, bounds: PolicyBounds | None = None, *, trusted: bool = True, emit: RecordingEmit | None = None
) -> PolicyHolder:
    ports = PolicyPorts(
        keys={KEY_ID: public_key(SEED)},
        labels={"fleet": "f"},
        bounds=bounds or PolicyBounds(),
        wall=lambda: WallTime(NOW_S, trusted),
        clock=lambda: 0.0,
        emit=emit or RecordingEmit(),
        actions={},
    )
    return PolicyHolder(tmp_path / "policy.json", ports)


async def test_a_good_policy_is_in_force_at_once_and_after_a_restart(tmp_path: Path) -> None:
    emit = RecordingEmit()
    held = holder(tmp_path, emit=emit)
    reported = await held.consider(signed(policy(3)))
    assert reported is not None
    assert (reported.accepted, reported.version, reported.sections["split"]) == (True, 3, "applied")
    assert held.current().split.periods == 4
    assert [(e.version, e.accepted) for e in emit.events if isinstance(e, PolicyJudged)] == [(3, True)]

    again = holder(tmp_path)
    again.load()
    assert again.current().version == 3
    kept = again.reported()
    assert kept is not None and kept.held_version == 3


async def test_an_older_version_is_refused_and_the_last_good_one_stays(tmp_path: Path) -> None:
    held = holder(tmp_path)
    await held.consider(signed(policy(5)))
    reported = await held.consider(signed(policy(4)))
    assert reported is not None
    assert (reported.accepted, reported.code, reported.held_version) == (False, "older_version", 5)
    assert held.current().version == 5


async def test_a_forged_policy_is_refused(tmp_path: Path) -> None:
    held = holder(tmp_path)
    reported = await held.consider(signed(policy(9), OTHER_SEED))
    assert reported is not None
    assert (reported.accepted, reported.code) == (False, "bad_signature")
    assert held.current() == Policy()
    assert not (tmp_path / "policy.json").exists()


@pytest.mark.parametrize("payload", [b"{}", b"\xff", b"[" * 5000, b'{"payload":"!","key_id":"","signature":""}'])
async def test_garbage_is_malformed_and_harmless(tmp_path: Path, payload: bytes) -> None:
    held = holder(tmp_path)
    reported = await held.consider(payload)
    assert reported is not None and reported.code in ("malformed", "unknown_key")
    assert held.current() == Policy()


async def test_the_same_document_is_judged_once(tmp_path: Path) -> None:
    held = holder(tmp_path)
    payload = signed(policy(1))
    assert await held.consider(payload) is not None
    before = (tmp_path / "policy.json").stat().st_mtime_ns
    assert await held.consider(payload) is None
    assert (tmp_path / "policy.json").stat().st_mtime_ns == before


async def test_without_a_clock_dates_do_not_refuse_and_the_report_says_so(tmp_path: Path) -> None:
    held = holder(tmp_path, trusted=False)
    reported = await held.consider(signed(evolve(policy(2), not_before_s=NOW_S + 10_000)))
    assert reported is not None
    assert (reported.accepted, reported.code) == (True, "accepted_clock_untrusted")


async def test_a_torn_file_falls_back_to_the_policy_before(tmp_path: Path) -> None:
    held = holder(tmp_path)
    await held.consider(signed(policy(1)))
    await held.consider(signed(policy(2)))
    (tmp_path / "policy.json").write_bytes(b'{"payl')
    again = holder(tmp_path)
    again.load()
    assert again.current().version == 1


async def test_a_kept_policy_of_another_key_is_not_taken_up(tmp_path: Path) -> None:
    (tmp_path / "policy.json").write_bytes(signed(policy(7), OTHER_SEED))
    held = holder(tmp_path)
    held.load()
    assert held.current().version == 0


async def test_a_disk_that_takes_nothing_keeps_the_old_policy_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "policy.json").mkdir()
    held = holder(tmp_path)
    reported = await held.consider(signed(policy(1)))
    assert reported is not None
    assert (reported.accepted, reported.code) == (False, "not_kept")
    assert held.current().version == 0
    (tmp_path / "policy.json").rmdir()
    again = await held.consider(signed(policy(1)))
    assert again is not None and again.accepted


def test_bounds_only_tighten() -> None:
    bounds = PolicyBounds(allow_raw_input=False, allow_cloud_text=False, max_answer_tokens=10, wait_target_s=0.5)
    strict, clamped = clamp(Policy(), bounds)
    assert not strict.split.raw_input_leaves
    assert strict.privacy.local_only
    assert (strict.limits.max_answer_tokens, strict.engines.wait_target_s) == (10, 0.5)
    assert set(clamped) == {"split", "privacy", "limits", "engines"}
    asked = Policy(limits=LimitsPolicy(max_answer_tokens=5), privacy=PrivacyPolicy(local_only=True))
    assert clamp(asked, PolicyBounds(max_answer_tokens=10))[0].limits.max_answer_tokens == 5
    assert clamp(asked, PolicyBounds())[0] == asked


async def test_clamped_sections_are_reported_as_clamped(tmp_path: Path) -> None:
    held = holder(tmp_path, PolicyBounds(max_answer_tokens=10))
    reported = await held.consider(signed(evolve(policy(1), limits=LimitsPolicy(max_answer_tokens=99))))
    assert reported is not None
    assert reported.sections["limits"] == "clamped: max_answer_tokens = 10"
    assert held.current().limits.max_answer_tokens == 10


def test_a_failing_section_holds_up_no_other() -> None:
    def refuse(new: Policy) -> None:
        raise ConfigError("cannot")

    new = Policy(limits=LimitsPolicy(max_answer_tokens=1), log_level="debug")
    reported = apply(Policy(), new, {"limits": refuse, "log_level": set_log_level})
    assert reported == {"limits": "failed: cannot", "log_level": "applied"}
    assert logging.getLogger("midstream").level == logging.DEBUG
    set_log_level(Policy())
    assert changed_sections(Policy(), new) == ("limits", "log_level")


class Followed:
    """A part with queues."""

    def __init__(self) -> None:
        self.wait_targets_s: list[float] = []

    def set_wait_target(self, seconds: float) -> None:
        self.wait_targets_s.append(seconds)


def test_a_new_wait_target_reaches_every_part_that_queues() -> None:
    parts: list[Queueing] = []
    action = set_wait_target(parts)
    action(Policy())
    first, second = Followed(), Followed()
    parts += [first, second]
    new = Policy(engines=EnginesPolicy(wait_target_s=0.25))
    assert apply(Policy(), new, {"engines": action}) == {"engines": "applied"}
    assert first.wait_targets_s == second.wait_targets_s == [0.25]


async def test_what_is_clamped_is_still_told_after_a_restart(tmp_path: Path) -> None:
    bounds = PolicyBounds(max_answer_tokens=10)
    await holder(tmp_path, bounds).consider(signed(evolve(policy(1), limits=LimitsPolicy(max_answer_tokens=99))))
    again = holder(tmp_path, bounds)
    again.load()
    kept = again.reported()
    assert kept is not None
    assert (kept.code, kept.sections["limits"]) == ("kept", "clamped: max_answer_tokens = 10")

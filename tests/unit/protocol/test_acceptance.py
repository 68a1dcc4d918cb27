"""Which policy documents take effect."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import evolve

from protocol.acceptance import CLOCK_SKEW_S, Refused, Verdict, accept, check_ranges, judge
from protocol.clock import WallTime
from protocol.decode import encode, plain
from protocol.errors import ProtocolError
from protocol.policy import Policy, SplitPolicy
from protocol.signature import Envelope, public_key, sign

SEED = bytes(range(32))
KEYS = {"k1": public_key(SEED)}
NOW = WallTime(2_000_000_000.0, trusted=True)
UNSET = WallTime(3600.0, trusted=False)
HELD = Policy(fleet="f", epoch=2, version=5)


def signed(document: Policy | dict[str, Any] | bytes) -> Envelope:
    payload = document if isinstance(document, bytes) else encode(document)
    return sign(payload, SEED, "k1")


def judged(
    document: Policy | dict[str, Any] | bytes,
    held: Policy | None = None,
    now: WallTime = NOW,
    labels: dict[str, str] | None = None,
    fleet: str | None = "f",
) -> Verdict | Refused:
    return judge(signed(document), held, KEYS, labels or {}, now, fleet=fleet)


def code(verdict: Verdict | Refused) -> str:
    return verdict.code


def test_a_genuine_newer_document_takes_effect() -> None:
    policy = evolve(HELD, version=6, log_level="debug")
    assert accept(signed(policy), HELD, KEYS, {}, NOW, fleet="f") == policy
    assert code(judged(policy, HELD)) == "accepted"


def test_forged_documents_do_not() -> None:
    envelope = signed(HELD)
    changed = evolve(envelope, payload=envelope.payload.replace(b'"info"', b'"debug"'))
    for bad in (changed, evolve(envelope, signature=bytes(64)), evolve(envelope, signature=b"")):
        found = judge(bad, None, KEYS, {}, NOW)
        assert isinstance(found, Refused)
        assert found.code == "bad_signature"


def test_a_key_nobody_knows() -> None:
    found = accept(sign(encode(HELD), SEED, "k2"), None, KEYS, {}, NOW)
    assert isinstance(found, Refused)
    assert found.code == "unknown_key"


def test_either_of_two_keys_during_a_rotation() -> None:
    second = bytes(32)
    keys = {**KEYS, "k2": public_key(second)}
    assert accept(sign(encode(HELD), second, "k2"), None, keys, {}, NOW) == HELD


@pytest.mark.parametrize(
    ("change", "want"),
    [
        ({"version": 4}, "older_version"),
        ({"epoch": 1, "version": 99}, "older_epoch"),
        ({"log_level": "debug"}, "version_conflict"),
        ({}, "unchanged"),
        ({"version": 6}, "accepted"),
        ({"epoch": 3, "version": 0}, "accepted"),
    ],
)
def test_age_against_what_is_held(change: dict[str, Any], want: str) -> None:
    assert code(judged(evolve(HELD, **change), HELD)) == want


def test_the_same_document_again_changes_nothing() -> None:
    assert accept(signed(HELD), HELD, KEYS, {}, NOW, fleet="f") is HELD


@pytest.mark.parametrize(
    ("fleet", "selector", "want"),
    [
        ("other", {}, "wrong_fleet"),
        ("f", {"room": "lab"}, "accepted"),
        ("f", {"room": "hall"}, "not_selected"),
        ("f", {"room": "lab", "floor": "2"}, "not_selected"),
    ],
)
def test_addressees(fleet: str, selector: dict[str, str], want: str) -> None:
    assert code(judged(Policy(fleet=fleet, selector=selector), labels={"room": "lab"})) == want


def test_the_fleet_may_come_from_the_labels() -> None:
    found = accept(signed(Policy(fleet="f")), None, KEYS, {"fleet": "g"}, NOW)
    assert isinstance(found, Refused)
    assert found.code == "wrong_fleet"


@pytest.mark.parametrize(
    ("not_before", "expires", "want"),
    [
        (0.0, 0.0, "accepted"),
        (0.0, NOW.unix_s + 1, "accepted"),
        (0.0, NOW.unix_s - CLOCK_SKEW_S + 1, "accepted"),
        (0.0, NOW.unix_s - CLOCK_SKEW_S, "expired"),
        (NOW.unix_s + CLOCK_SKEW_S, 0.0, "accepted"),
        (NOW.unix_s + CLOCK_SKEW_S + 1, 0.0, "not_yet_valid"),
    ],
)
def test_validity_in_time(not_before: float, expires: float, want: str) -> None:
    assert code(judged(Policy(fleet="f", not_before_s=not_before, expires_s=expires))) == want


@pytest.mark.parametrize("shown_s", [0.0, 3600.0, NOW.unix_s - 5 * 86_400, 4e9])
def test_an_untrusted_clock_never_denies_validity(shown_s: float) -> None:
    """CL1, CL3: a device that boots in 1970, or five days ago, takes the document and says that it did not check."""
    policy = Policy(fleet="f", not_before_s=NOW.unix_s - 10, expires_s=NOW.unix_s + 10)
    found = judged(policy, now=WallTime(shown_s, trusted=False))
    assert code(found) == "accepted_clock_untrusted"
    assert isinstance(found, Verdict)
    assert found.policy == policy


def test_a_document_is_judged_again_when_the_clock_is_set() -> None:
    """CL1: held since before the clock was set; expiry shows as soon as the time can be trusted, with no restart."""
    policy = Policy(fleet="f", expires_s=NOW.unix_s - 10_000)
    for now in (UNSET, WallTime(4e9, trusted=False)):
        assert code(judged(policy, now=now)) == "accepted_clock_untrusted"
    assert code(judged(policy, now=NOW)) == "expired"
    assert code(judged(Policy(fleet="f"), now=NOW)) == "accepted"


def test_an_untrusted_clock_does_not_weaken_the_other_rules() -> None:
    assert code(judged(evolve(HELD, version=1), HELD, UNSET)) == "older_version"
    assert code(judged(Policy(fleet="g"), now=UNSET)) == "wrong_fleet"


def test_unknown_fields_are_ignored_and_listed() -> None:
    document = {**plain(HELD), "future": 1, "split": {"novel": True}}
    found = judged(document)
    assert isinstance(found, Verdict)
    assert sorted(found.ignored) == ["future", "split.novel"]
    assert found.policy.split == SplitPolicy()


@pytest.mark.parametrize("name", ["future", "split.novel", "split.ratio.x", "version.x", ""])
def test_what_is_critical_must_be_understood(name: str) -> None:
    found = judged({**plain(HELD), "critical": [name]})
    assert code(found) == "critical_unknown"


def test_critical_fields_that_are_understood() -> None:
    assert code(judged(evolve(HELD, critical=("split", "split.ratio", "privacy.local_only")))) == "accepted"


@pytest.mark.parametrize(
    "document",
    [
        b"", b"[]", b"{}", b"\xff", b'{"schema":1}', b'{"schema":"midstream.policy/1.0","version":"x"}',
        b'{"schema":"midstream.policy/1.0","split":{"ratio":-1}}', b'{"schema":"midstream.policy/1.0","version":-1}',
        b'{"schema":"midstream.policy/1.0","split":{"objective":{"luck":1}}}', b" " * 70_000,
        b'{"schema":"midstream.policy/1.0","critical":"split"}',
    ],
)  # fmt: skip
def test_signed_garbage_is_malformed(document: bytes) -> None:
    assert code(judged(document)) == "malformed"


@pytest.mark.parametrize(
    ("schema", "want"),
    [("midstream.policy/1.9", "accepted"), ("midstream.policy/2.0", "schema"), ("other/1.0", "schema")],
)
def test_schemas(schema: str, want: str) -> None:
    assert code(judged({**plain(HELD), "schema": schema})) == want


def test_ranges_name_the_field() -> None:
    check_ranges(Policy())
    with pytest.raises(ProtocolError) as caught:
        check_ranges(Policy(split=SplitPolicy(periods=0)))
    assert caught.value.field == "split.periods"

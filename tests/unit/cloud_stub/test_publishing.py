"""Policy files: strict, numbered, signed, chosen by labels, rolled back."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from cloud_stub.authority import open_authority
from cloud_stub.publishing import MAX_POLICY_BYTES, Publisher, as_document, compile_policy
from cloud_stub.registry import PublishedPolicy, SqliteRegistry
from protocol.acceptance import Refused, accept
from protocol.clock import WallTime
from protocol.decode import decode
from protocol.errors import BadRequest, ConfigError, NotFound, TooLarge
from protocol.policy import Policy, SplitPolicy
from protocol.signature import Envelope

NOW_S = 1_800_000_000.0
NOW = WallTime(NOW_S, True)


@pytest.fixture
def publisher(tmp_path: Path) -> Iterator[Publisher]:
    registry = SqliteRegistry(tmp_path / "r.sqlite")
    yield Publisher(open_authority(tmp_path / "s", "lab", NOW_S), registry, lambda: NOW)
    registry.close()


def test_a_device_accepts_what_is_published(publisher: Publisher) -> None:
    first = publisher.publish(b"[split]\nratio = 0.4\n", "toml", "slower")
    second = publisher.publish(b'{"migration": {"enabled": false}}', "json")
    keys = publisher._authority.policy_keys
    held: Policy | None = None
    for published in (first, second):
        envelope = decode(Envelope, published.record.envelope, what="envelope")
        judged = accept(envelope, held, keys, {}, NOW, fleet="lab")
        assert isinstance(judged, Policy), judged
        held = judged
    assert held is not None
    assert (held.version, held.split.ratio, held.migration.enabled) == (2, SplitPolicy().ratio, False), (
        "documents are whole"
    )
    older = accept(decode(Envelope, first.record.envelope, what="envelope"), held, keys, {}, NOW)
    assert isinstance(older, Refused) and older.code == "older_version"
    assert as_document(first)["note"] == "slower"


def test_rollback_is_a_new_version_with_the_old_content(publisher: Publisher) -> None:
    publisher.publish(b"[split]\nperiods = 5\n", "toml")
    publisher.publish(b"[split]\nperiods = 9\n", "toml")
    back = publisher.rollback(1)
    assert (back.policy.version, back.policy.split.periods) == (3, 5)
    assert [p.policy.version for p in publisher.history()] == [3, 2, 1]
    assert publisher.version(2).policy.split.periods == 9
    with pytest.raises(NotFound):
        publisher.rollback(17)


def test_devices_get_the_newest_that_selects_them(publisher: Publisher) -> None:
    assert publisher.desired({}) is None
    publisher.publish(b"", "toml")
    publisher.publish(b'[selector]\nroom = "kitchen"\n', "toml")
    everyone, kitchen = publisher.desired({"room": "hall"}), publisher.desired({"room": "kitchen", "site": "a"})
    assert everyone is not None and everyone.policy.version == 1
    assert kitchen is not None and kitchen.policy.version == 2


class CountingRegistry(SqliteRegistry):
    """Counts how often the whole history is read."""

    reads = 0

    def policies(self) -> Sequence[PublishedPolicy]:
        self.reads += 1
        return super().policies()


def test_the_history_is_read_and_decoded_once_after_each_change(tmp_path: Path) -> None:
    registry = CountingRegistry(tmp_path / "r.sqlite")
    publisher = Publisher(open_authority(tmp_path / "s", "lab", NOW_S), registry, lambda: NOW)
    for number in range(1, 4):
        assert publisher.publish(f"[split]\nperiods = {number}\n".encode(), "toml").policy.version == number
    assert registry.reads == 0, "numbering reads no documents"
    found = [publisher.desired({}) for _ in range(5)]
    assert registry.reads == 1
    assert found[0] is not None and found[0].policy.split.periods == 3
    assert all(one is found[0] for one in found)
    assert [p.policy.version for p in publisher.history()] == [3, 2, 1]
    publisher.rollback(1)
    changed = publisher.desired({})
    assert changed is not None and (changed.policy.version, changed.policy.split.periods) == (4, 1)
    assert publisher.version(3) is found[0]
    assert registry.reads == 2
    registry.close()


def test_a_document_that_was_not_kept_is_not_desired(tmp_path: Path) -> None:
    registry = SqliteRegistry(tmp_path / "r.sqlite")
    publisher = Publisher(open_authority(tmp_path / "s", "lab", NOW_S), registry, lambda: NOW)
    publisher.publish(b"", "toml")
    registry._db.execute("PRAGMA query_only=1")
    with pytest.raises(ConfigError):
        publisher.publish(b"[split]\nperiods = 9\n", "toml")
    desired = publisher.desired({})
    assert desired is not None and desired.policy.version == 1
    registry.close()


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("[split]\nratoi = 0.3\n", "split.ratoi"),
        ("[split]\nratio = true\n", "split.ratio"),
        ("[split]\nratio = -1.0\n", "split.ratio"),
        ("[split]\ncodecs = []\n", "split.codecs"),
        ("[split.objective]\nhappiness = 1.0\n", "split.objective"),
        ('[dispatch]\nstart = "moon"\n', "dispatch.start"),
        ("[limits]\nmax_answer_tokens = 0\n", "limits.max_answer_tokens"),
        ("version = 7\n", "version"),
        ('fleet = "other"\n', "fleet"),
        ("expires_s = 1.0\n", "expires_s"),
        ("not_before_s = 1900000000.0\nexpires_s = 1850000000.0\n", "not_before_s"),
        ('log_level = "loud"\n', "log_level"),
    ],
)
def test_mistakes_name_the_field_and_publish_nothing(publisher: Publisher, text: str, field: str) -> None:
    with pytest.raises(BadRequest) as caught:
        publisher.publish(text.encode(), "toml")
    assert caught.value.field == field
    assert publisher.history() == []


@pytest.mark.parametrize("data", [b"\xff\xfe", b"= 1", b"[", b"[split]\n[split]\n"])
def test_broken_files_are_refused(data: bytes) -> None:
    with pytest.raises(BadRequest, match="TOML"):
        compile_policy(data, "toml")


def test_json_is_as_strict() -> None:
    for data in (b"[]", b"{", b'{"split": []}', b'{"split": {"ratio": NaN}}'):
        with pytest.raises(BadRequest):
            compile_policy(data, "json")
    with pytest.raises(TooLarge):
        compile_policy(b" " * (MAX_POLICY_BYTES + 1), "json")


def test_numbers_go_on_after_a_restart_and_anew_with_a_new_history(tmp_path: Path) -> None:
    registry = SqliteRegistry(tmp_path / "r.sqlite")
    authority = open_authority(tmp_path / "s", "lab", NOW_S)
    first = Publisher(authority, registry, lambda: NOW).publish(b"", "toml")
    registry.close()
    registry = SqliteRegistry(tmp_path / "r.sqlite")
    assert Publisher(authority, registry, lambda: NOW).publish(b"", "toml").policy.version == 2
    registry.close()
    lost = SqliteRegistry(tmp_path / "new.sqlite")
    anew = Publisher(authority.with_new_history(NOW_S + 1), lost, lambda: NOW).publish(b"", "toml")
    assert anew.policy.version == 1 and anew.policy.epoch > first.policy.epoch
    assert json.loads(anew.record.envelope)["key_id"] == authority.policy_key.key_id
    lost.close()


@pytest.mark.parametrize("page", ["policy.md", "operators-guide.md"])
def test_the_documented_policies_are_taken(publisher: Publisher, page: str) -> None:
    text = (Path(__file__).resolve().parents[3] / "docs" / page).read_text(encoding="utf-8")
    examples = [block for block in re.findall(r"```toml\n(.*?)```", text, re.S) if "raw_input_leaves" in block]
    assert len(examples) == 1
    published = publisher.publish(examples[0].encode(), "toml", "")
    assert published.policy.selector == ({} if page == "policy.md" else {"room": "kitchen"})

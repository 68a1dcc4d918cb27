"""Documents on topics: round trips, and the size a topic allows."""

from __future__ import annotations

from typing import Any

import pytest

from protocol.decode import check_schema, decode, encode
from protocol.device import PROFILE_SCHEMA, DeviceProfile, Measured
from protocol.documents import (
    CoordinatorState,
    JoinAnswer,
    JoinRequest,
    Presence,
    Registration,
    Reported,
    Telemetry,
)
from protocol.errors import ProtocolError

PROFILE = DeviceProfile(
    device_id="pi-5",
    labels={"room": "lab"},
    soc="Raspberry Pi 5 Model B Rev 1.0",
    cores=4,
    cpu_features=frozenset({"asimddp", "atomics"}),
    memory_bytes=8 << 30,
    page_bytes=16384,
    os="Debian GNU/Linux 12 (bookworm)",
    engines={"onnx": "1.32.0"},
    power=None,
    measured=(
        Measured("d" * 64, "onnx", 4, "whole", 0.1, 0.01),
        Measured("e" * 64, "llama", 3, "decode", 1.0, 0.1, 0.1),
    ),
    key="k" * 32,
)

DOCUMENTS = [
    Presence(s="online", epoch=3, boot="abc", at=1.5),
    CoordinatorState(addresses=("10.0.0.1", "fe80::1"), port=8791, broker_port=8883, fingerprint="ab" * 32, epoch=1),
    Registration(profile=PROFILE, epoch=3, models=("ppocr-v4-det",), endpoints={"oip": "http://127.0.0.1:8790"}),
    Reported(version=4, epoch=1, accepted=False, code="bad_signature", sections={"split": "applied"}, ignored=("x",)),
    Telemetry(kind="load", at=0.0, boot="abc", values={"cpu": 0.5}),
    JoinRequest(secret="s", device_id="pi-5", csr_pem="-----BEGIN"),
    JoinAnswer(cert_pem="a", ca_pem="b", policy_keys={"k": bytes(range(32))}, fleet="f", broker_port=8883),
    PROFILE,
]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda d: type(d).__name__)
def test_documents_come_back(document: Any) -> None:
    data = encode(document)
    found = decode(type(document), data, what="document")
    assert found == document
    check_schema(found.schema, type(document).__attrs_attrs__.schema.default)
    assert len(data) <= 8 << 10


def test_presence_of_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ProtocolError) as caught:
        decode(Presence, b'{"s":"asleep","epoch":1}', what="presence")
    assert caught.value.field == "s"


def test_a_profile_from_a_later_minor_version_is_read() -> None:
    found = decode(DeviceProfile, b'{"device_id":"a","schema":"midstream.profile/1.3","lidar":true}', what="profile")
    check_schema(found.schema, PROFILE_SCHEMA)
    assert found.cores is None


def test_secrets_do_not_show_in_logs() -> None:
    assert "hidden" not in repr(JoinRequest(secret="hidden", device_id="d", csr_pem=""))
    answer = JoinAnswer(cert_pem="", ca_pem="", policy_keys={}, fleet="f", broker_port=1, mqtt_password="hidden")
    assert "hidden" not in repr(answer)

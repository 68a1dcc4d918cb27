"""Signed signals: who signed, about whom, when; and what a description may hold."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from cloud_stub.authority import Authority, ensure_certificates, open_authority
from protocol.certified import Certified, certify, verified
from protocol.decode import decode, encode
from protocol.errors import ConfigError, MidstreamError, NotAllowed, ProtocolError
from protocol.signalling import MAX_CANDIDATES, Signal, check_description, decode_signal, encode_signal
from tests.unit.cloud_stub.device_side import new_device

NOW_S = time.time()
SDP = (
    "v=0\r\nm=application 9 UDP/DTLS/SCTP webrtc-datachannel\r\na=fingerprint:sha-256 AA:BB\r\n"
    "a=candidate:1 1 udp 2130706431 192.0.2.1 4000 typ host\r\n"
)
# Ends of a line for str.splitlines, and for no rule of this format.
HIDDEN_ENDS = ("\x0b", "\x0c", "\x1c", "\x1d", "\x1e", "\x85", "\u2028", "\u2029")
OFFER = Signal(kind="offer", id="0" * 32, device_id="pi", at=NOW_S, sdp=SDP)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    authority = open_authority(tmp_path_factory.mktemp("fleet"), "default", NOW_S)
    ensure_certificates(authority, ["127.0.0.1"], NOW_S)
    return authority


def enrolled(fleet: Authority, name: str = "pi") -> tuple[bytes, str]:
    """Key and certificate of a device of the fleet, PEM."""
    from cloud_stub.certificates import check_request

    device = new_device(name)
    return device.key_pem, fleet.issue(check_request(device.csr_pem, name), NOW_S)


def test_what_a_device_signed_is_read_with_the_certificate_that_proves_it(fleet: Authority) -> None:
    key, cert = enrolled(fleet)
    read = decode_signal(encode_signal(OFFER, key, cert), "pi", "pi", fleet.ca_pem, NOW_S)
    assert read.signal == OFFER
    assert read.certificate_der


def test_the_coordinator_signs_with_its_own_certificate(fleet: Authority) -> None:
    own = fleet.own_file.read_text()
    at = own.index("-----BEGIN CERTIFICATE-----")
    answer = evolve(OFFER, kind="answer")
    document = encode_signal(answer, own[:at].encode(), own[at:])
    assert decode_signal(document, "coordinator", "pi", fleet.ca_pem, NOW_S).signal == answer
    with pytest.raises(NotAllowed):
        decode_signal(document, "pi", "pi", fleet.ca_pem, NOW_S)


def test_another_device_cannot_signal_in_ones_name(fleet: Authority) -> None:
    key, cert = enrolled(fleet, "other")
    with pytest.raises(NotAllowed, match="not of 'pi'"):
        decode_signal(encode_signal(OFFER, key, cert), "pi", "pi", fleet.ca_pem, NOW_S)
    about_another = encode_signal(evolve(OFFER, device_id="pi"), key, cert)
    with pytest.raises(ProtocolError, match="another device"):
        decode_signal(about_another, "other", "other", fleet.ca_pem, NOW_S)


def test_a_certificate_of_another_fleet_or_time_or_key_does_not_hold(fleet: Authority, tmp_path: Path) -> None:
    key, cert = enrolled(fleet)
    stranger = open_authority(tmp_path, "default", NOW_S)
    with pytest.raises(NotAllowed):
        decode_signal(encode_signal(OFFER, key, cert), "pi", "pi", stranger.ca_pem, NOW_S)
    with pytest.raises(NotAllowed, match="not valid now"):
        decode_signal(
            encode_signal(evolve(OFFER, at=0.0), key, cert), "pi", "pi", fleet.ca_pem, NOW_S + 3 * 365 * 86_400
        )
    other_key, _ = enrolled(fleet)
    with pytest.raises(NotAllowed):
        decode_signal(encode_signal(OFFER, other_key, cert), "pi", "pi", fleet.ca_pem, NOW_S)


def test_a_servers_certificate_signs_nothing(fleet: Authority) -> None:
    pair = fleet.server_file.read_text()
    at = pair.index("-----BEGIN CERTIFICATE-----")
    document = encode_signal(OFFER, pair[:at].encode(), pair[at:])
    with pytest.raises(NotAllowed):
        decode_signal(document, "midstream coordinator", "pi", fleet.ca_pem, NOW_S)


def test_an_old_signal_is_refused_and_a_clock_that_is_not_set_is_not_held_against_it(fleet: Authority) -> None:
    key, cert = enrolled(fleet)
    with pytest.raises(NotAllowed, match="ago"):
        decode_signal(encode_signal(evolve(OFFER, at=NOW_S - 1000), key, cert), "pi", "pi", fleet.ca_pem, NOW_S)
    assert decode_signal(encode_signal(evolve(OFFER, at=0.0), key, cert), "pi", "pi", fleet.ca_pem, NOW_S)


def test_a_changed_payload_or_context_is_refused(fleet: Authority) -> None:
    key, cert = enrolled(fleet)
    signed = decode(Certified, encode_signal(OFFER, key, cert), what="signal")
    forged = encode(evolve(signed, payload=signed.payload.replace(b"192.0.2.1", b"192.0.2.2")))
    with pytest.raises(NotAllowed):
        decode_signal(forged, "pi", "pi", fleet.ca_pem, NOW_S)
    with pytest.raises(NotAllowed):
        verified(certify(b"x", b"one use", key, cert), b"another use", fleet.ca_pem, "pi", NOW_S)
    with pytest.raises(ConfigError):
        certify(b"x", b"", b"no key", cert)


@given(st.binary(max_size=300))
def test_noise_is_a_named_error(noise: bytes) -> None:
    with pytest.raises(MidstreamError):
        decode_signal(noise, "pi", "pi", "", NOW_S)


@pytest.mark.parametrize(
    "sdp",
    [
        "",
        SDP + "m=audio 9 UDP/TLS/RTP/SAVPF 0\r\n",
        SDP.replace("a=fingerprint:sha-256 AA:BB\r\n", ""),
        SDP.replace("192.0.2.1", "a1b2.local"),
        SDP.replace(" 4000 ", " 0 "),
        SDP.replace(" 4000 typ host", ""),
        SDP + "a=candidate:1 1 udp 1 192.0.2.1 4000 typ host\r\n" * MAX_CANDIDATES,
        SDP + "a=x" * 10_000,
        *(f"{SDP}a=x{end}a=candidate:1 1 udp 1 a1b2.local 4000 typ host\r\n" for end in HIDDEN_ENDS),
        *(f"{SDP}a=x{end}y\r\n" for end in HIDDEN_ENDS),
        SDP + "\ra=candidate:1 1 udp 1 a1b2.local 4000 typ host\r\n",
        SDP + "a=x\0\r\n",
    ],
)
def test_a_description_of_something_else_is_refused(sdp: str) -> None:
    check_description(SDP)
    with pytest.raises(ProtocolError):
        check_description(sdp)

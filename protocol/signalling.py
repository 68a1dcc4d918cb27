"""How two sides agree on a WebRTC connection over MQTT: one signed offer, one signed answer or refusal.

A description holds the fingerprint of the key that its side will show, so whoever signs the description vouches for the
connection: with the certificate of the fleet that the same side shows over TLS. The broker between them is not trusted.
"""

from __future__ import annotations

import ipaddress
import re
from typing import Literal

from attrs import frozen

from protocol.certified import Certified, certify, verified
from protocol.decode import check_schema, decode, encode
from protocol.errors import NotAllowed, ProtocolError

SIGNAL_SCHEMA = "midstream.signal/1.0"
MAX_SIGNAL_BYTES = 32 << 10
MAX_SDP_CHARS = 12 << 10
"""A description without servers has about a thousand characters, and a hundred more for each candidate."""

MAX_CANDIDATES = 32
LIFE_S = 30.0
"""An offer that is older has nobody waiting for its answer."""

CLOCK_SLACK_S = 300.0
_CONTEXT = b"midstream signal 1\0"
_ID = re.compile(r"[0-9a-f]{32}", re.ASCII)
_CONTROL = re.compile(r"[\x00-\x09\x0b\x0c\x0e-\x1f\x7f-\x9f\u2028\u2029]")
"""All but the ends of lines; some of these end a line for one reader and not for another."""

_MEDIA = re.compile(r"m=application \d+ (UDP|TCP)/DTLS/SCTP webrtc-datachannel", re.ASCII)


@frozen(kw_only=True)
class Signal:
    """One step of a negotiation, the payload of a Certified document.

    id: 32 random hex digits, made by the side that offers, the same in the answer. device_id: the device of the topic.
    at: wall seconds, 0 when unknown. sdp: the whole description, with all candidates. reason, retry_after_s: of a
    refusal.
    """

    kind: Literal["offer", "answer", "refusal"]
    id: str
    device_id: str
    at: float = 0.0
    sdp: str = ""
    reason: str = ""
    retry_after_s: float = 0.0
    schema: str = SIGNAL_SCHEMA


@frozen
class Signed:
    """A signal whose signer was recognised by `certificate_der`."""

    signal: Signal
    certificate_der: bytes


def encode_signal(signal: Signal, key_pem: bytes, cert_pem: str) -> bytes:
    """The signed document. Raises ConfigError for a key that cannot sign."""
    return encode(certify(encode(signal), _CONTEXT, key_pem, cert_pem))


def decode_signal(data: bytes, signer: str, device_id: str, ca_pem: str, now_s: float) -> Signed:
    """Read a signal that `signer` (a certificate's name) must have signed, about `device_id`.

    now_s: trusted wall seconds. Raises ProtocolError, TooLarge, or NotAllowed when the signature or its certificate
    does not hold, or the signal is too old.
    """
    document = decode(Certified, data, what="signal", max_bytes=MAX_SIGNAL_BYTES)
    certificate_der = verified(document, _CONTEXT, ca_pem, signer, now_s)
    signal = decode(Signal, document.payload, what="signal", max_bytes=MAX_SIGNAL_BYTES)
    check_schema(signal.schema, SIGNAL_SCHEMA)
    if signal.device_id != device_id:
        raise ProtocolError("it is another device's", field="device_id")
    if not _ID.fullmatch(signal.id):
        raise ProtocolError("an id has 32 hex digits", field="id")
    if signal.at and abs(now_s - signal.at) > LIFE_S + CLOCK_SLACK_S:
        raise NotAllowed(f"it was made {now_s - signal.at:.0f} s ago", next_step="set both clocks", field="at")
    if signal.kind != "refusal":
        check_description(signal.sdp)
    return Signed(signal, certificate_der)


def check_description(sdp: str) -> None:
    """A description of one data channel section, with a fingerprint, and addresses that are addresses.

    Media would start codecs, and a name (.local) a search of the reader's network. Raises ProtocolError.
    """
    if len(sdp) > MAX_SDP_CHARS:
        raise ProtocolError(
            f"the description has {len(sdp)} characters, at most {MAX_SDP_CHARS} are taken", field="sdp"
        )
    if _CONTROL.search(sdp):
        raise ProtocolError("the description has control characters", field="sdp")
    lines = sdp.splitlines()  # as its reader does
    media = [line for line in lines if line.startswith("m=")]
    if len(media) != 1 or not _MEDIA.fullmatch(media[0]):
        raise ProtocolError("the description is not of one data channel", field="sdp")
    if not any(line.startswith("a=fingerprint:sha-256 ") for line in lines):
        raise ProtocolError("the description has no fingerprint", field="sdp")
    candidates = [line for line in lines if line.startswith("a=candidate:")]
    if len(candidates) > MAX_CANDIDATES:
        raise ProtocolError(f"there are {len(candidates)} candidates, at most {MAX_CANDIDATES} are tried", field="sdp")
    for candidate in candidates:
        _check_candidate(candidate.split(" "))


def _check_candidate(words: list[str]) -> None:
    try:
        ipaddress.ip_address(words[4])
        port = int(words[5])
    except (ValueError, IndexError) as err:
        raise ProtocolError("a candidate is not at an IP address and port", field="sdp") from err
    if not 0 < port < 65536:
        raise ProtocolError("a candidate's port is none", field="sdp")

"""Joining a fleet with a one-time token: compare the CA first, then send the secret, then keep what came back.

Nothing is trusted on first use: the token carries the CA's fingerprint and the policy key. Joining again with the same
token is harmless, for the key stays the same and the coordinator binds the secret to it. Another token of the same
coordinator renews the certificate; a token of another one moves the device only when that is asked for.
"""

from __future__ import annotations

import hashlib
import json
from typing import Literal

from attrs import frozen

from agent.identity import Enrolment, IdentityStore
from links.http import HttpLink
from links.port import Reply
from links.tls import client_context, fetch_peer_certificate, fingerprint
from protocol.decode import check_schema, decode, encode
from protocol.documents import JOIN_SCHEMA, JoinAnswer, JoinRequest
from protocol.errors import ConfigError, LinkError, NotAllowed, ProtocolError
from protocol.trust import JoinToken

JOIN_PATH = "/midstream/v1/join"
JOIN_TIMEOUT_S = 15.0
MAX_ANSWER_BYTES = 64 << 10


async def join(store: IdentityStore, device_id: str, token: JoinToken) -> Enrolment:
    """Enrol with the coordinator that the token names.

    Raises:
        LinkError: it cannot be reached, or it is not the one of the token (nothing secret was sent then).
        NotAllowed: it refused the token.
        ConfigError: the identity folder cannot be written.
        ProtocolError: its answer breaks the rules.
    """
    csr_pem = store.csr(device_id)
    ca_pem = await fetch_peer_certificate(token.host, token.port, token.ca_fingerprint, JOIN_TIMEOUT_S)
    request = JoinRequest(secret=token.secret, device_id=device_id, csr_pem=csr_pem)
    answer = await _ask(token, ca_pem, encode(request))
    if fingerprint(answer.ca_pem) != token.ca_fingerprint.lower():
        raise ProtocolError("the coordinator's answer names another CA than the token", field="ca_pem")
    if token.policy_key not in answer.policy_keys.values():
        raise ProtocolError("the coordinator's answer lacks the token's policy key", field="policy_keys")
    return store.save(device_id, answer, token.host, token.port, joined_with=_mark(token))


@frozen
class Joined:
    """What came of a token. `unchanged`: this very token has enrolled us before."""

    enrolment: Enrolment
    outcome: Literal["joined", "renewed", "unchanged", "moved"]


async def join_or_renew(store: IdentityStore, device_id: str, token: JoinToken, *, replace: bool = False) -> Joined:
    """Enrol, renew the certificate (the key stays), or with `replace` move to another coordinator's fleet.

    Raises what `join` raises; the enrolment there was stays in force then. ConfigError for a token of another
    coordinator without `replace`.
    """
    present = store.enrolment()
    if present is None:
        return Joined(await join(store, device_id, token), "joined")
    if enrolled_by(present, token):
        if used(present, token):
            return Joined(present, "unchanged")
        return Joined(await join(store, device_id, token), "renewed")
    if not replace:
        raise other_fleet(present)
    return Joined(await join(store, device_id, token), "moved")


def other_fleet(present: Enrolment) -> ConfigError:
    """Why a token of another coordinator is not used in passing."""
    return ConfigError(
        f"this device belongs to fleet {present.fleet!r} of the coordinator at {present.coordinator_host}; "
        "the join string is of another coordinator",
        next_step="to move it there: `midstream join --replace TOKEN`, then restart the agent",
        field="token",
    )


def used(enrolment: Enrolment, token: JoinToken) -> bool:
    """True when the enrolment was made with this very token."""
    return enrolment.joined_with == _mark(token)


def enrolled_by(enrolment: Enrolment | None, token: JoinToken) -> bool:
    """True when this token's coordinator has enrolled us, with this token or another."""
    return enrolment is not None and fingerprint(enrolment.ca_pem) == token.ca_fingerprint.lower()


def _mark(token: JoinToken) -> str:
    return hashlib.sha256(token.secret.encode()).hexdigest()


async def _ask(token: JoinToken, ca_pem: str, body: bytes) -> JoinAnswer:
    host = f"[{token.host}]" if ":" in token.host else token.host
    context = client_context(ca_pem)
    link = HttpLink("coordinator", f"https://{host}:{token.port}", ssl=context, max_reply_bytes=MAX_ANSWER_BYTES)
    try:
        reply = await link.exchange(JOIN_PATH, {"content-type": "application/json"}, body, JOIN_TIMEOUT_S)
    finally:
        await link.close()
    if reply.status != 200:
        raise _refusal(reply)
    answer = decode(JoinAnswer, reply.body, what="the join answer")
    check_schema(answer.schema, JOIN_SCHEMA)
    return answer


def _refusal(reply: Reply) -> LinkError | NotAllowed | ConfigError:
    try:
        found = json.loads(reply.body).get("error", {})
        message = str(found.get("message", ""))[:500]
    except (ValueError, AttributeError):
        message = ""
    if reply.status in (401, 403):
        return NotAllowed(f"the coordinator refused to enrol this device: {message or 'no reason given'}")
    if 400 <= reply.status < 500 and reply.status != 429:
        return ConfigError(f"the coordinator did not accept the request ({reply.status}): {message}")
    return LinkError(f"the coordinator could not enrol this device now ({reply.status}): {message}")

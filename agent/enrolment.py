"""Joining a fleet with a one-time token: compare the CA first, then send the secret, then keep what came back.

Nothing is trusted on first use: the token carries the CA's fingerprint and the policy key. Joining again with the same
token is harmless, for the key stays the same and the coordinator binds the secret to it.
"""

from __future__ import annotations

import json

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
    return store.save(device_id, answer, token.host, token.port)


def enrolled_by(enrolment: Enrolment | None, token: JoinToken) -> bool:
    """True when this token's coordinator has already enrolled us, so that the token need not be used again."""
    return enrolment is not None and fingerprint(enrolment.ca_pem) == token.ca_fingerprint.lower()


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

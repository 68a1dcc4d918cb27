"""What may leave: labels and detectors decide local-only; what else they find is replaced before anything remote.

`PrivacyGuard` is the gateway's Privacy. It looks at each request once, keeps no text, and knows its policy by the
object: a policy's section is compiled when it comes into force, not per request.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from attrs import evolve, frozen

from gateway import chat_texts
from gateway.context import Caller
from gateway.detectors import Detectors
from gateway.detectors import Span as Place
from gateway.ports import Findings, Redaction, Span
from gateway.redaction import placeholders_for
from protocol.chat import ChatRequest
from protocol.policy import Policy
from protocol.policy_privacy import PrivacyPolicy

NOT_FOUND = Findings()

ANY = "*"

SECRET_BYTES = 32


@frozen
class Compiled:
    """A policy's section with its detectors."""

    policy: PrivacyPolicy
    detectors: Detectors
    stays: frozenset[str]
    looks: bool


class PrivacyGuard:
    """Inspects and redacts requests. secret: tags of placeholders depend on it; a new one per process by default."""

    def __init__(self, secret: bytes | None = None) -> None:
        self._secret = os.urandom(SECRET_BYTES) if secret is None else secret
        self._compiled = compiled(PrivacyPolicy())

    def inspect(self, chat: ChatRequest, caller: Caller, policy: Policy) -> Findings:
        """Whether the request stays here, and what a remote target must not see."""
        if policy.privacy is not self._compiled.policy:
            self._compiled = compiled(policy.privacy)
        rules = self._compiled
        stays = kept_by_label(rules.policy, caller.labels) or _kept_by_form(rules, chat)
        spans = self._spans(chat) if rules.looks else ()
        if not stays and spans:
            stays = _kept_by_kind(rules, chat, spans)
        if not stays and not spans:
            return NOT_FOUND
        return Findings(bool(stays), stays, spans, f"{caller.tenant}/{caller.conversation_id or ''}")

    def redact(self, chat: ChatRequest, findings: Findings) -> Redaction:
        """The request with placeholders, and what puts values back into its answer. Stop strings change alike."""
        if not findings.spans:
            return Redaction(chat)
        by_path: dict[str, list[Place]] = {}
        for span in findings.spans:
            by_path.setdefault(span.path, []).append(Place(span.start, span.end, span.kind))
        found = list(chat_texts.texts(chat))
        made, changed = placeholders_for(
            [(text, by_path.get(path, ())) for path, text in found], self._secret, findings.scope
        )
        new = {path: after for (path, before), after in zip(found, changed, strict=True) if after != before}
        return Redaction(
            _with_stops(chat_texts.with_texts(chat, new), made.values),
            made.restorer(all_json=chat.response_format is not None),
        )

    def _spans(self, chat: ChatRequest) -> tuple[Span, ...]:
        """All texts are looked at as one, for most hold nothing; only then one by one."""
        detectors = self._compiled.detectors
        if not detectors.spans(chat_texts.joined(chat)):
            return ()
        return tuple(
            Span(path, place.start, place.end, place.kind)
            for path, text in chat_texts.texts(chat)
            for place in detectors.spans(text)
        )


def compiled(policy: PrivacyPolicy) -> Compiled:
    """Detectors of a section; local_only needs none."""
    wanted = bool(policy.redact_kinds or policy.local_only_kinds)
    return Compiled(policy, Detectors(policy), frozenset(policy.local_only_kinds), wanted)


def kept_by_label(policy: PrivacyPolicy, labels: Mapping[str, str]) -> str:
    """Why a request with these labels stays on the device; empty: it need not."""
    if policy.local_only:
        return "policy.privacy.local_only keeps prompts and answers on the device"
    for name, values in policy.local_only_labels.items():
        given = labels.get(name)
        if given is not None and (given in values or ANY in values):
            return f"policy.privacy.local_only_labels keeps label {name}={given[:64]} on the device"
    return ""


def _kept_by_form(rules: Compiled, chat: ChatRequest) -> str:
    """Pictures and token ids hold what no detector reads."""
    if not rules.policy.images_leave and chat.has_images:
        return "policy.privacy.images_leave is false: a request with an image stays on the device"
    if rules.stays and not isinstance(chat.prompt, str) and any(isinstance(item, int) for item in chat.prompt[:1]):
        return "policy.privacy.local_only_kinds: token ids cannot be looked into, so they stay on the device"
    return ""


def _kept_by_kind(rules: Compiled, chat: ChatRequest, spans: tuple[Span, ...]) -> str:
    kind = next((span.kind for span in spans if span.kind in rules.stays), None)
    if kind is not None:
        return f"policy.privacy.local_only_kinds: a text with {kind} stays on the device"
    if chat.endpoint == "embedding":
        return "a vector of a redacted text is another one: a text with private values is embedded on the device"
    return ""


def _with_stops(chat: ChatRequest, values: Mapping[str, str]) -> ChatRequest:
    """A stop string that holds a value is looked for in the redacted answer, where the placeholder stands."""
    if not chat.stop:
        return chat
    stops = []
    for stop in chat.stop:
        for name, value in values.items():
            stop = stop.replace(value, name)
        stops.append(stop)
    return evolve(chat, stop=tuple(stops))

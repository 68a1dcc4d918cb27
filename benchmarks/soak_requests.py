"""What a soak asks, and what each request may get: a seeded mix of texts, images, turns, faults and bursts. Pure.

An answer is explained when it is right, or when the fault that was asked for, or a limit, says what it got.
"""

from __future__ import annotations

import base64
import json
from random import Random
from typing import Any

from attrs import field, frozen

from benchmarks.soak_house import ANSWER_TOKENS
from engines.fakes_text import fake_answer
from protocol.text import Message

WORDS = ("river", "stone", "bridge", "mill", "harbour", "ledger", "winter", "signal", "garden", "copper")
LONG_BYTES = 120 << 10
TOO_LONG_BYTES = 300 << 10
PIXEL = base64.b64encode(b"\x89PNG\r\n\x1a\n" + bytes(4096)).decode()
STEADY, SMALL = "steady", "small"
"""Tenants: one without limits, one with narrow ones."""

UPSTREAM_FAULTS = (
    "status=429 after=1",
    "status=500",
    "status=503",
    "stall=3",
    "cut=3",
    "garble=3",
    "fail=3",
    "first=2",
)
OWN_FAULTS = ("crash=0", "crash=5", "mute=0", "mute=5")
FAILED = frozenset({429, 500, 502, 503, 504})


@frozen
class Asked:
    """One request. allowed: statuses that are explained beside a whole right answer with 200.

    wanted: text that a right answer has. cut_allowed: a stream may end with an error event. leaves_s: the client hangs
    up after so many seconds. kind: for the count.
    """

    kind: str
    body: bytes
    tenant: str = STEADY
    stream: bool = False
    wanted: str = ""
    allowed: frozenset[int] = field(factory=frozenset)
    cut_allowed: bool = False
    leaves_s: float | None = None


class Mix:
    """Requests without end; the same seed gives the same ones."""

    def __init__(self, seed: int = 7) -> None:
        self._random = Random(seed)
        self._number = 0

    def next(self) -> Asked:
        """Any one."""
        self._number += 1
        kinds = (
            (30, self._plain), (12, self._repeated), (8, self._turn), (5, self._long), (1, self._too_long),
            (4, self._image), (14, self._shaky), (8, self._backed), (6, self._own_fault), (10, self._both),
            (5, self._leaves),
        )  # fmt: skip
        (make,) = self._random.choices([make for _, make in kinds], [weight for weight, _ in kinds])
        return make()

    def burst(self, count: int) -> list[Asked]:
        """Requests at once from the tenant with narrow limits: 200, or a limit says why not."""
        return [
            _asked("burst", "good", self._words(12), self._name(), tenant=SMALL, allowed=frozenset({429}))
            for _ in range(count)
        ]

    def _plain(self) -> Asked:
        model = self._random.choice(("good", "good", "own"))
        name = self._name()
        return _asked("plain", model, self._words(30), name, stream=self._random.random() < 0.6)

    def _repeated(self) -> Asked:
        """One of a few questions: the answer cache, and identical ones in flight."""
        name = f"same{self._random.randrange(20)}"
        return _asked("repeated", "good", "again and again", name, stream=self._random.random() < 0.5)

    def _turn(self) -> Asked:
        conversation = f"c{self._number // 400}-{self._random.randrange(8)}"
        return _asked("turn", "good", self._words(10), self._name(), conversation_id=conversation)

    def _long(self) -> Asked:
        words = self._words(self._random.randrange(1000, LONG_BYTES // 8))
        model = self._random.choice(("good", "own", "both"))
        return _asked("long", model, words, self._name(), stream=self._random.random() < 0.5)

    def _too_long(self) -> Asked:
        return _asked("too_long", "good", "x" * TOO_LONG_BYTES, self._name(), allowed=frozenset({413}), right=False)

    def _image(self) -> Asked:
        """A provider takes pictures; the engine of this machine does not and says so."""
        part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}}
        own = self._random.random() < 0.3
        return _asked(
            "image", "own" if own else "good", self._words(5), self._name(), stream=self._random.random() < 0.5,
            parts=[part], allowed=frozenset({400}) if own else frozenset(), right=not own,
        )  # fmt: skip

    def _shaky(self) -> Asked:
        """Nobody stands behind: the fault may reach the client, as a status or as an error in the stream."""
        words = f"{self._words(8)} {self._random.choice(UPSTREAM_FAULTS)}"
        stream = self._random.random() < 0.6
        return _asked("shaky", "shaky", words, self._name(), stream=stream, allowed=FAILED, cut_allowed=stream)

    def _backed(self) -> Asked:
        """Another provider stands behind. No provider goes on with another one's answer, so a stream may be cut."""
        fault = self._random.choice(UPSTREAM_FAULTS[:-1])
        stream = self._random.random() < 0.6
        cut = stream and fault.partition("=")[0] in ("stall", "cut", "garble", "fail")
        return _asked("backed", "backed", f"{self._words(8)} {fault}", self._name(), stream=stream, cut_allowed=cut)

    def _own_fault(self) -> Asked:
        words = f"{self._words(8)} {self._random.choice(OWN_FAULTS)}"
        stream = self._random.random() < 0.6
        return _asked("own_fault", "own", words, self._name(), stream=stream, allowed=FAILED, cut_allowed=stream)

    def _both(self) -> Asked:
        """This machine begins and fails; the other engine goes on, and the client sees no fault."""
        words = f"{self._words(8)} {self._random.choice(OWN_FAULTS)}"
        return _asked("both", "both", words, self._name(), stream=self._random.random() < 0.6)

    def _leaves(self) -> Asked:
        words = f"{self._words(8)} rate=20 tokens=40"
        model = self._random.choice(("good", "own"))
        leaves_s = self._random.uniform(0.01, 0.4)
        return _asked("leaves", model, words, self._name(), stream=self._random.random() < 0.7, leaves_s=leaves_s)

    def _name(self) -> str:
        return f"r{self._number}x{self._random.randrange(1 << 30)}"

    def _words(self, count: int) -> str:
        return " ".join(self._random.choices(WORDS, k=count))


def _asked(
    kind: str, model: str, words: str, name: str, *, tenant: str = STEADY, stream: bool = False,
    allowed: frozenset[int] = frozenset(), cut_allowed: bool = False, leaves_s: float | None = None, right: bool = True,
    parts: list[dict[str, Any]] | None = None, conversation_id: str | None = None,
) -> Asked:  # fmt: skip
    content: Any = f"n={name} {words}"
    if parts is not None:
        content = [{"type": "text", "text": content}, *parts]
    body: dict[str, Any] = {
        "model": model, "messages": [{"role": "user", "content": content}], "max_tokens": 64, "stream": stream,
    }  # fmt: skip
    if conversation_id is not None:
        body["conversation_id"] = conversation_id
    if not right:
        wanted = "\0"  # no text has it: a whole answer is not explained
    elif model in ("own", "both"):
        wanted = fake_answer((Message("user", f"n={name} {words}"),), ANSWER_TOKENS, ANSWER_TOKENS).decode()
    else:
        wanted = f"reply to {name} "
    return Asked(kind, json.dumps(body).encode(), tenant, stream, wanted, allowed, cut_allowed, leaves_s)


def text_of(stream: bool, body: bytes) -> str:
    """The text of a whole answer or of a stream's events."""
    if not stream:
        return str(json.loads(body)["choices"][0]["message"]["content"])
    chunks = [json.loads(line[6:]) for line in body.splitlines() if line.startswith(b"data: {")]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


def fault_of(asked: Asked, answer: bytes) -> str:
    """Why an answer is not explained; empty when it is. answer: head and body as they came, chunk marks included."""
    status = int(answer[9:12]) if answer[9:12].isdigit() else 0
    head, _, body = answer.partition(b"\r\n\r\n")
    if status != 200:
        if status not in asked.allowed:
            return f"{asked.kind}: status {status}: {body[:200]!r}"
        if b'"error"' not in body:
            return f"{asked.kind}: status {status} without an error: {body[:200]!r}"
        return "" if status != 429 or b"retry-after" in head.lower() else f"{asked.kind}: 429 without Retry-After"
    if asked.stream and b'"error"' in body:
        if asked.cut_allowed and b"[DONE]" not in body and b'"finish_reason":"stop"' not in body:
            return ""
        return f"{asked.kind}: an error in the stream: {body[-300:]!r}"
    if asked.stream and b"[DONE]" not in body:
        return f"{asked.kind}: a stream without its end: {body[-200:]!r}"
    if asked.wanted not in text_of(asked.stream, body):
        return f"{asked.kind}: a wrong answer: {body[:200]!r}"
    return "" if b"finish_reason" in body else f"{asked.kind}: no finish reason: {body[-200:]!r}"

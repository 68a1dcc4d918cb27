"""Scene 2: text detection on real images while the network falls and recovers."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from attrs import define, field, frozen

from benchmarks.demo.records import Record, Tail, line_of
from benchmarks.demo.screen import Screen
from benchmarks.demo.stage import VISION_MODEL, Stage
from links.http import HttpLink
from protocol.errors import EngineError
from protocol.oip import InferRequest, decode_response, encode_request
from protocol.tensors import Tensor

MBIT = 125_000.0  # bytes per second
REQUEST_S = 30.0


@frozen
class Phase:
    """The network for a while: a rate both ways, how long, and a policy that is published first."""

    name: str
    bytes_per_s: float
    seconds: float
    policy: str = ""


STAY_LOCAL = "[split]\nraw_input_leaves = false\n"
WARM_UP = Phase("warm-up, 40 Mbit/s", 40 * MBIT, 15.0)
FALLING = (
    Phase("Wi-Fi, 40 Mbit/s", 40 * MBIT, 8.0),
    Phase("edge of the cell, 0.15 Mbit/s", 0.15 * MBIT, 16.0),
    Phase("Wi-Fi again, 40 Mbit/s", 40 * MBIT, 26.0),
    Phase("Wi-Fi, and raw images may not leave", 40 * MBIT, 14.0, STAY_LOCAL),
)
CONSTANT = (Phase("Wi-Fi, 40 Mbit/s", 40 * MBIT, 30.0),)
STEADY_ANSWERS = 12


@define
class VisionResult:
    """Milliseconds by (phase, arm), and the switches seen."""

    times_ms: dict[tuple[str, str], list[float]] = field(factory=dict)
    boxes: Counter[str] = field(factory=Counter)
    failed: int = 0


def image_request(file: Path) -> tuple[dict[str, str], bytes]:
    """An Open Inference Protocol request that carries the encoded image as it is on disk."""
    data = file.read_bytes()
    tensor = Tensor("image", "BYTES", (1,), len(data).to_bytes(4, "little") + data)
    headers, body = encode_request(InferRequest(model=VISION_MODEL, inputs=(tensor,)))
    return dict(headers), body


async def run(
    stage: Stage, tail: Tail, images: Sequence[Path], phases: Sequence[Phase], screen: Screen
) -> VisionResult:
    """Send images one after the other through every phase; each answer comes from one arm."""
    result = VisionResult()
    link = HttpLink("demo", stage.url)
    requests = [(image.stem, *image_request(image)) for image in images]
    try:
        for phase in phases:
            stage.shaper.set_rate(phase.bytes_per_s)
            if phase.policy:
                await stage.publish_policy(phase.policy)
                screen.say("policy published: " + " ".join(phase.policy.split("\n")).strip())
            screen.say(f"network: {phase.name}")
            end_s = time.monotonic() + phase.seconds
            turn = 0
            while time.monotonic() < end_s:
                name, headers, body = requests[turn % len(requests)]
                turn += 1
                await _one(link, headers, body, name, phase, result)
                _show(tail.new(), phase, screen)
            _summary(phase, result, screen)
    finally:
        await link.close()
    return result


async def warm_up(stage: Stage, tail: Tail, images: Sequence[Path], screen: Screen) -> None:
    """Let the agent learn the link: until one arm has given STEADY_ANSWERS answers in a row, or the phase is over."""
    link = HttpLink("demo", stage.url)
    stage.shaper.set_rate(WARM_UP.bytes_per_s)
    end_s, run, last = time.monotonic() + WARM_UP.seconds, 0, ""
    try:
        while time.monotonic() < end_s and (run < STEADY_ANSWERS or last == "device"):
            result = VisionResult()
            for image in images:
                await _one(link, *image_request(image), image.stem, WARM_UP, result)
            arms = {arm for _, arm in result.times_ms}
            run = run + len(images) if arms == {last} else 0
            last = arms.pop() if len(arms) == 1 else ""
    finally:
        await link.close()
    for record in tail.new():
        line = line_of(record)
        if line is not None:
            screen.say(f"first choice: {line.removeprefix('switch: ')}    ({record.get('reason')})")


async def _one(
    link: HttpLink, headers: dict[str, str], body: bytes, image: str, phase: Phase, result: VisionResult
) -> None:
    started_s = time.monotonic()
    reply = await link.exchange(f"/v2/models/{VISION_MODEL}/infer", headers, body, REQUEST_S)
    if reply.status != 200:
        result.failed += 1
        raise EngineError(f"text detection failed: {reply.body[:300]!r}")
    answer = decode_response(reply.headers, reply.body)
    arm = str((answer.parameters or {}).get("midstream_arm", "?"))
    result.times_ms.setdefault((phase.name, arm), []).append(1e3 * (time.monotonic() - started_s))
    boxes = next(t for t in answer.outputs if t.name == "boxes")
    result.boxes[f"{image}: {boxes.shape[0]} boxes"] += 1


def _show(records: Sequence[Record], phase: Phase, screen: Screen) -> None:
    for record in records:
        line = line_of(record)
        if line is not None:
            screen.mark(f"{line}    ({record.get('reason') or phase.name})")


def _summary(phase: Phase, result: VisionResult, screen: Screen) -> None:
    for (name, arm), times in result.times_ms.items():
        if name == phase.name:
            median = sorted(times)[len(times) // 2]
            screen.say(f"    {arm:24} {len(times):4} answers, median {median:7.1f} ms")


def as_record(result: VisionResult) -> dict[str, object]:
    """What the scene saw from outside, for the file of records."""
    rows = [{"phase": p, "arm": a, "times_ms": [round(t, 2) for t in ts]} for (p, a), ts in result.times_ms.items()]
    return {
        "event": "demo_vision",
        "rows": rows,
        "boxes": json.loads(json.dumps(result.boxes)),
        "failed": result.failed,
    }

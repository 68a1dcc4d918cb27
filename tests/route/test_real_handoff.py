"""The handoff law with real engines: both bindings, planned cuts each way, either side killed in each phase.

Kept: the source's tokens up to the cut, every index once. Each token lies within 0.25 nats of the best token of a
one-shot pass over the same prefix, because batch kernels round differently from stepwise decoding.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import pytest
from attrs import frozen

from engines.llama_cpp import LlamaCppEngine
from engines.llama_server import LlamaServerEngine
from engines.peer import PeerEngine
from engines.peer_host import serve_stream
from engines.port import TextEngine
from gateway.stops import Owned
from gateway.targets import Target
from links.memory import memory_stream_pair
from links.port import FrameStream
from protocol.events import HandedOver, SourceLost
from protocol.policy import MigrationPolicy
from tests.route.flaky_text import FlakyTextEngine, Phase
from tests.unit.gateway.streams import Rig, collect, rig

pytestmark = pytest.mark.llama_native
MODEL = "smollm2-135m"
COUNT = 48
NATS = 0.25
Binding = Literal["server", "cpp"]
TEXT = "<|im_start|>user\nTell me about the river Rhine.<|im_end|>\n<|im_start|>assistant\n"


@frozen
class Pair:
    """A device and a cloud that runs behind the handoff protocol, each with a switch to die."""

    device: FlakyTextEngine
    cloud: FlakyTextEngine
    oracle: Any
    prompt: tuple[int, ...]


@asynccontextmanager
async def pair(path: Path, device: Binding, cloud: Binding) -> AsyncIterator[Pair]:
    """Both engines, loaded; the cloud is reached by frames over memory. The oracle does one-shot passes."""
    import llama_cpp

    make = {"server": LlamaServerEngine, "cpp": LlamaCppEngine}
    here: TextEngine = make[device](path, model=MODEL, context_tokens=512, threads=1)
    there: TextEngine = make[cloud](path, model=MODEL, context_tokens=512, threads=1)
    hosting: set[asyncio.Task[None]] = set()

    async def open_stream() -> FrameStream:
        mine, theirs = memory_stream_pair()
        hosting.add(asyncio.create_task(serve_stream(lambda _: there, theirs)))
        return mine

    # Loading is no part of a handoff.
    await there.capabilities()
    peer = PeerEngine(open_stream, name="cloud", model=MODEL, vocabulary=(await here.capabilities()).vocabulary)
    settings = {"n_ctx": 512, "n_batch": 512, "n_ubatch": 512, "n_threads": 1, "n_threads_batch": 2}
    oracle = llama_cpp.Llama(str(path), logits_all=True, verbose=False, **settings)
    try:
        prompt = tuple(oracle.tokenize(TEXT.encode(), add_bos=True, special=True))
        # Tokens are held back a little, so that the other side has the time to prepare at every cut.
        yield Pair(FlakyTextEngine(here, 0.015), FlakyTextEngine(peer, 0.015), oracle, prompt)
    finally:
        oracle.close()
        await peer.close()
        await here.close()
        await there.close()
        await asyncio.wait(hosting)


def nats_from_best(two: Pair, owned: Sequence[Owned]) -> list[float]:
    """How far below the best token of a one-shot pass each token of the answer lies."""
    import numpy as np

    ids = [one.token.id for one in owned]
    assert all(one is not None for one in ids)
    two.oracle.reset()
    two.oracle.eval([*two.prompt, *ids[:-1]])
    rows = two.oracle.scores[len(two.prompt) - 1 : len(two.prompt) - 1 + len(ids)]
    return [float(np.max(row) - row[one]) for row, one in zip(rows, ids, strict=True)]


def moving(at: int) -> MigrationPolicy:
    return MigrationPolicy(min_tokens=at, min_remaining_tokens=1, consume_tokens_per_s=0.001, stall_s=10.0)


async def uninterrupted(two: Pair) -> float:
    """Worst distance in nats of answers that nobody moves: what the engines' own rounding costs."""
    worst = 0.0
    for name, engine in (("device", two.device), ("cloud", two.cloud)):
        alone = [Target(name, name == "device", engine, frozenset({"fake"}))]
        made = rig(alone, max_tokens=COUNT, after_s=30.0, prompt=two.prompt)
        worst = max(worst, check(two, await collect(made.owner)))
    return worst


async def run(two: Pair, at: int, to_cloud: bool = True) -> tuple[Rig, list[Owned]]:
    """One answer that moves at the first chance after `at` tokens."""
    targets = [
        Target("device", True, two.device, frozenset({"fake"}), tokens_per_s=1e9 if not to_cloud else None),
        Target("cloud", False, two.cloud, frozenset({"fake"}), tokens_per_s=1e9 if to_cloud else None),
    ]
    made = rig(
        targets if to_cloud else targets[::-1],
        migration=moving(at),
        max_tokens=COUNT,
        after_s=30.0,
        prompt=two.prompt,
    )
    return made, await collect(made.owner)


def check(two: Pair, owned: Sequence[Owned]) -> float:
    """0 lost, 0 doubled, valid text; returns the worst distance in nats."""
    assert [one.token.index for one in owned] == list(range(COUNT))
    b"".join(one.token.data for one in owned).decode("utf-8")
    worst = max(nats_from_best(two, owned))
    assert worst <= NATS
    assert two.device.load().running == 0
    return worst


BINDINGS: list[tuple[Binding, Binding]] = [("server", "cpp"), ("cpp", "server")]


async def _planned(path: Path, device: Binding, cloud: Binding, cuts: int) -> None:
    draw, moved, worst = random.Random(7), 0, 0.0
    async with pair(path, device, cloud) as two:
        await run(two, 2)
        alone = await uninterrupted(two)
        for number in range(cuts):
            made, owned = await run(two, draw.randint(1, COUNT // 2), to_cloud=number % 2 == 0)
            worst = max(worst, check(two, owned))
            for event in made.of(HandedOver):
                assert isinstance(event, HandedOver)
                moved += 1
                names = ("device", "cloud") if number % 2 == 0 else ("cloud", "device")
                assert made.owner.sides == ((names[0], event.index), (names[1], COUNT - event.index))
    print(
        f"{device} and {cloud}: {moved} of {cuts} answers moved, worst token {worst:.3f} nats from the best; "
        f"{alone:.3f} in answers that were left alone"
    )
    assert moved >= 0.9 * cuts


async def _killed(path: Path, side: Literal["source", "target"], phase: Phase, times: int) -> None:
    """Kill one side while the target is in `phase`, until it has struck `times` times."""
    draw, struck, lost = random.Random(11), 0, 0
    async with pair(path, "server", "cpp") as two:
        await run(two, 2)
        for _ in range(3 * times):
            two.cloud.arm(phase, two.device.die if side == "source" else None)
            made, owned = await run(two, draw.randint(2, COUNT // 2))
            check(two, owned)
            struck += two.cloud.struck
            lost += len(made.of(SourceLost))
            two.cloud.revive()
            two.device.revive()
            if struck == times:
                break
    print(f"{side} killed in phase {phase}: {struck} times, {lost} answers went on elsewhere, 0 lost, 0 doubled")
    assert struck == times


PHASES: tuple[Phase, ...] = ("prepare", "extend", "start", "token")
SIDES: tuple[Literal["source", "target"], ...] = ("source", "target")


@pytest.mark.parametrize(("device", "cloud"), BINDINGS)
async def test_planned_cuts_with_real_engines(
    model_file: Callable[[str], Path], device: Binding, cloud: Binding
) -> None:
    await _planned(model_file(MODEL), device, cloud, cuts=2)


@pytest.mark.parametrize(("side", "phase"), [("source", "prepare"), ("source", "extend"), ("target", "token")])
async def test_kills_with_real_engines(
    model_file: Callable[[str], Path], side: Literal["source", "target"], phase: Phase
) -> None:
    await _killed(model_file(MODEL), side, phase, times=1)


@pytest.mark.slow
@pytest.mark.parametrize(("device", "cloud"), BINDINGS)
async def test_a_hundred_cuts_each_way_with_real_engines(
    model_file: Callable[[str], Path], device: Binding, cloud: Binding
) -> None:
    await _planned(model_file(MODEL), device, cloud, cuts=100)


@pytest.mark.slow
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("side", SIDES)
async def test_twenty_kills_in_each_phase_with_real_engines(
    model_file: Callable[[str], Path], side: Literal["source", "target"], phase: Phase
) -> None:
    await _killed(model_file(MODEL), side, phase, times=20)

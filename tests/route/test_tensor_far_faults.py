"""What goes wrong at the far end, on the way and in memory, over a real link with a real server and engine.

Whatever it is: the device answers within the deadline, once, and the log says so once.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
from attrs import define, evolve

from cloud_stub.bundles import BundleShelf
from engines.arrays import to_array, to_tensor
from engines.onnx import OnnxRuntime
from engines.pool import ModelPool
from engines.remote_oip import RemoteEndpoint
from engines.slowed import SlowedRuntime
from links.http import HttpLink
from links.http_server import serve
from links.port import Request, Response, Route
from links.shaped import ShaperProxy
from protocol.events import TensorDone
from protocol.models import tail_name
from protocol.oip import bytes_tensor, decode_response, encode_response
from protocol.policy import SplitPolicy
from split_models.heads import FIRST_PAUSE_S
from tests.tensor_house import CLS, Cloud, Device, bundle_root, cloud, device, manifest_of, store_with

pytestmark = pytest.mark.timeout(180)

DEADLINE_S = 3.0
POLICY = SplitPolicy(period_s=0.05, explore_one_in=4, raw_input_leaves=False, deadline_s=DEADLINE_S, hedge_ratio=0.0)
SLOW = 80.0
"""The device takes about 0.1 s for the small model, so that a cut is worth it."""

Tamper = Callable[[Response], Response]


@define(eq=False)
class Liar:
    """Stands in front of the server's handlers; `tamper` changes what tails answer, `delay_s` keeps it back."""

    tamper: Tamper | None = None
    delay_s: float = 0.0
    answered: int = 0

    def routes(self, routes: Sequence[Route]) -> list[Route]:
        return [evolve(route, handle=self._around(route)) if route.method == "POST" else route for route in routes]

    def _around(self, route: Route) -> Callable[[Request], object]:
        async def handle(request: Request) -> Response:
            response = await route.handle(request)
            if not request.path.endswith("/infer"):
                return response
            self.answered += 1
            await asyncio.sleep(self.delay_s)
            return self.tamper(response) if self.tamper is not None else response

        return handle


def changed(change: Callable[[np.ndarray], np.ndarray]) -> Tamper:
    """Another array instead of the first output."""

    def tamper(response: Response) -> Response:
        assert isinstance(response.body, bytes)
        answer = decode_response({k.lower(): v for k, v in response.headers.items()}, response.body)
        first = answer.outputs[0]
        outputs = (to_tensor(first.name, change(to_array(first))), *answer.outputs[1:])
        headers, body = encode_response(evolve(answer, outputs=outputs), True)
        return Response(response.status, headers, body)

    return tamper


def other_weights(response: Response) -> Response:
    assert isinstance(response.body, bytes)
    answer = decode_response({k.lower(): v for k, v in response.headers.items()}, response.body)
    parameters = {**answer.parameters, "digest": "f" * 64}
    headers, body = encode_response(evolve(answer, parameters=parameters), True)
    return Response(response.status, headers, body)


def nobody(response: Response) -> Response:
    return Response(503, {"retry-after": "1"}, b'{"error": "shutting down"}')


@define(eq=False)
class Scene:
    """A device on a cut, and everything that can be made to fail."""

    far: Cloud
    near: Device
    liar: Liar
    proxy: ShaperProxy
    user: RemoteEndpoint
    page: bytes

    async def ask(self) -> TensorDone:
        """One picture; what was reported of it. Fails unless there was one report, in time."""
        count = len(self.near.done())
        answer = await self.user.infer(CLS, [bytes_tensor("image", [self.page])], 30.0)
        assert to_array(answer.outputs[0]).tolist() in ([0], [180])
        assert len(self.near.done()) == count + 1, "reported twice, or never"
        done = self.near.done()[-1]
        assert done.status == "ok"
        assert done.total_s <= DEADLINE_S
        return done

    def heads(self) -> list[str]:
        """Names of all heads of the bundle."""
        plan = self.near.way.runners[CLS].plan
        return [plan.head(cut) for cut in plan.manifest.cuts]

    async def drop_heads(self) -> None:
        """Out of memory with them, those that are being loaded included."""
        while True:
            for head in self.heads():
                self.near.parts.pool.drop(head)
            if not self.near.parts.local.loading():
                return
            await asyncio.sleep(0.005)

    async def until(self, kind: str, limit: int = 60) -> TensorDone:
        for _ in range(limit):
            done = await self.ask()
            if done.arm.startswith(kind):
                return done
        raise AssertionError(f"no {kind}: {self.near.way.status()[CLS]}")


@pytest_asyncio.fixture
async def scene(
    model_file: Callable[[str], Path], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Scene]:
    files = {CLS: model_file(CLS)}
    root = await asyncio.to_thread(bundle_root, [CLS], files.__getitem__, tmp_path_factory.mktemp("bundles"))
    liar = Liar()
    async with cloud(root, store_with(tmp_path / "cloud", files)) as far:
        server = await serve([*liar.routes(far.way.mount.routes), *BundleShelf(root).routes()])
        proxy = ShaperProxy("127.0.0.1", server.port)
        url = f"http://127.0.0.1:{await proxy.start()}"
        slowed = SlowedRuntime(OnnxRuntime(), SLOW, clock=time.thread_time)
        async with device(store_with(tmp_path / "device", files), url, policy=POLICY, onnx=slowed) as near:
            link = HttpLink("user", f"http://127.0.0.1:{near.server.port}")
            page = model_file("sample-page").read_bytes()
            made = Scene(far, near, liar, proxy, RemoteEndpoint(link), page)
            await _heads_here(near)
            yield made
            await link.close()
        await proxy.close()
        await server.close()


async def _heads_here(near: Device) -> None:
    for _ in range(400):
        plan = near.way.runners[CLS].plan
        here = set(near.parts.local.names())
        if plan.manifest.cuts and all(plan.head(cut) in here for cut in plan.manifest.cuts):
            return
        await asyncio.sleep(0.05)
    raise AssertionError("the heads were not fetched")


def told(caplog: pytest.LogCaptureFixture, words: str) -> int:
    """Lines of the log, debugging apart, that say so."""
    return sum(words in r.getMessage() for r in caplog.records if r.levelno >= logging.INFO)


FAULTS: dict[str, tuple[Tamper, str]] = {
    "wrong shape": (changed(lambda array: array[:, :1]), "does not fit"),
    "not a number": (changed(lambda array: np.full_like(array, np.nan, dtype=np.float32)), "does not fit"),
    "other weights": (other_weights, "does not fit"),
    "refuses": (nobody, "is full"),
}


@pytest.mark.parametrize("kind", FAULTS)
async def test_a_tail_that_answers_wrong_is_answered_by_the_device(
    scene: Scene, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "midstream.split")
    await scene.until("cut")
    scene.liar.tamper, words = FAULTS[kind]
    answered = scene.liar.answered
    for _ in range(6):
        assert (await scene.ask()).arm == "device"
    assert scene.liar.answered > answered, "the fault was not met"
    assert told(caplog, words) == 1
    scene.liar.tamper = None
    await scene.until("cut", limit=150)


async def test_a_tail_server_that_slows_down_is_left_in_time(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "midstream.split")
    await scene.until("cut")
    scene.liar.delay_s = 2.0
    answered = scene.liar.answered
    first = await scene.ask()
    assert first.arm == "device" and first.total_s < 2.0
    assert scene.liar.answered > answered, "the link was not tried"
    assert (await scene.ask()).arm == "device"
    assert told(caplog, "link slow") == 1
    scene.liar.delay_s = 0.0
    await scene.until("cut", limit=150)


async def test_a_slow_tail_is_overtaken_by_the_device_where_policy_allows_it(scene: Scene) -> None:
    await scene.until("cut")
    scene.near.policy[0] = evolve(POLICY, hedge_ratio=1.0)
    scene.liar.delay_s = 2.0
    done = await scene.ask()
    assert (done.arm, done.hedged, done.winner) == ("device", True, "device")
    assert "hedge for cut" in done.reason
    assert done.total_s < 2.0
    scene.liar.delay_s = 0.0
    await scene.until("cut", limit=150)


async def test_a_tail_server_that_dies_is_left_and_found_again(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "midstream.split")
    await scene.until("cut")
    scene.proxy.cut()
    for _ in range(8):
        assert (await scene.ask()).arm == "device"
    assert told(caplog, "link dead") == 1
    scene.proxy.restore()
    await scene.until("cut", limit=150)
    assert told(caplog, "answers again") == 1


async def test_a_link_that_stalls_in_a_tensor_is_left_in_time(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "midstream.split")
    await scene.until("cut")
    scene.proxy.set_rate(20_000)
    sent = scene.proxy.up_bytes
    asking = asyncio.create_task(scene.ask())
    while scene.proxy.up_bytes < sent + 1000:
        await asyncio.sleep(0.005)
    scene.proxy.set_rate(0)
    assert (await asking).arm == "device"
    assert (await scene.ask()).arm == "device"
    assert told(caplog, "link slow") == 1
    scene.proxy.set_rate(float("inf"))
    await scene.until("cut", limit=150)


async def test_a_head_that_does_not_load_leaves_the_other_arms(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    """Its file is damaged while it is out of memory, as a bad card does it."""
    caplog.set_level(logging.INFO, "midstream.split")
    held = (await scene.until("cut")).arm
    for head in scene.heads():
        scene.near.parts.local.file(head).write_bytes(b"damaged")
    await scene.drop_heads()
    for _ in range(8):
        assert (await scene.ask()).arm == "device"
    lines = [r.getMessage() for r in caplog.records if "left out for" in r.getMessage()]
    assert lines, held
    assert len(lines) == len(set(lines)), "the same head was told of twice"
    assert all(f"{FIRST_PAUSE_S:.0f} s" in line for line in lines)


async def test_without_memory_for_a_head_the_device_answers(scene: Scene) -> None:
    """Another model takes all memory but the pinned whole model's."""
    await scene.until("cut")
    pool = scene.near.parts.pool
    await scene.drop_heads()
    with pool.acquire("hog", _free_bytes(pool), _Hog):
        for _ in range(6):
            assert (await scene.ask()).arm == "device"
    assert scene.near.parts.local.loaded(CLS), "the fallback went out of memory"


class _Hog:
    def close(self) -> None:
        return None


def _free_bytes(pool: ModelPool) -> int:
    return (2 << 30) - pool.used_bytes - 1


async def test_a_head_that_was_evicted_under_its_request_makes_nobody_wait(scene: Scene) -> None:
    """Between the choice and the run the head goes out of memory: the device answers, nothing is loaded inline."""
    await scene.until("cut")
    decoder = asyncio.create_task(scene.near.parts.compute.run(time.sleep, 0.4))
    asking = asyncio.create_task(scene.ask())
    await asyncio.sleep(0.2)  # chosen; the picture waits for its turn to be decoded
    await scene.drop_heads()
    done = await asking
    assert (done.arm, "not in memory" in done.reason) == ("device", True)
    await decoder
    await scene.until("cut")


async def test_the_far_end_loads_a_tail_before_its_first_request(scene: Scene) -> None:
    """The device says which tail it is about to use; no request of its own ever met a cold one."""
    await scene.until("cut")
    cuts = scene.near.way.runners[CLS].plan.manifest.cuts
    digest = manifest_of(scene.near.way, CLS).digest
    asked = {event.model for event in scene.far.events.events if isinstance(event, TensorDone)}
    tails = {tail_name(CLS, digest, cut.id, cut.codec) for cut in cuts}
    firsts = {
        name: next(e for e in scene.far.events.events if isinstance(e, TensorDone) and e.model == name)
        for name in asked & tails
    }
    assert firsts
    loads = [event.queue_s for event in firsts.values()]
    assert max(loads) < 0.05, "a request waited for a tail to load"

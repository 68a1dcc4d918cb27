"""Shadow mode: the old path answers, the other one is asked afterwards within the same bounds, and nobody sees it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve, frozen

from benchmarks.fake_upstream import serve_upstream
from benchmarks.limited_gateway import GatewaySetup, providers
from cloud_stub.text import TextHouse
from engines.fakes_text import Failure, FakeTextEngine
from gateway.audit import FileAudit, records, verify
from gateway.context import Caller
from gateway.ports import (
    CachedAnswer,
    CacheKey,
    Estimate,
    FreeReservation,
    KeyRing,
    NoCache,
    NoLimits,
    OpenKeys,
    Spent,
)  # fmt: skip
from gateway.privacy import PrivacyGuard
from gateway.targets import Target
from links.http import HttpLink
from links.http_server import serve
from protocol.clock import wall_now
from protocol.errors import BudgetExceeded, EngineCrashed
from protocol.events import RecordingEmit, Shadowed
from protocol.policy import Policy, PrivacyPolicy, RoutingPolicy
from protocol.policy_routing import ShadowRouting
from tests.route.text_house import House, house

OLD, NEW = b"the bridge is very old", b"a bridge is old"
ALL = ShadowRouting(share=1.0)
Json = dict[str, Any]


class Stores(NoCache):
    """A cache that keeps what it is told, and gives `answer`."""

    def __init__(self) -> None:
        self.kept: list[CachedAnswer] = []
        self.answer: CachedAnswer | None = None

    async def find(self, key: CacheKey) -> CachedAnswer | None:
        return self.answer

    async def store(self, key: CacheKey, answer: CachedAnswer) -> None:
        self.kept.append(answer)


class Counts(NoLimits):
    """What is held and what was settled."""

    def __init__(self, refuse_after: int = 1 << 30) -> None:
        self.asked: list[Estimate] = []
        self.open = 0
        self.spent: list[Spent] = []
        self._refuse_after = refuse_after

    async def reserve(self, caller: Caller, estimate: Estimate) -> Held:
        if len(self.asked) >= self._refuse_after:
            raise BudgetExceeded("nothing is left", next_step="wait")
        self.asked.append(estimate)
        self.open += 1
        return Held(self)


class Held(FreeReservation):
    """One place of Counts."""

    def __init__(self, counts: Counts) -> None:
        super().__init__()
        object.__setattr__(self, "counts", counts)

    async def settle(self, spent: Spent) -> None:
        counts: Counts = self.counts  # type: ignore[attr-defined]
        counts.open -= 1
        counts.spent.append(spent)

    async def release(self) -> None:
        counts: Counts = self.counts  # type: ignore[attr-defined]
        counts.open -= 1


@frozen
class Scene:
    served: House
    link: HttpLink
    here: FakeTextEngine
    far: FakeTextEngine
    cache: Stores
    limits: Counts
    folder: Path

    async def ask(self, text: str = "how old is the bridge", **more: Any) -> Json:
        body = {"model": "m", "messages": [{"role": "user", "content": text}], "max_tokens": 32, **more}
        reply = await self.link.exchange("/v1/chat/completions", {}, json.dumps(body).encode(), 10.0)
        found: Json = json.loads(reply.body)
        return found | {"status": reply.status}

    def outcomes(self) -> list[str]:
        return [event.outcome for event in self.served.emit.events if isinstance(event, Shadowed)]

    async def heard(self, count: int) -> list[str]:
        """Outcomes, once there are so many."""
        async with asyncio.timeout(5.0):
            while len(self.outcomes()) < count:
                await asyncio.sleep(0.01)
        return self.outcomes()


@asynccontextmanager
async def scene(
    folder: Path, shadow: ShadowRouting = ALL, *, policy: Policy | None = None, price: float = 0.0,
    draw: Callable[[], float] = lambda: 0.5, limits: Counts | None = None, far: FakeTextEngine | None = None,
    here_models: Sequence[str] = ("m",), far_models: Sequence[str] = ("m",), keys: KeyRing | None = None,
) -> AsyncIterator[Scene]:  # fmt: skip
    here = FakeTextEngine(name="here", says=[OLD])
    far = far or FakeTextEngine(name="far", says=[NEW])
    targets = [
        Target("device", True, here, frozenset(here_models)),
        Target("cloud", False, far, frozenset(far_models), price_out=price),
    ]
    cache, counts = Stores(), limits or Counts()
    base = policy or Policy()
    policy = evolve(base, routing=evolve(base.routing, shadow=shadow))
    audit = FileAudit(folder / "audit", wall_now)
    ports = {
        "keys": keys or OpenKeys(),
        "audit": audit,
        "cache": cache,
        "limits": counts,
        "draw": draw,
        "privacy": PrivacyGuard(b"k" * 32),
    }
    link = None
    try:
        async with house(targets, policy=policy, ports=ports) as served:
            link = HttpLink("front", served.base_url)
            yield Scene(served, link, here, far, cache, counts, folder)
            await link.close()
    finally:
        await asyncio.to_thread(audit.close)


def shadow_rows(folder: Path) -> list[Json]:
    return [dict(row) for row in records(folder / "audit") if row["kind"] == "shadow"]


async def test_the_old_path_answers_and_the_difference_is_written_down(tmp_path: Path) -> None:
    async with scene(tmp_path) as s:
        answer = await s.ask()
        assert answer["choices"][0]["message"]["content"] == OLD.decode()
        assert await s.heard(1) == ["alike"]
        assert len(s.cache.kept) == 1 and s.cache.kept[0].source == "device"
        assert len(s.served.done()) == 1, "a shadow is no request"
        assert (s.limits.open, len(s.limits.asked)) == (0, 1), "what costs nothing takes no place of its tenant"
    (row,) = shadow_rows(tmp_path)
    assert (row["old"]["target"], row["other"]["target"]) == ("device", "cloud")
    assert row["similarity_ratio"] == pytest.approx(2 * 3 / 9, abs=1e-3) and row["alike"] is True
    assert (row["old"]["chars"], row["other"]["chars"]) == (len(OLD), len(NEW))
    assert "bridge" not in json.dumps(row)
    assert verify(tmp_path / "audit").fault is None


async def test_without_a_share_nothing_is_drawn_and_nobody_is_asked(tmp_path: Path) -> None:
    drawn: list[int] = []

    def draw() -> float:
        drawn.append(1)
        return 0.0

    async with scene(tmp_path, ShadowRouting(), draw=draw) as s:
        await s.ask()
        off = len(drawn)
        assert not s.far.prepared and not s.outcomes()
    async with scene(tmp_path, ALL, draw=draw) as s:
        await s.ask()
        assert len(drawn) == 2 * off + 1


@pytest.mark.parametrize(
    "policy",
    [
        Policy(privacy=PrivacyPolicy(local_only=True)),
        Policy(routing=RoutingPolicy(targets=("device",))),
    ],
)
async def test_a_shadow_goes_nowhere_that_the_request_may_not(tmp_path: Path, policy: Policy) -> None:
    async with scene(tmp_path, policy=policy) as s:
        assert (await s.ask())["status"] == 200
        assert await s.heard(1) == ["skipped"]
        assert not s.far.prepared


async def test_a_remote_shadow_sees_placeholders(tmp_path: Path) -> None:
    far = FakeTextEngine(name="far", says=[b"mail it"])
    async with scene(tmp_path, far=far) as s:
        await s.ask("write to a.b@example.com")
        await s.heard(1)
        assert len(far.prepared) == 1
        assert "a.b@example.com" not in str(far.prepared[0].prompt)


async def test_a_paid_shadow_is_reserved_and_settled_and_stays_under_its_own_cap(tmp_path: Path) -> None:
    async with scene(tmp_path, evolve(ALL, usd_per_day=0.5), price=0.01) as s:
        await s.ask()
        assert await s.heard(1) == ["alike"]
        assert s.limits.open == 0 and len(s.limits.asked) == 2
        assert s.limits.asked[1].money == pytest.approx(0.32)
        assert s.limits.spent[1].money > 0
    async with scene(tmp_path, evolve(ALL, usd_per_day=0.3), price=0.01) as s:
        await s.ask()
        assert await s.heard(1) == ["skipped"]
        assert not s.far.prepared


async def test_a_budget_that_is_used_up_ends_shadows_and_no_request(tmp_path: Path) -> None:
    async with scene(tmp_path, price=0.001, limits=Counts(refuse_after=1)) as s:
        assert (await s.ask())["status"] == 200
        assert await s.heard(1) == ["skipped"]
        assert not s.far.prepared and s.limits.open == 0


async def test_a_shadow_that_fails_is_told_and_hurts_nobody(tmp_path: Path) -> None:
    far = FakeTextEngine(name="far", says=[NEW], failures=[Failure("prepare", EngineCrashed("gone"))])
    async with scene(tmp_path, far=far) as s:
        assert (await s.ask())["status"] == 200
        assert await s.heard(1) == ["failed"]
    (row,) = shadow_rows(tmp_path)
    assert (row["other"]["status"], row["similarity_ratio"], row["alike"]) == ("engine_crashed", None, False)


async def test_shadows_are_few_at_once_and_end_with_the_house(tmp_path: Path) -> None:
    far = FakeTextEngine(name="far", tokens_per_s=1.0)
    async with scene(tmp_path, evolve(ALL, concurrent=2), far=far, price=1e-6) as s:
        for number in range(5):
            assert (await s.ask(f"question {number}"))["status"] == 200
        assert await s.heard(3) == ["skipped"] * 3
        assert far.load().running == 2
    assert far.load().running == 0
    assert s.limits.open == 0, "what was cancelled is settled"


async def test_a_cut_answer_has_no_shadow(tmp_path: Path) -> None:
    async with scene(tmp_path, here_models=()) as s:
        s.far.fail("prepare", EngineCrashed("gone"))
        assert (await s.ask())["status"] >= 500
        await asyncio.sleep(0.05)
        assert not s.outcomes()


async def test_for_auto_the_other_side_answers_with_its_own_model(tmp_path: Path) -> None:
    async with scene(tmp_path, here_models=("small",), far_models=("large",)) as s:
        answer = await s.ask(model="auto")
        assert answer["model"] == "small"
        assert await s.heard(1) == ["alike"]
    (row,) = shadow_rows(tmp_path)
    assert (row["old"]["model"], row["other"]["model"]) == ("small", "large")
    assert row["level"] in ("heuristic", "dynamic", "rules")


async def test_a_key_that_may_not_name_the_other_model_has_no_shadow_there(tmp_path: Path) -> None:
    class OneModel(OpenKeys):
        def caller(self, headers: Mapping[str, str], remote_ip: str | None, peer: str | None = None) -> Caller:
            return Caller(models=frozenset({"small"}))

    async with scene(tmp_path, here_models=("small",), far_models=("large",), keys=OneModel()) as s:
        assert (await s.ask(model="auto"))["model"] == "small"
        assert await s.heard(1) == ["skipped"]
        assert not s.far.prepared


async def test_streams_have_shadows_too_and_a_repeated_question_from_the_cache_has_none(tmp_path: Path) -> None:
    async with scene(tmp_path) as s:
        body = {"model": "m", "messages": [{"role": "user", "content": "how old"}], "stream": True}
        lines = s.link.lines("/v1/chat/completions", {}, json.dumps(body).encode(), 10.0)
        shown = b"".join([chunk async for chunk in lines])
        assert NEW.split()[0] + b" bridge is old" not in shown
        assert await s.heard(1) == ["alike"]
        s.cache.answer = s.cache.kept[0]
        await s.ask("how old")
        await asyncio.sleep(0.05)
        assert len(s.outcomes()) == 1


async def test_a_coordinator_compares_its_own_model_with_a_providers(tmp_path: Path) -> None:
    port, ledger, stop = await serve_upstream()
    upstream = providers(GatewaySetup(str(tmp_path), port))
    own, emit = FakeTextEngine(name="own", says=[OLD]), RecordingEmit()
    text = TextHouse({"m": own}, upstream, ShadowRouting(share=1.0))
    front = text.front(emit)
    await front.start()
    server = await serve(front.routes)
    link = HttpLink("front", f"http://127.0.0.1:{server.port}")
    try:
        body = {"model": "m", "messages": [{"role": "user", "content": "n=a how old"}], "max_tokens": 32}
        reply = await link.exchange("/v1/chat/completions", {}, json.dumps(body).encode(), 10.0)
        assert json.loads(reply.body)["choices"][0]["message"]["content"] == OLD.decode()
        async with asyncio.timeout(5.0):
            while not (told := [event for event in emit.events if isinstance(event, Shadowed)]):
                await asyncio.sleep(0.01)
        assert (told[0].target, told[0].outcome) == ("cloud:p", "different")
        assert ledger.by_name["a"].ended_s is not None
    finally:
        await link.close()
        await front.stop()
        await server.close()
        await text.close()
        stop()

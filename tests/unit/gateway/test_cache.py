"""The answer cache: whose answers are found, when, and what outlives a restart."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from attrs import evolve

from engines.fakes_sentences import FakeEmbedder
from gateway.cache import CacheSettings, SemanticCache
from gateway.cache_key import lookup_key
from gateway.ports import CachedAnswer, CacheKey
from protocol.chat import ChatRequest
from protocol.clock import WallTime
from protocol.text import Message, Sampling, Usage

ANSWER = CachedAnswer(("It is ", "Paris."), "stop", Usage(12, 3, 0), "cloud")


class Rig:
    """A cache over a fake embedder, with a wall clock that is moved by hand."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.now_unix_s = 1_000_000.0
        self.embedder = FakeEmbedder()
        self.cache: SemanticCache

    async def open(self, **changes: object) -> SemanticCache:
        settings = CacheSettings(self.folder, threshold=0.6, threshold_embedder="fake/1", **changes)  # type: ignore[arg-type]
        self.cache = SemanticCache(settings, self.embedder, wall=lambda: WallTime(self.now_unix_s, True))
        await self.cache.start()
        return self.cache

    async def find(self, text: str, tenant: str = "a", **changes: object) -> str | None:
        hit = await self.cache.look_up(CacheKey(tenant, chat(text, **changes)))
        return hit.kind if hit is not None else None

    async def keep(self, text: str, tenant: str = "a", answer: CachedAnswer = ANSWER, **changes: object) -> None:
        await self.cache.store(CacheKey(tenant, chat(text, **changes)), answer)


def chat(text: str, **changes: object) -> ChatRequest:
    request = ChatRequest("m", (Message("system", "be short"), Message("user", text)))
    return evolve(request, **changes)


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    made = Rig(tmp_path)
    await made.open()
    yield made
    await made.cache.close()


QUESTION = "what is the capital city of this large country"


async def test_the_same_request_is_found_exactly_and_keeps_its_pieces(rig: Rig) -> None:
    assert await rig.find(QUESTION) is None
    await rig.keep(QUESTION)
    hit = await rig.cache.look_up(CacheKey("a", chat(QUESTION)))
    assert hit is not None and hit.kind == "exact"
    assert hit.answer == ANSWER


async def test_the_streaming_shape_is_no_part_of_the_key(rig: Rig) -> None:
    await rig.keep(QUESTION, stream=True, include_usage=True)
    assert await rig.find(QUESTION) == "exact"


async def test_a_near_question_is_answered_and_counted(rig: Rig) -> None:
    await rig.keep(QUESTION)
    assert await rig.find("what is the capital city of this large country please") == "semantic"
    assert rig.cache.counts.semantic == 1


@pytest.mark.parametrize(
    "other",
    [
        "what is not the capital city of this large country",
        "what is the capital city of this large country in 1950",
        "what is the capital city of this small country",
    ],
)
async def test_a_near_question_that_asks_something_else_is_a_miss(rig: Rig, other: str) -> None:
    await rig.keep(QUESTION)
    assert await rig.find(other) is None
    assert sum(rig.cache.counts.near_misses.values()) == 1


async def test_unrelated_questions_do_not_share_an_answer(rig: Rig) -> None:
    await rig.keep("Hello world")
    assert await rig.find("1+1") is None
    assert await rig.find("write a poem about the sea") is None


async def test_tenants_do_not_meet(rig: Rig) -> None:
    await rig.keep(QUESTION, tenant="a")
    assert await rig.find(QUESTION, tenant="b") is None
    assert await rig.find("what is the capital city of this large country please", tenant="b") is None


@pytest.mark.parametrize(
    "changes",
    [
        {"model": "other"},
        {"sampling": Sampling(temperature=0.7)},
        {"sampling": Sampling(max_tokens=5)},
        {"stop": ("\n",)},
        {"response_format": {"type": "json_object"}},
        {"tools": ({"type": "function", "function": {"name": "f"}},)},
        {"prompt": (Message("system", "be long"), Message("user", QUESTION))},
        {"prompt": (Message("user", "hi"), Message("assistant", "yes?"), Message("user", QUESTION))},
    ],
)
async def test_whatever_shapes_the_answer_is_in_the_key(rig: Rig, changes: dict[str, object]) -> None:
    await rig.keep(QUESTION)
    assert await rig.find(QUESTION, **changes) is None


@pytest.mark.parametrize(
    "answer", [evolve(ANSWER, finish="length"), evolve(ANSWER, finish="tool_calls"), evolve(ANSWER, pieces=())]
)
async def test_cut_empty_and_tool_answers_are_not_kept(rig: Rig, answer: CachedAnswer) -> None:
    await rig.keep(QUESTION, answer=answer)
    assert await rig.find(QUESTION) is None


async def test_an_old_entry_is_a_miss_and_its_vector_goes(rig: Rig) -> None:
    await rig.keep(QUESTION)
    rig.now_unix_s += 25 * 3600
    assert await rig.find(QUESTION) is None
    assert await rig.find("what is the capital city of this large country please") is None


async def test_an_entry_from_the_future_is_a_miss(rig: Rig) -> None:
    await rig.keep(QUESTION)
    rig.now_unix_s -= 3600
    assert await rig.find(QUESTION) is None


async def test_a_failing_embedder_is_a_miss_and_exact_hits_go_on(rig: Rig) -> None:
    await rig.keep(QUESTION)
    rig.embedder.failing = True
    assert await rig.find("something else") is None
    assert await rig.find(QUESTION) == "exact"
    await rig.keep("kept without a vector")
    assert await rig.find("kept without a vector") == "exact"


async def test_the_checker_has_the_last_word(tmp_path: Path) -> None:
    asked = []

    async def never(kept: str, new: str) -> bool:
        asked.append((kept, new))
        return False

    settings = CacheSettings(tmp_path, threshold=0.6, threshold_embedder="fake/1")
    cache = SemanticCache(settings, FakeEmbedder(), never)
    await cache.start()
    await cache.store(CacheKey("a", chat(QUESTION)), ANSWER)
    near = QUESTION + " please"
    assert await cache.look_up(CacheKey("a", chat(near))) is None
    assert asked == [(QUESTION, near)]
    await cache.close()


async def test_a_threshold_of_another_embedder_is_not_used(rig: Rig) -> None:
    await rig.keep(QUESTION)
    await rig.cache.close()
    rig.embedder = FakeEmbedder(name="fake/2")
    await rig.open()
    assert not rig.cache.semantic
    assert await rig.find(QUESTION + " please") is None


@pytest.mark.parametrize("flat_limit", [1000, 8])
async def test_everything_is_found_again_after_a_restart(rig: Rig, flat_limit: int) -> None:
    await rig.cache.close()
    await rig.open(flat_limit=flat_limit)
    texts = [f"question about subject{chr(97 + n // 26)}{chr(97 + n % 26)} and nothing besides" for n in range(40)]
    for text in texts:
        await rig.keep(text)
    await rig.cache.close()
    await rig.open(flat_limit=flat_limit)
    assert [await rig.find(text) for text in texts] == ["exact"] * 40
    assert [await rig.find("please " + text) for text in texts].count("semantic") >= 38


async def saved_graph(rig: Rig) -> Path:
    """Of a cache with twelve entries, closed again."""
    await rig.cache.close()
    await rig.open(flat_limit=4)
    for number in range(12):
        await rig.keep(f"question about subject{chr(97 + number)} and nothing besides")
    await rig.cache.close()
    (graph,) = rig.folder.glob("*.usearch")
    return graph


async def test_a_torn_graph_file_is_made_anew_from_the_store(rig: Rig) -> None:
    graph = await saved_graph(rig)
    graph.write_bytes(graph.read_bytes()[:200])
    await rig.open(flat_limit=4)
    assert await rig.find("please question about subjectc and nothing besides") == "semantic"


async def test_a_graph_that_was_made_anew_is_saved_at_once(rig: Rig) -> None:
    """A kill before the cache is closed costs no second making."""
    graph = await saved_graph(rig)
    graph.unlink()
    await rig.open(flat_limit=4)
    assert graph.exists()


async def test_a_lookup_behind_longer_work_of_the_caches_thread_is_a_miss(rig: Rig) -> None:
    await rig.keep(QUESTION)
    over = threading.Event()
    busy = asyncio.create_task(rig.cache._do(over.wait, 30.0))
    await asyncio.sleep(0)
    key = CacheKey("a", chat(QUESTION))
    assert await rig.cache.find(key) is None and not busy.done() and rig.cache.counts.faults == 1
    over.set()
    assert await busy and (await rig.cache.find(key)) is not None


async def test_forgetting_a_tenant_makes_no_graph_anew(rig: Rig) -> None:
    await rig.cache.close()
    await rig.open(flat_limit=4)
    texts = [f"question about subject{chr(97 + number)} and nothing besides" for number in range(20)]
    for text in texts:
        await rig.keep(text)
    made = rig.cache._index
    assert made is not None
    ((_, graph),) = made.graphs()
    before = graph._index
    assert await rig.cache.forget("a") == 20
    assert len(made) == 0 and graph._index is before and len(graph) == 20
    assert [await rig.find(text) for text in texts] == [None] * 20


async def test_eviction_keeps_what_was_used_and_the_index_whole(rig: Rig) -> None:
    await rig.cache.close()
    await rig.open(max_entries=20, flat_limit=8)
    texts = [f"question about subject{chr(97 + n // 26)}{chr(97 + n % 26)} and nothing besides" for n in range(60)]
    for number, text in enumerate(texts):
        await rig.keep(text)
        if number % 5 == 0:
            assert await rig.find(texts[0]) == "exact"
    assert await rig.find(texts[0]) == "exact"
    assert [await rig.find(text) for text in texts[-15:]] == ["exact"] * 15
    assert [await rig.find("please " + text) for text in texts[-15:]].count("semantic") >= 14
    assert [await rig.find(text) for text in texts[1:30]] == [None] * 29


async def test_a_near_entry_that_did_not_serve_is_not_kept_for_it(rig: Rig) -> None:
    await rig.cache.close()
    await rig.open(max_entries=3)
    unserved, other = f"please {QUESTION} please please", "how do bees find the way home"
    for text in (unserved, other, QUESTION):
        await rig.keep(text)
    assert await rig.find(f"{QUESTION} please") == "semantic"
    await rig.keep("when do the shops open today")
    assert await rig.find(other) == "exact"
    assert await rig.find(unserved) != "exact"


async def test_one_tenant_is_forgotten_alone(rig: Rig) -> None:
    await rig.keep(QUESTION, tenant="a")
    await rig.keep(QUESTION, tenant="b")
    assert await rig.cache.forget("a") == 1
    assert (await rig.find(QUESTION, tenant="a"), await rig.find(QUESTION, tenant="b")) == (None, "exact")


async def test_a_replaced_answer_leaves_no_second_vector(rig: Rig) -> None:
    await rig.keep(QUESTION)
    await rig.keep(QUESTION, answer=evolve(ANSWER, pieces=("Rome.",)))
    hit = await rig.cache.look_up(CacheKey("a", chat(QUESTION + " please")))
    assert hit is not None and hit.answer.pieces == ("Rome.",)
    assert rig.cache._index is not None and len(rig.cache._index) == 1


async def test_a_personal_request_is_neither_kept_nor_answered(rig: Rig) -> None:
    await rig.cache.store(CacheKey("a", chat(QUESTION), personal=True), ANSWER)
    assert await rig.find(QUESTION) is None
    await rig.keep(QUESTION)
    assert await rig.cache.find(CacheKey("a", chat(QUESTION), personal=True)) is None


def test_keys_of_two_requests_are_equal_only_if_all_is() -> None:
    def key(request: ChatRequest) -> str:
        return lookup_key(CacheKey("t", request), "e").exact

    one = chat("x", tools=({"b": 1, "a": 2},))
    assert key(one) == key(chat("x", tools=({"a": 2, "b": 1},)))
    assert key(one) != key(chat("x", tools=({"a": 2, "b": 2},)))
    assert key(chat("x")) != key(chat("y"))
    scopes = {lookup_key(CacheKey("t", chat(text)), "e").scope for text in ("x", "y")}
    assert len(scopes) == 1

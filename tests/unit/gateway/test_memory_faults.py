"""A disk that fills or breaks while the text way runs: what it remembers suffers, its answers do not."""

from __future__ import annotations

import json
import logging
import sqlite3
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from engines.catalogue import shipped_catalogue
from engines.encoder import ENCODER, TOKENIZER
from engines.fakes_text import FakeTextEngine
from engines.store import ModelStore, default_store
from gateway.context import Caller
from gateway.memory import TextMemory, remembering
from gateway.memory_settings import MemorySettings
from gateway.mount import GatewayPorts, build
from gateway.ports import Invocation, NoAudit
from gateway.result_store import SqliteResults
from gateway.settings import GatewaySettings
from gateway.targets import Target
from links.port import Mount, Request, Response
from protocol.chat import ChatRequest
from protocol.control_frames import Result
from protocol.durable import open_sqlite
from protocol.errors import ConfigError
from protocol.policy import LimitsPolicy, Policy
from protocol.policy_privacy import PrivacyPolicy
from protocol.text import Message

EXACT = MemorySettings(cache="exact")


class Records(NoAudit):
    """Keeps what is told."""

    def __init__(self) -> None:
        self.told: list[Invocation] = []

    def invocation(self, record: Invocation) -> None:
        self.told.append(record)


class House:
    """A text way over two fake engines, with a real cache and real conversations in `folder`."""

    def __init__(self, folder: Path, settings: MemorySettings = EXACT) -> None:
        self.folder = folder
        self.policy = Policy(privacy=PrivacyPolicy(local_only_labels={"data": ("secret",)}))
        self.records = Records()
        self.device, self.cloud = FakeTextEngine(answer_tokens=4), FakeTextEngine(answer_tokens=4)
        self.memory = TextMemory(settings, folder, ModelStore(folder / "models", shipped_catalogue()))
        targets = [
            Target("device", True, self.device, frozenset({"m"})),
            Target("cloud", False, self.cloud, frozenset({"m", "big"})),
        ]
        ports = GatewayPorts(
            lambda: targets, lambda: self.policy, cache=self.memory.cache,
            conversations=self.memory.conversations, audit=self.records,
        )  # fmt: skip
        self.mount: Mount = remembering(build(GatewaySettings(), ports), self.memory)

    async def ask(self, text: str, headers: dict[str, str] | None = None, **more: object) -> Response:
        turns = more.pop("messages", [{"role": "user", "content": text}])
        body = json.dumps({"model": "m", "messages": turns, "max_tokens": 8} | more).encode()
        route = next(route for route in self.mount.routes if route.path == "/v1/chat/completions")
        return await route.handle(Request("POST", route.path, headers or {}, body=body))

    def break_disk(self) -> None:
        """No table is there any more: every access fails, as on a disk that lost its pages."""
        for name in ("answers.sqlite", "conversations.sqlite"):
            db = sqlite3.connect(self.folder / name)
            for (table,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
                if not table.startswith("sqlite_"):
                    db.execute(f"DROP TABLE {table}")
            db.commit()
            db.close()

    async def close(self) -> None:
        await self.mount.stop()
        await self.device.close()
        await self.cloud.close()


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    made = House(tmp_path)
    await made.mount.start()
    yield made
    await made.close()


def text_of(response: Response) -> str:
    assert response.status == 200 and isinstance(response.body, bytes), response.body
    return str(json.loads(response.body)["choices"][0]["message"]["content"])


async def test_the_memory_that_two_copies_of_the_encoder_took_is_given_back_when_one_is_left(
    tmp_path: Path, model_file: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[bool] = []
    monkeypatch.setattr("gateway.memory.give_back", lambda: given.append(True))
    for name in (ENCODER, TOKENIZER):
        model_file(name)
    for _ in range(2):
        memory = TextMemory(MemorySettings(cache="semantic", conversations=False), tmp_path, default_store())
        await memory.start()
        await memory.close()
    assert given == [True], "a later start tries nothing"


async def test_a_cache_that_breaks_is_a_miss_and_the_record_is_written(
    house: House, caplog: pytest.LogCaptureFixture
) -> None:
    first = text_of(await house.ask("hello"))
    house.break_disk()
    with caplog.at_level(logging.WARNING):
        assert text_of(await house.ask("hello")) == first
        streamed = await house.ask("hello", stream=True)
        assert not isinstance(streamed.body, bytes)
        assert b"".join([part async for part in streamed.body]).rstrip().endswith(b"[DONE]")
    assert [record.status for record in house.records.told] == ["ok"] * 3
    assert any("fault 1 of the cache" in record.message for record in caplog.records)
    assert house.memory.cache.counts.faults >= 2  # type: ignore[attr-defined]


async def test_a_conversation_that_cannot_be_read_is_refused_and_says_what_to_do(house: House) -> None:
    text_of(await house.ask("my name is Ada", conversation_id="c"))
    house.break_disk()
    response = await house.ask("what is my name?", conversation_id="c")
    assert isinstance(response.body, bytes)
    error = json.loads(response.body)["error"]
    assert (response.status, error["code"]) == (503, "over_capacity") and "conversation_id" in error["message"]
    assert str(house.folder) not in error["message"]
    assert text_of(await house.ask("what is my name?"))


async def test_a_shared_database_that_is_away_costs_only_requests_that_need_it(
    tmp_path: Path, free_port: Callable[[], int]
) -> None:
    pytest.importorskip("asyncpg")
    url = f"postgresql://m:hush@127.0.0.1:{free_port()}/d"
    house = House(tmp_path, MemorySettings(conversations_postgres=url))
    await house.mount.start()
    try:
        refused = await house.ask("and now?", conversation_id="c")
        assert isinstance(refused.body, bytes) and refused.status == 503 and int(refused.headers["retry-after"]) > 0
        assert b"hush" not in refused.body and b"without conversation_id" in refused.body
        assert text_of(await house.ask("and now?"))
    finally:
        await house.close()
    assert not (tmp_path / "conversations.sqlite").exists()


async def test_a_turn_that_cannot_be_kept_is_told_to_the_operator_only(
    house: House, caplog: pytest.LogCaptureFixture
) -> None:
    text_of(await house.ask("hi", conversation_id="c"))
    house.break_disk()
    chat = ChatRequest("m", (Message("user", "x"),))
    with caplog.at_level(logging.WARNING):
        await house.memory.conversations.closed(
            Caller(conversation_id="c"), chat, Message("assistant", "y"), "stop", "device"
        )
    assert any("is not kept" in record.message for record in caplog.records)


async def test_results_are_read_as_many_as_are_asked_for(tmp_path: Path) -> None:
    store = SqliteResults(tmp_path / "results.sqlite")
    await store.keep("t", "s", tuple(Result(seq=seq, of="x", kind="part") for seq in range(1, 8)))
    assert [result.seq for result in await store.results("t", "s", 2, 3)] == [3, 4, 5]
    assert len(await store.results("t", "s")) == 7
    await store.close()


async def test_results_of_apps_say_that_the_disk_is_at_fault(tmp_path: Path) -> None:
    store = SqliteResults(tmp_path / "results.sqlite")
    assert await store.keep("t", "s", (Result(seq=1, of="x", kind="done"),)) == 1
    db = sqlite3.connect(tmp_path / "results.sqlite")
    db.execute("DROP TABLE results")
    db.commit()
    db.close()
    with pytest.raises(ConfigError, match="cannot use the database"):
        await store.keep("t", "s", (Result(seq=2, of="x", kind="done"),))
    await store.close()


def test_a_database_is_its_owners_alone_with_its_log_and_index(tmp_path: Path) -> None:
    file = tmp_path / "new" / "x.sqlite"
    db = open_sqlite(file, ("CREATE TABLE t(a);",))
    db.execute("INSERT INTO t VALUES(1)")
    modes = {each.name: each.stat().st_mode & 0o777 for each in file.parent.iterdir()}
    assert modes == {"x.sqlite": 0o600, "x.sqlite-wal": 0o600, "x.sqlite-shm": 0o600}
    db.close()
    again = open_sqlite(file, ("CREATE TABLE t(a);",))
    again.execute("INSERT INTO t VALUES(1)")
    assert {each.stat().st_mode & 0o777 for each in file.parent.iterdir()} == {0o600}
    again.close()


@pytest.mark.parametrize("where", ["conversation_id", "user"])
async def test_half_a_surrogate_pair_in_a_name_is_a_bad_request(house: House, where: str) -> None:
    for response in (
        await house.ask("x", **{where: "\ud800"}),
        await house.ask("x", metadata={where: "\udfff"}),
        await house.ask("x", metadata={"colour": "\udfff"}),
        await house.ask("x", {f"x-midstream-{where.removesuffix('_id')}": "caf\udce9"}),
    ):
        assert isinstance(response.body, bytes)
        assert response.status == 400 and b"surrogate" in response.body


async def test_a_conversation_with_a_turn_that_had_to_stay_stays(house: House) -> None:
    labels = {"x-midstream-labels": "data=secret"}
    text_of(await house.ask("the code is 4711", labels, conversation_id="c"))
    house.policy = Policy(privacy=house.policy.privacy, dispatch=type(house.policy.dispatch)(start="cloud"))
    response = await house.ask("and now?", conversation_id="c")
    assert text_of(response) and response.headers["x-midstream-target"] == "device"
    refused = await house.ask("and now?", conversation_id="c", model="big")
    assert refused.status == 403
    assert not house.cloud.prepared
    other = await house.ask("and now?", conversation_id="d")
    assert other.headers["x-midstream-target"] == "cloud"


async def test_a_conversation_that_has_grown_over_the_bound_says_so_and_not_that_the_turn_is_long(house: House) -> None:
    text_of(await house.ask("word " * 60, conversation_id="c"))
    house.policy = Policy(limits=LimitsPolicy(max_prompt_bytes=200))
    response = await house.ask("hi", conversation_id="c")
    assert isinstance(response.body, bytes)
    error = json.loads(response.body)["error"]
    assert (response.status, error["param"]) == (413, "conversation_id") and "another conversation_id" in error[
        "message"
    ]
    long = await house.ask("word " * 60, conversation_id="c")
    assert isinstance(long.body, bytes) and json.loads(long.body)["error"]["param"] == "messages"
    assert text_of(await house.ask("hi", conversation_id="d"))

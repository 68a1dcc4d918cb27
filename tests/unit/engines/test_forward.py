"""A foreign server is asked first, and whatever it cannot do is run here."""

from __future__ import annotations

import logging
import struct
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
from attrs import define, field

from engines.executor import BoundedExecutor
from engines.fakes_tensor import MAGIC, FakeTensorRuntime
from engines.forward import ABSENT_RETRY_S, RETRY_S, ForwardingEndpoint
from engines.pool import ModelPool
from engines.port import TensorAnswer
from protocol.errors import BadRequest, EngineError, LinkClosed, LinkTimeout, MidstreamError, NotFound
from protocol.tensors import Tensor

X = Tensor("x", "FP32", (1, 4), struct.pack("<4f", 1, 2, 3, 4))
DIGEST = "ab12cd34" + "0" * 56
TAIL = f"det-{DIGEST[:8]}__cut_007_int8"


@define
class Server:
    """A foreign server that gives no digest: answers with zeros, or with the error it was told."""

    error: MidstreamError | None = None
    asked: list[str] = field(factory=list)

    async def infer(self, model: str, inputs: Sequence[Tensor], deadline_s: float) -> TensorAnswer:
        self.asked.append(model)
        if self.error is not None:
            raise self.error
        return TensorAnswer((Tensor("y", "FP32", (1, 4), bytes(16)),), "", wait_s=0.0, compute_s=0.0, transfers=())

    def wait_s(self) -> float:
        return 7.0


@define
class Clock:
    now_s: float = 100.0

    def __call__(self) -> float:
        return self.now_s


@define
class House:
    endpoint: ForwardingEndpoint
    server: Server
    clock: Clock

    async def ran_there(self, model: str = "det") -> bool:
        (y,) = (await self.endpoint.infer(model, [X], 5.0)).outputs
        return bytes(y.data) == bytes(16)


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    file = tmp_path / "double.bin"
    file.write_bytes(MAGIC)
    executor, pool, server, clock = BoundedExecutor("forward", 1, 0.5), ModelPool(1 << 30), Server(), Clock()
    endpoint = ForwardingEndpoint(None, pool, executor, {"fake": FakeTensorRuntime()}, clock=clock, server=server)
    for name in ("det", TAIL):
        endpoint.register(name, file, DIGEST, "fake")
    endpoint.register("plain", file, None, "fake")
    yield House(endpoint, server, clock)
    await endpoint.close()
    executor.close()
    pool.close()


async def test_names_there_carry_the_digest_and_answers_get_it(house: House) -> None:
    assert await house.ran_there() and await house.ran_there(TAIL)
    assert house.server.asked == [f"det-{DIGEST[:8]}", TAIL]
    assert (await house.endpoint.infer("det", [X], 5.0)).digest == DIGEST


async def test_models_that_nobody_exported_run_here(house: House) -> None:
    assert not await house.ran_there("plain")
    house.endpoint.unregister("det")
    with pytest.raises(NotFound):
        await house.ran_there("det")
    assert house.server.asked == []


async def test_a_server_that_is_down_is_left_alone_and_said_once(
    house: House, caplog: pytest.LogCaptureFixture
) -> None:
    house.server.error = LinkClosed("gone")
    with caplog.at_level(logging.WARNING):
        assert not await house.ran_there()
        assert house.endpoint.wait_s() < 7.0
        assert not await house.ran_there(TAIL)
        assert len(house.server.asked) == 1
        house.clock.now_s += RETRY_S
        assert not await house.ran_there()
        house.server.error = None
        house.clock.now_s += RETRY_S
        assert await house.ran_there()
    assert house.endpoint.wait_s() == 7.0
    assert [r.getMessage().partition(":")[0] for r in caplog.records] == [
        "the tensor server does not answer, models run here meanwhile",
        "the tensor server answers again",
    ]


async def test_a_client_in_a_hurry_closes_the_server_for_nobody(house: House) -> None:
    house.server.error = LinkTimeout("no answer")
    await house.endpoint.infer("det", [X], 0.5)
    house.server.error = None
    assert await house.ran_there()
    house.server.error = LinkTimeout("no answer")
    assert not await house.ran_there()
    house.server.error = None
    assert not await house.ran_there()  # that one had time enough to tell


async def test_a_model_that_the_server_lacks_runs_here_and_closes_no_other(house: House) -> None:
    house.server.error = NotFound("unknown model")
    assert not await house.ran_there()
    house.server.error = None
    assert not await house.ran_there() and await house.ran_there(TAIL)
    house.clock.now_s += ABSENT_RETRY_S
    assert await house.ran_there()


@pytest.mark.parametrize("error", [BadRequest("odd shape"), EngineError("out of memory")])
async def test_what_the_server_refuses_the_run_here_decides(house: House, error: MidstreamError) -> None:
    house.server.error = error
    assert not await house.ran_there()
    with pytest.raises(BadRequest):
        await house.endpoint.infer("det", [Tensor("z", "FP32", (1, 4), X.data)], 5.0)

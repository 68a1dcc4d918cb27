"""A whole agent whose provider is bad in each way, under a signed policy that prefers the cloud: one chat each."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agent.config import AgentConfig, load
from agent.emitting import human_lines
from agent.enrolment import join
from agent.identity import IdentityStore
from protocol.decode import encode
from protocol.durable import write_durable
from protocol.events import TextDone
from protocol.policy import DispatchPolicy, MigrationPolicy, Policy
from protocol.signature import encode_envelope, sign
from tests.route.bad_server import BadServer, Way, bad_server
from tests.unit.agent.coordinators import JoinableCoordinator
from tests.unit.agent.houses import RunningHouse

MODEL = "smollm2-135m"
COUNT = 56
POLICY = Policy(
    fleet="default",
    version=1,
    dispatch=DispatchPolicy(start="cloud"),
    migration=MigrationPolicy(enabled=False, stall_s=1.0),
)


def configured(folder: Path, models: Path, url: str) -> AgentConfig:
    """An agent with the model here, and at a provider that is asked once."""
    file = folder / "agent.toml"
    file.write_text(
        f'[[provider]]\nname = "cloud"\nkind = "openai_compat"\nbase_url = "{url}"\nkeyless = true\nattempts = 1\n'
        f'[provider_models]\n{MODEL} = "cloud/{MODEL}"\n'
    )
    chosen: dict[str, Any] = {"state_dir": str(folder / "agent"), "models_dir": str(models), "device_id": "pi"}
    chosen |= {"port": 0, "mdns": False, "benchmark": False, "text_model": MODEL, "text_threads": 1}
    return load({**chosen, "context_tokens": 512}, environ={"HOME": str(folder)}, file=file)


async def prepared(folder: Path, models: Path, url: str) -> AgentConfig:
    """Joined once and given the policy; its coordinator is gone since."""
    config = configured(folder, models, url)
    coordinator = JoinableCoordinator(folder / "coordinator")
    await coordinator.start()
    await join(IdentityStore(config.identity_dir), "pi", coordinator.token())
    await coordinator.stop()
    key = coordinator.authority.policy_key
    write_durable(config.state_dir / "policy.json", encode_envelope(sign(encode(POLICY), key.seed, key.key_id)))
    return config


async def chat(house: RunningHouse) -> dict[str, Any]:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Tell me a long story about the Rhine."}]}
    body |= {"max_tokens": COUNT, "temperature": 0}
    headers = {"content-type": "application/json"}
    reply = await house.link.exchange("/v1/chat/completions", headers, json.dumps(body).encode(), 40)
    assert reply.status == 200, reply.body
    return dict(json.loads(reply.body))


@pytest.mark.parametrize("way", ["dead", pytest.param("slow", marks=pytest.mark.slow), "lying", "cut"])
async def test_a_chat_through_the_agent_is_whole_and_told_in_one_line(
    model_file: Callable[[str], Path], tmp_path: Path, way: str
) -> None:
    kind: Way = "slow" if way == "dead" else way  # type: ignore[assignment]
    server: BadServer
    async with bad_server(kind) as server:
        url = "http://127.0.0.1:9" if way == "dead" else server.url
        config = await prepared(tmp_path, model_file(MODEL).parent.parent, url)
        async with RunningHouse(config) as house:
            await house.until(lambda: house.house.texts.device is not None, 40)
            assert house.house.holder.current().dispatch.start == "cloud"
            answer = await chat(house)
            assert answer["choices"][0]["finish_reason"] == "length"
            assert answer["usage"]["completion_tokens"] == COUNT
            lines: list[str] = []
            show = human_lines(lines.append)
            for event in house.console.events.events:
                show(event)
            assert len(lines) == 1 and "lost" in lines[0] and "device" in lines[0], lines
            [told] = [event for event in house.console.events.events if isinstance(event, TextDone)]
            sides = [side for side, _ in told.sides]
            assert sides == (["cloud:cloud", "device"] if way == "cut" else ["device"])
            assert way == "dead" or server.asked

"""The status document names a text model only while something can answer with it."""

from __future__ import annotations

from pathlib import Path

from engines.peer import PeerEngine
from tests.unit.agent.houses import RunningHouse, config_for


async def test_a_cloud_text_model_goes_with_the_cloud(tmp_path: Path) -> None:
    async with RunningHouse(config_for(tmp_path)) as agent:
        house = agent.house
        house.texts._at_cloud["words"] = PeerEngine(lambda: house.cloud.open("/"), model="words")
        house.cloud.mark_available()
        found = await agent.status()
        assert (found["text_model"], found["text_place"]) == ("words", "cloud")
        house.cloud.available = False
        found = await agent.status()
        assert (found["text_model"], found["text_place"]) == (None, None)

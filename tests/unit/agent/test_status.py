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


async def test_an_agent_warns_while_its_semantic_cache_finds_exact_questions_only(tmp_path: Path) -> None:
    async with RunningHouse(config_for(tmp_path, cache="semantic", models_dir=str(tmp_path / "models"))) as agent:
        await agent.until(lambda: any(one.name == "cache" for one in agent.house.health.warnings))
        warnings = {one["name"]: one["text"] for one in (await agent.status())["warnings"]}
        assert "only exact cache hits" in warnings["cache"] and "midstream models pull" in warnings["cache"]

"""Providers as configuration: one line moves a model; every mistake names its field."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from agent.config import load
from cloud_stub.config import load_config
from engines.key_vault import KeyVault
from gateway.context import Constraints
from gateway.provider_house import ProviderHouse
from gateway.providers import ProviderSettings, read_providers
from links.memory import MemoryLink
from protocol.errors import ConfigError

TABLES = """
[[provider]]
name = "deepseek"

[[provider]]
name = "home"
kind = "vllm"
base_url = "http://127.0.0.1:8000/"
keyless = true

[provider_models]
chat = "deepseek/deepseek-chat"
big = ["home/org/Qwen3-32B", "deepseek/deepseek-reasoner", "home/other"]
cheap = { at = "home/small", usd_per_million_prompt_tokens = 0.5, usd_per_million_completion_tokens = 2.0 }
"""


def house_of(tmp_path: Path, text: str = TABLES) -> ProviderHouse:
    house = ProviderHouse(KeyVault(tmp_path), lambda settings: MemoryLink(settings.name, []))
    table = tomllib.loads(text)
    house.configure(read_providers(table.get("provider"), table.get("provider_models")))
    return house


def test_models_are_targets_in_their_order(tmp_path: Path) -> None:
    targets = house_of(tmp_path).targets()
    big = [target for target in targets if "big" in target.models]
    assert [target.name for target in big] == ["cloud:home", "cloud:deepseek", "cloud:home/other"]
    assert [target.engine.model for target in big] == ["org/Qwen3-32B", "deepseek-reasoner", "other"]  # type: ignore[attr-defined]
    assert all(not target.local for target in targets)
    cheap = next(target for target in targets if "cheap" in target.models)
    assert (cheap.price_in, cheap.price_out) == (0.5e-6, 2.0e-6)
    assert all(Constraints(False, frozenset({"cloud"})).allows(target.name, target.local) for target in targets)
    assert Constraints(False, frozenset({"cloud:home"})).allows("cloud:home", False)
    assert not Constraints(False, frozenset({"cloud:home"})).allows("cloud:deepseek", False)
    assert not Constraints(True, None).allows("cloud:home", False)


def test_one_line_moves_a_model(tmp_path: Path) -> None:
    house = house_of(tmp_path)
    link = house.link("home")
    moved = tomllib.loads(TABLES.replace('chat = "deepseek/deepseek-chat"', 'chat = "home/qwen"'))
    house.configure(read_providers(moved["provider"], moved["provider_models"]))
    chat = next(target for target in house.targets() if "chat" in target.models)
    assert chat.name == "cloud:home" and chat.engine.codec.vendor.name == "vllm"  # type: ignore[attr-defined]
    assert house.link("home") is link, "a provider that stays keeps its connections and its breaker"


async def test_a_changed_provider_is_dialled_anew_and_closed_with_the_house(tmp_path: Path) -> None:
    house = house_of(tmp_path)
    before = house.link("home")
    changed = tomllib.loads(TABLES.replace("8000", "9000"))
    house.configure(read_providers(changed["provider"], changed["provider_models"]))
    assert house.link("home") is not before
    await house.close()


def test_both_houses_read_the_same_tables(tmp_path: Path) -> None:
    file = tmp_path / "house.toml"
    file.write_text(TABLES)
    mine = load({}, environ={"HOME": str(tmp_path)}, file=file).providers
    theirs = load_config({"config": str(file)}, {"HOME": str(tmp_path)}).providers
    assert mine == theirs and set(mine.models) == {"chat", "big", "cheap"}
    assert mine.providers["deepseek"].base_url == "https://api.deepseek.com"
    assert mine.providers["home"].base_url == "http://127.0.0.1:8000"


@pytest.mark.parametrize(
    ("providers", "models", "field"),
    [
        ([{"name": "x"}], {}, "provider[0].kind"),
        ([{"name": "vllm"}], {}, "provider[0].base_url"),
        ([{"name": "openai", "base_url": "ftp://x"}], {}, "provider[0].base_url"),
        ([{"name": "openai", "base_url": "https://user:pw@x"}], {}, "provider[0].base_url"),
        ([{"name": "openai", "key": "sk-1"}], {}, "provider[0].key"),
        ([{"name": "openai", "attempts": 0}], {}, "provider[0].attempts"),
        ([{"name": "openai", "first_byte_s": "1"}], {}, "provider[0].first_byte_s"),
        ([{"name": "Open AI"}], {}, "provider[0].name"),
        ([{"name": "openai"}, {"name": "openai"}], {}, "provider[1].name"),
        ("openai", {}, "provider"),
        ([], {"m": "openai/x"}, "provider_models.m"),
        ([{"name": "openai"}], {"m": "openai"}, "provider_models.m"),
        ([{"name": "openai"}], {"m": []}, "provider_models.m"),
        ([{"name": "openai"}], {"m": {"at": "openai/x", "price": 1}}, "provider_models.m.price"),
        (
            [{"name": "openai"}],
            {"m": {"at": "openai/x", "usd_per_million_prompt_tokens": 0.0000005}},
            "provider_models.m.usd_per_million_prompt_tokens",
        ),
    ],
)
def test_mistakes_name_their_field(providers: Any, models: Any, field: str) -> None:
    """L7 BerriAI/litellm#22726: a price per token is not taken for one per million."""
    with pytest.raises(ConfigError) as caught:
        read_providers(providers, models)
    assert caught.value.field == field
    assert caught.value.next_step


def test_a_provider_has_a_default_for_everything_but_its_name() -> None:
    one = read_providers([{"name": "anthropic"}], {}).providers["anthropic"]
    assert one == ProviderSettings("anthropic", kind="anthropic", base_url="https://api.anthropic.com")

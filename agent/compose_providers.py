"""Composition of the agent's providers: their links, their sealed keys, their models as targets."""

from __future__ import annotations

from agent.config import AgentConfig
from engines.key_vault import KeyVault
from gateway.provider_house import ProviderHouse
from gateway.providers import ProviderSettings
from links.http_lean import LeanHttpLink

PROVIDERS_DIR = "providers"
KEEP_IDLE_S = 20.0
"""Vendors keep idle connections for a minute or more."""


def open_providers(config: AgentConfig) -> ProviderHouse:
    """What the configuration names; nothing is dialled before the first request."""
    house = ProviderHouse(KeyVault(config.state_dir / PROVIDERS_DIR), _link)
    house.configure(config.providers)
    return house


def _link(settings: ProviderSettings) -> LeanHttpLink:
    return LeanHttpLink(
        settings.name,
        settings.base_url,
        connect_s=settings.connect_s,
        connections=settings.max_open,
        keep_idle_s=KEEP_IDLE_S,
    )

"""Providers at work: a link, keys and a breaker for each, an engine for each model there, targets for the gateway."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from attrs import define, field

from engines.key_vault import KeyVault
from engines.provider_link import Phases, ProviderLink
from engines.retrying import RetryRules
from engines.upstream import UpstreamEngine
from gateway.providers import NO_PROVIDERS, Place, Providers, ProviderSettings
from gateway.targets import Target
from links.port import Link
from protocol.clock import Clock
from protocol.provider_kinds import codec_of

SIDE = "cloud"
"""A provider is a part of the cloud: rules for that side mean it too."""

MakeLink = Callable[[ProviderSettings], Link]
"""The plain way to a provider, made by the composition."""


def target_name(place: Place) -> str:
    """`cloud:PROVIDER`."""
    return f"{SIDE}:{place.provider}"


@define
class ProviderHouse:
    """Everything that is configured, opened as it is needed. `configure` may be called while requests run."""

    vault: KeyVault
    make_link: MakeLink
    clock: Clock = time.monotonic
    _providers: Providers = field(default=NO_PROVIDERS, init=False)
    _links: dict[str, ProviderLink] = field(factory=dict, init=False)
    _engines: dict[tuple[str, str], UpstreamEngine] = field(factory=dict, init=False)
    _targets: tuple[Target, ...] = field(default=(), init=False)
    _retired: list[ProviderLink] = field(factory=list, init=False)

    def configure(self, providers: Providers) -> None:
        """These from now on. A provider whose settings stay keeps its connections, breaker and cool-downs."""
        for name, settings in self._providers.providers.items():
            if providers.providers.get(name) != settings:
                # Requests that run go on over it; it is closed with the house.
                self._retired += [link] if (link := self._links.pop(name, None)) is not None else []
                self._engines = {key: engine for key, engine in self._engines.items() if key[0] != name}
        self._providers = providers
        self._targets = tuple(
            target for model, places in providers.models.items() for target in self._of(model, places)
        )

    def targets(self) -> Sequence[Target]:
        """What can answer, each model's places in their order."""
        return self._targets

    def link(self, provider: str) -> ProviderLink:
        """The provider's link. Raises KeyError for one that is not configured."""
        found = self._links.get(provider)
        if found is None:
            found = self._links[provider] = self._open(self._providers.providers[provider])
        return found

    async def close(self) -> None:
        """End what runs, then hang up."""
        for engine in self._engines.values():
            await engine.close()
        for link in (*self._links.values(), *self._retired):
            await link.close()
        self._links.clear()
        self._retired.clear()
        self._engines.clear()

    def _of(self, model: str, places: Sequence[Place]) -> tuple[Target, ...]:
        found: dict[str, Target] = {}
        for place in places:
            name = target_name(place)
            # Twice at one provider: the second one is told apart by the model's name there.
            name = f"{name}/{place.model}" if name in found else name
            engine = self._engine(place)
            found[name] = Target(
                name,
                False,
                engine,
                frozenset({model}),
                relay=engine,
                price_in=place.price.usd_per_million_prompt_tokens / 1e6,
                price_out=place.price.usd_per_million_completion_tokens / 1e6,
            )
        return tuple(found.values())

    def _engine(self, place: Place) -> UpstreamEngine:
        key = (place.provider, place.model)
        found = self._engines.get(key)
        if found is None:
            settings = self._providers.providers[place.provider]
            found = self._engines[key] = UpstreamEngine(
                self.link(place.provider),
                place.model,
                codec=codec_of(settings.kind),
                context_tokens=settings.context_tokens,
                max_open=settings.max_open,
                silence_s=max(settings.first_byte_s, settings.between_s),
                clock=self.clock,
            )
        return found

    def _open(self, settings: ProviderSettings) -> ProviderLink:
        return ProviderLink(
            self.make_link(settings),
            codec_of(settings.kind).authorize,
            None if settings.keyless else self.vault.of(settings.name),
            Phases(settings.first_byte_s, settings.between_s, settings.total_s),
            RetryRules(attempts=settings.attempts),
            clock=self.clock,
        )

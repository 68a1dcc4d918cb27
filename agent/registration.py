"""The registration document: profile, models, versions; published again only when it changed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from attrs import evolve

from protocol.decode import encode
from protocol.device import DeviceProfile
from protocol.documents import Registration


class Registrar:
    """Builds the registration from live parts and remembers what this broker was told."""

    def __init__(
        self, profile: Callable[[], DeviceProfile], models: Callable[[], tuple[str, ...]], version: str
    ) -> None:
        self._profile = profile
        self._models = models
        self._version = version
        self._told = ""

    def news(self, epoch: int, policy_version: int) -> bytes | None:
        """The document, or None when what matters is as it was told before (the epoch alone does not matter)."""
        document = Registration(
            profile=self._profile(),
            epoch=epoch,
            version=self._version,
            models=self._models(),
            policy_version=policy_version,
        )
        mark = hashlib.sha256(encode(evolve(document, epoch=0))).hexdigest()
        if mark == self._told:
            return None
        self._told = mark
        return encode(document)

    def forget(self) -> None:
        """The broker may have lost what it was told."""
        self._told = ""

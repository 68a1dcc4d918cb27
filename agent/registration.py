"""The registration document: profile, models, versions; bounded, and published again only when it changed."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable

from attrs import evolve, frozen

from protocol.decode import encode
from protocol.device import DeviceProfile, Measured
from protocol.documents import Registration
from protocol.topics import MAX_PAYLOAD_BYTES

log = logging.getLogger("midstream.agent.control")


@frozen
class News:
    """A registration that was not told yet. `mark` identifies what matters in it (the epoch alone does not)."""

    document: bytes
    mark: str


class Registrar:
    """Builds the registration from live parts and remembers what this broker was told."""

    def __init__(
        self,
        profile: Callable[[], DeviceProfile],
        models: Callable[[], tuple[str, ...]],
        version: str,
        max_bytes: int = MAX_PAYLOAD_BYTES,
    ) -> None:
        self._profile = profile
        self._models = models
        self._version = version
        self._max_bytes = max_bytes
        self._told = ""
        self._left_out = 0

    def news(self, epoch: int, policy_version: int) -> News | None:
        """The document, or None when what matters is as it was told before."""
        document = bounded(
            Registration(
                profile=self._profile(),
                epoch=epoch,
                version=self._version,
                models=self._models(),
                policy_version=policy_version,
            ),
            self._max_bytes,
        )
        self._say_left_out(document.profile.measured_left_out)
        mark = hashlib.sha256(encode(evolve(document, epoch=0))).hexdigest()
        return None if mark == self._told else News(encode(document), mark)

    def told(self, news: News) -> None:
        """It was taken for sending: the same is no news from now on."""
        self._told = news.mark

    def forget(self) -> None:
        """The broker may have lost what it was told."""
        self._told = ""

    def _say_left_out(self, rows: int) -> None:
        if rows != self._left_out:
            self._left_out = rows
            log.warning("the registration leaves out %d measurements: a document has at most %d bytes",
                        rows, self._max_bytes)  # fmt: skip


async def keep_registered(
    offers: Callable[[], tuple[str, ...]], register: Callable[[], Awaitable[None]], look_s: float
) -> None:
    """Call `register` whenever `offers` became another; ends by cancellation.

    Models come by a pull, with a bundle, or when a slow engine has started: nothing says so, and nobody waits for it.
    """
    told = offers()
    while True:
        await asyncio.sleep(look_s)
        found = offers()
        if found != told:
            told = found
            await register()


def bounded(registration: Registration, max_bytes: int) -> Registration:
    """The same within `max_bytes`, without the measurements of least use to a reader; says how many were left out.

    What remains too large without any measurement is returned as it is: the channel refuses it by name.
    """
    if len(encode(registration)) <= max_bytes:
        return registration
    rows = registration.profile.measured
    useful_first = sorted(range(len(rows)), key=lambda at: _rank(rows[at]))
    fits, too_many = 0, len(rows)
    while too_many - fits > 1:
        half = (fits + too_many) // 2
        if len(encode(_with(registration, useful_first[:half]))) <= max_bytes:
            fits = half
        else:
            too_many = half
    return _with(registration, useful_first[:fits])


def _with(registration: Registration, kept: list[int]) -> Registration:
    profile = registration.profile
    rows = tuple(profile.measured[at] for at in sorted(kept))
    return evolve(
        registration, profile=evolve(profile, measured=rows, measured_left_out=len(profile.measured) - len(rows))
    )


def _rank(row: Measured) -> int:
    """Whole runs say what a device can do; heads are many and only its own planner needs them all."""
    if row.what.startswith("head:"):
        return 2
    return 1 if row.what == "load" else 0

"""What was learnt of each link over each network: kept over restarts and while the device is on another network."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from attrs import define, evolve, frozen

from links.local_address import local_network
from netprobe.probe import LinkProbe, UnderWay
from protocol.clock import Clock, WallClock
from protocol.decode import check_schema, decode, encode
from protocol.durable import read_durable, write_durable
from protocol.errors import MidstreamError
from protocol.link_memory import LINKS_SCHEMA, KeptLink, LinksDocument, PastLink

log = logging.getLogger("midstream.agent.links")

MAX_KEPT = 8
MAX_FILE_BYTES = 64 << 10
# An SD card wears out by writes: at most six files of some kilobytes in an hour.
KEEP_S = 600.0
# Between two looks at the route, which cost some microseconds each.
LOOK_S = 1.0
# A month: what is this old, or of unknown age, is believed until the first transfer that contradicts it.
OLD_S = 30 * 86_400.0


@frozen
class _Stored:
    """Something that was learnt, as of monotonic `at_s`, and then already `older_s` older."""

    past: PastLink
    at_s: float
    older_s: float = 0.0


@define
class _Led:
    host: str
    port: int
    way: str


class LinkMemory:
    """Leads the probe's links from network to network. For one event loop.

    Args:
        path: the file; losing it costs a few transfers' worth of learning.
        network: the local network that leads to (host, port), None without one (links.local_address.local_network).
    """

    def __init__(
        self,
        path: Path,
        probe: LinkProbe,
        clock: Clock,
        wall: WallClock,
        network: Callable[[str, int], str | None] = local_network,
    ) -> None:
        self._path = path
        self._probe = probe
        self._clock = clock
        self._wall = wall
        self._network = network
        self._led: dict[str, _Led] = {}
        self._stored: dict[tuple[str, str], _Stored] = self._read()
        self._looked_s = float("-inf")
        self._kept_taken = probe.taken

    def lead(self, link: str, host: str, port: int, under_way: UnderWay) -> None:
        """`link` leads to host:port from now on. What was learnt of the same way before is what is known of it."""
        self._go(link, _Led(host, port, _way(host, port, self._network(host, port))))
        self._probe.renewed(link)
        self._probe.watch(link, under_way)

    def look(self) -> None:
        """Notice that the device is on another network; cheap, ask it before each sample and each view."""
        now_s = self._clock()
        if now_s - self._looked_s < LOOK_S:
            return
        self._looked_s = now_s
        for link, led in tuple(self._led.items()):
            network = self._network(led.host, led.port)
            if network is not None:  # without any route there is nothing to learn of a new one either
                self._go(link, evolve(led, way=_way(led.host, led.port, network)))

    async def run(self) -> None:
        """Keep what is new from time to time, until cancelled."""
        while True:
            await asyncio.sleep(KEEP_S)
            await self.keep()

    async def keep(self) -> None:
        """Write the file if transfers were seen since the last time. A full disk is logged, not raised."""
        taken = self._probe.taken
        if taken == self._kept_taken:
            return
        data = encode(self._document())
        try:
            await asyncio.to_thread(write_durable, self._path, data)
            self._kept_taken = taken
        except MidstreamError as err:
            log.warning("what was learnt of the links was not kept: %s", err)

    def _go(self, link: str, led: _Led) -> None:
        before = self._led.get(link)
        self._led[link] = led
        if before is not None and before.way == led.way:
            return
        now_s = self._clock()
        if before is not None:
            log.info("the link %s leads another way: %s", link, led.way)
            self._store((link, before.way), _Stored(self._probe.past(link), now_s))
        known = self._stored.pop((link, led.way), None)
        if known is not None:
            self._probe.recall(link, known.past, known.older_s + now_s - known.at_s)
        else:
            self._probe.reset(link)

    def _store(self, key: tuple[str, str], stored: _Stored) -> None:
        self._stored[key] = stored
        while len(self._stored) > MAX_KEPT:
            del self._stored[next(iter(self._stored))]

    def _document(self) -> LinksDocument:
        now_s, wall = self._clock(), self._wall()
        here = [KeptLink(link, led.way, 0.0, self._probe.past(link)) for link, led in self._led.items()]
        away = [
            KeptLink(link, way, min(OLD_S, stored.older_s + now_s - stored.at_s), stored.past)
            for (link, way), stored in reversed(self._stored.items())
        ]
        return LinksDocument(round(wall.unix_s, 1), wall.trusted, (*here, *away)[:MAX_KEPT])

    def _read(self) -> dict[tuple[str, str], _Stored]:
        try:
            held = read_durable(self._path, _parse)
        except MidstreamError as err:
            log.warning("what was learnt of the links is not read: %s", err)
            return {}
        if held is None:
            if self._path.exists():
                log.warning("what was learnt of the links is not read: %s is damaged or foreign", self._path)
            return {}
        now_s, wall = self._clock(), self._wall()
        known_age = wall.trusted and held.clock_trusted and wall.unix_s >= held.saved_unix_s
        since_s = min(OLD_S, wall.unix_s - held.saved_unix_s) if known_age else OLD_S
        return {
            (kept.link, kept.way): _Stored(kept.past, now_s, since_s + max(0.0, kept.age_s))
            for kept in reversed(held.links[:MAX_KEPT])
        }


def _way(host: str, port: int, network: str | None) -> str:
    return f"{host}:{port} from {network or 'nowhere'}"


def _parse(data: bytes) -> LinksDocument:
    document = decode(LinksDocument, data, what="links.json", max_bytes=MAX_FILE_BYTES)
    check_schema(document.schema, LINKS_SCHEMA)
    return document

"""The mDNS advertisement: an accelerator of discovery, never on the way to ready and never fatal."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence

from links.port import Browser
from protocol.errors import MidstreamError

log = logging.getLogger("midstream.coordinator.advert")

SERVICE_TYPE = "_midstream._tcp"
TXT_VERSION = "1"
PROTOCOL_VERSION = "1"
FINGERPRINT_CHARS = 16
RETRY_S = (5.0, 30.0, 300.0)
"""Pauses after a failure: an interface may come up later; the last one repeats."""


def txt_record(name: str, fleet: str, ca_fingerprint: str, broker_port: int) -> dict[str, str]:
    """Public facts only. fp: the first 16 hex digits of the CA's fingerprint; bp: the broker's port."""
    return {
        "txtvers": TXT_VERSION,
        "id": name,
        "v": PROTOCOL_VERSION,
        "fl": fleet,
        "fp": ca_fingerprint[:FINGERPRINT_CHARS],
        "bp": str(broker_port),
    }


def instance_name(name: str, fleet: str) -> str:
    """Unique per coordinator and fleet: two instances of one name would evict each other's records."""
    return f"midstream {fleet} {name}"[:63]


async def advertise(
    browser: Browser,
    instance: str,
    port: int,
    txt: Mapping[str, str],
    on_done: Callable[[str], None] = lambda _: None,
    retry_s: Sequence[float] = RETRY_S,
) -> None:
    """Announce until it works, then return. Only cancellation and bugs leave this function."""
    attempt = 0
    while True:
        try:
            used = await browser.advertise(SERVICE_TYPE, instance, port, txt)
        except MidstreamError as err:
            pause_s = retry_s[min(attempt, len(retry_s) - 1)]
            (log.warning if attempt == 0 else log.debug)("mDNS: %s; again in %.0f s", err, pause_s)
            attempt += 1
            await asyncio.sleep(pause_s)
            continue
        log.info("announced by mDNS as %r", used)
        on_done(used)
        return

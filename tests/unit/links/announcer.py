"""Announces one service until its standard input ends: `announcer.py TYPE INSTANCE PORT ADDRESS key=value ...`."""

from __future__ import annotations

import asyncio
import sys

from links.mdns import ZeroconfBrowser


async def main(service_type: str, instance: str, port: str, address: str, *pairs: str) -> None:
    browser = ZeroconfBrowser([address])
    txt = dict(pair.split("=", 1) for pair in pairs)
    print(await browser.advertise(service_type, instance, int(port), txt), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await browser.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))

"""Which of this machine's networks leads to a far end.

Nothing is sent: connecting a datagram socket only picks a route.
"""

from __future__ import annotations

import ipaddress
import socket
from contextlib import suppress

# A documentation address (RFC 5737): its route is the default one. Names are not looked up for this.
_ANYWHERE = "192.0.2.1"


def local_network(host: str, port: int) -> str | None:
    """The local IPv4 address, or the /64 prefix of the local IPv6 address, that packets to `host` leave from.

    IPv6 hosts change the rest of their address daily (RFC 8981), which is no other network. None while no route leads
    there.
    """
    with suppress(OSError, ValueError):
        return _network(_source(host if _is_address(host) else _ANYWHERE, port))
    return None


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _source(address: str, port: int) -> str:
    family, kind, _, _, target = socket.getaddrinfo(
        address, port, type=socket.SOCK_DGRAM, flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
    )[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


def _network(address: str) -> str:
    parsed = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(parsed, ipaddress.IPv6Address) and not parsed.is_loopback:
        return str(ipaddress.ip_network((parsed, 64), strict=False))
    return str(parsed)

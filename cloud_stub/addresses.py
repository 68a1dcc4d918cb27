"""Where devices may reach this machine: configured addresses, else what the host itself shows. Never a proof."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import Sequence

from cloud_stub.config import CoordinatorConfig

ANY = ("0.0.0.0", "::", "")
MAX_ADDRESSES = 8
_PROBES = ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1"))
"""Documentation networks (RFC 5737, RFC 3849); connecting a datagram socket sends nothing, it only picks a route."""


def advertised(config: CoordinatorConfig) -> tuple[str, ...]:
    """Addresses for join strings, `_coord/state` and the certificate; the best one first."""
    if config.addresses:
        return config.addresses
    if config.host not in ANY:
        return (config.host,)
    found = dict.fromkeys([*_routed(), *_named(), "127.0.0.1"])
    return tuple(found)[:MAX_ADDRESSES]


def local_url_host(host: str) -> str:
    """The host for a URL by which this machine reaches its own server."""
    if host in ANY:
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host


def _routed() -> Sequence[str]:
    found = []
    for family, target in _PROBES:
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((target, 9))
            found.append(str(probe.getsockname()[0]))
    return [text for text in found if _usable(text)]


def _named() -> Sequence[str]:
    with contextlib.suppress(OSError):
        rows = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
        return [str(row[4][0]) for row in rows if _usable(str(row[4][0]))]
    return []


def _usable(text: str) -> bool:
    address = ipaddress.ip_address(text.partition("%")[0])
    return not (address.is_loopback or address.is_link_local or address.is_unspecified)

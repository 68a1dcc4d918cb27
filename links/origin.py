"""Pure check of Host and Origin for a loopback API, against web pages and DNS rebinding."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from urllib.parse import urlsplit

from attrs import frozen


@frozen
class Refusal:
    """Why a request was refused: the header at fault, a message, and what to do."""

    header: str
    message: str
    next_step: str


def is_loopback(host: str) -> bool:
    """True for localhost, names under .localhost and loopback addresses (brackets allowed)."""
    name = host.strip("[]").rstrip(".").lower()
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def check_origin(headers: Mapping[str, str], port: int) -> Refusal | None:
    """None when the request may come in, else why not.

    Args:
        headers: names in lower case.
        port: the port this server listens on.
    """
    host = headers.get("host", "")
    if not _is_ours(host, port):
        return Refusal(
            "host",
            f"this API answers on loopback only, not as {host[:100]!r}",
            f"call it as http://127.0.0.1:{port}",
        )
    origin = headers.get("origin")
    if origin is not None and not _is_loopback_url(origin):
        return Refusal(
            "origin",
            f"web pages of {origin[:100]!r} may not call this API",
            "call it from a program on this machine, or from a page served on localhost",
        )
    if headers.get("sec-fetch-site") == "cross-site":
        return Refusal("sec-fetch-site", "web pages of other sites may not call this API", "call it from a program")
    return None


def _is_ours(host: str, port: int) -> bool:
    try:
        parts = urlsplit(f"//{host}")
        found = parts.port if parts.port is not None else 80
    except ValueError:
        return False
    plain = parts.username is None and not parts.path and not parts.query
    return plain and parts.hostname is not None and is_loopback(parts.hostname) and found == port


def _is_loopback_url(origin: str) -> bool:
    try:
        parts = urlsplit(origin)
        return parts.scheme in ("http", "https") and parts.hostname is not None and is_loopback(parts.hostname)
    except ValueError:
        return False

"""Settings of WebRTC data channels, and whether this machine can make any; names no library."""

from __future__ import annotations

import importlib.util
import ipaddress
import re
from collections.abc import Sequence

from attrs import field, frozen

from protocol.errors import ConfigError
from protocol.extras import install_step

_SERVER = re.compile(r"(stun|turn|turns):[A-Za-z0-9.\[\]:-]{1,253}(\?transport=(udp|tcp))?")


@frozen(kw_only=True)
class WebRtcSettings:
    """servers: stun:HOST[:PORT], turn:HOST[:PORT][?transport=udp|tcp], turns:...; none is contacted unless named here.

    username, credential: for the TURN server. addresses: this machine's IP addresses to use; empty: all but loopback.
    gather_s: longest wait for the servers. connect_s: longest wait for a path to the peer.
    """

    servers: tuple[str, ...] = ()
    username: str | None = None
    credential: str | None = field(default=None, repr=False)
    addresses: tuple[str, ...] = ()
    gather_s: float = 5.0
    connect_s: float = 15.0


def check(settings: WebRtcSettings) -> WebRtcSettings:
    """`settings` if they can be used. Raises ConfigError, without the credential in its message."""
    for server in settings.servers:
        if not _SERVER.fullmatch(server):
            raise ConfigError(
                f"{server[:80]!r} is not a STUN or TURN server",
                next_step="write stun:HOST:PORT or turn:HOST:PORT?transport=udp (or tcp), turns:HOST:PORT",
                field="webrtc_servers",
            )
    turns = [server for server in settings.servers if server.startswith("turn")]
    # The library uses the first of each kind and would drop others in silence.
    if len(turns) > 1 or len(settings.servers) - len(turns) > 1:
        raise ConfigError(
            "one STUN and one TURN server can be used", next_step="name one of each", field="webrtc_servers"
        )
    if turns and not (settings.username and settings.credential):
        raise ConfigError(
            "a TURN server needs a user name and a credential",
            next_step="set webrtc_username, and webrtc_credential in the file or the environment",
            field="webrtc_credential",
        )
    check_addresses(settings.addresses)
    return settings


def check_addresses(addresses: Sequence[str]) -> None:
    """Raises ConfigError for anything but IP addresses."""
    for text in addresses:
        try:
            ipaddress.ip_address(text)
        except ValueError as err:
            raise ConfigError(
                f"{text[:80]!r} is not an IP address",
                next_step="name addresses of this machine",
                field="webrtc_addresses",
            ) from err


def installed() -> bool:
    """Whether the extra is here; imports nothing."""
    return importlib.util.find_spec("aiortc") is not None


def missing() -> ConfigError:
    """The error of a machine without the extra."""
    return ConfigError("WebRTC needs a package that is not installed", next_step=install_step("webrtc"), field="webrtc")

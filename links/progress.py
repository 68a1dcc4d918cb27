"""How many bytes of a TCP connection the far end has acknowledged, where the system counts them (Linux 4.1 on)."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable

# struct tcp_info of linux/tcp.h: 8 single bytes, 24 words, 2 rates, then tcpi_bytes_acked.
_BYTES_ACKED = struct.Struct("@120xQ")


def acknowledged(transport: asyncio.BaseTransport | None) -> Callable[[], int | None]:
    """Counts the bytes acknowledged from now on; gives None where the system does not count.

    TLS records count as they are on the wire, which is less than a hundredth more than what they carry.
    """
    sock = transport.get_extra_info("socket") if transport is not None else None
    began = _bytes_acked(sock)

    def since() -> int | None:
        now = _bytes_acked(sock)
        return None if began is None or now is None else max(0, now - began)

    return since


def _bytes_acked(sock: socket.socket | None) -> int | None:
    if sock is None or not hasattr(socket, "TCP_INFO"):
        return None
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_ACKED.size)
    except (OSError, ValueError):  # closed (uvloop says it by the latter), or no TCP socket
        return None
    return int(_BYTES_ACKED.unpack(info)[0]) if len(info) == _BYTES_ACKED.size else None

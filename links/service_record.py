"""Rules of DNS-SD names and TXT records (RFC 6335, section 5.1; RFC 6763, sections 4 and 6); pure."""

from __future__ import annotations

import re
from collections.abc import Mapping

from protocol.errors import ConfigError

MAX_INSTANCE_BYTES = 63
MAX_PAIR_BYTES = 255
MAX_TXT_BYTES = 400
MAX_KEY_CHARS = 9

_TYPE = re.compile(r"_(?P<name>[A-Za-z0-9](?:-?[A-Za-z0-9]){0,14})\._(?:tcp|udp)")
_KEY = re.compile(rf"[\x20-\x3c\x3e-\x7e]{{1,{MAX_KEY_CHARS}}}")


def check_service(service_type: str, instance: str, port: int, txt: Mapping[str, str]) -> None:
    """Raises ConfigError naming the part that a DNS-SD record cannot carry."""
    check_type(service_type)
    if not 1 <= len(instance.encode()) <= MAX_INSTANCE_BYTES:
        raise ConfigError(f"a service instance has 1 to {MAX_INSTANCE_BYTES} bytes", field="instance")
    if not 1 <= port <= 65535:
        raise ConfigError(f"{port} is not a port", field="port")
    total = 0
    for key, value in txt.items():
        if _KEY.fullmatch(key) is None:
            raise ConfigError(f"TXT key {key!r} must be 1 to {MAX_KEY_CHARS} printable ASCII characters", field="txt")
        size = len(f"{key}={value}".encode())
        if size > MAX_PAIR_BYTES:
            raise ConfigError(f"TXT entry {key!r} has {size} bytes, at most {MAX_PAIR_BYTES} fit", field=f"txt.{key}")
        total += size + 1
    if total > MAX_TXT_BYTES:
        raise ConfigError(f"the TXT record has {total} bytes, at most {MAX_TXT_BYTES} are sent", field="txt")


def check_type(service_type: str) -> None:
    """Raises ConfigError unless `service_type` reads like `_midstream._tcp`."""
    found = _TYPE.fullmatch(service_type)
    if found is None or len(found["name"]) > 15 or not re.search("[A-Za-z]", found["name"]):
        raise ConfigError(
            f"{service_type!r} is not a DNS-SD service type",
            next_step="use up to 15 letters, digits and single hyphens, as in _midstream._tcp",
            field="service_type",
        )

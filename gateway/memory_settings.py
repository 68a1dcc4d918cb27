"""Settings of what the text way remembers; apart, so that reading a configuration imports no engine."""

from __future__ import annotations

from typing import Literal

from attrs import field, frozen

CacheKind = Literal["off", "exact", "semantic"]


@frozen
class MemorySettings:
    """cache_threshold: least cosine of a semantic hit; 0 takes the one that was tuned for the shipped encoder.
    conversations_mib: of one tenant. conversations_postgres: where they are kept; None: in the state folder."""

    cache: CacheKind = "off"
    cache_entries: int = 50_000
    cache_ttl_s: float = 86_400.0
    cache_threshold: float = 0.0
    conversations: bool = True
    conversations_mib: int = 64
    conversations_postgres: str | None = field(default=None, repr=False)

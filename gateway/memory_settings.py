"""Settings of what the text way remembers; apart, so that reading a configuration imports no engine."""

from __future__ import annotations

from typing import Literal

from attrs import frozen

CacheKind = Literal["off", "exact", "semantic"]


@frozen
class MemorySettings:
    """cache_threshold: least cosine of a semantic hit; 0 takes the one that was tuned for the shipped encoder."""

    cache: CacheKind = "off"
    cache_entries: int = 50_000
    cache_ttl_s: float = 86_400.0
    cache_threshold: float = 0.0
    conversations: bool = True

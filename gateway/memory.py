"""What the text way remembers between requests, from one set of settings in either house: cache, conversations."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from engines.encoder import Encoder
from engines.sentences import SentenceEmbedder
from engines.store import ModelStore
from gateway.cache import CacheSettings, SemanticCache
from gateway.conversation_store import ConversationBounds, ConversationStore, SqliteConversations
from gateway.conversations import KeptConversations
from gateway.freed_memory import give_back
from gateway.memory_settings import MemorySettings
from gateway.ports import AnswerCache, Conversations, NoCache, NoConversations
from gateway.postgres_conversations import PostgresConversations
from gateway.result_store import ResultStore, SqliteResults
from gateway.second_opinion import SecondOpinion
from links.port import Mount
from protocol.errors import MidstreamError

log = logging.getLogger("midstream.gateway.memory")

TUNED_THRESHOLD = 0.78
"""For the encoder: two steps above what `python -m benchmarks.semantic_cache` fixes on one half of its pairs. On the
other half no paraphrase less is answered than there, and fewer different questions are."""


def _conversations(settings: MemorySettings, folder: Path) -> ConversationStore:
    bounds = ConversationBounds(tenant_bytes=settings.conversations_mib << 20)
    if settings.conversations_postgres:
        return PostgresConversations(settings.conversations_postgres, bounds)
    return SqliteConversations(folder / "conversations.sqlite", bounds)


class TextMemory:
    """Cache, conversations and what apps told, of one house, under `folder`."""

    def __init__(self, settings: MemorySettings, folder: Path, models: ModelStore) -> None:
        self._settings = settings
        self._folder = folder
        self._models = models
        self._encoder: Encoder | None = None
        self._kept = _conversations(settings, folder) if settings.conversations else None
        self.conversations: Conversations = KeptConversations(self._kept) if self._kept else NoConversations()
        self.results: ResultStore = SqliteResults(folder / "results.sqlite")
        self.why = ""
        self.embedder: SentenceEmbedder | None = None
        self._cache = self._made() if settings.cache != "off" else None
        self.cache: AnswerCache = self._cache or NoCache()

    def _made(self) -> SemanticCache:
        settings, embedder = self._settings, None
        if settings.cache == "semantic":
            try:
                self._encoder = Encoder(self._models, self._folder / "encoder")
                embedder = self.embedder = self._encoder.embedder
            except MidstreamError as err:
                self.why = f"only exact cache hits: {err.message}; {err.next_step}"
        threshold = settings.cache_threshold or TUNED_THRESHOLD
        tuned_for = embedder.id if embedder is not None else ""
        return SemanticCache(
            CacheSettings(self._folder, settings.cache_entries, settings.cache_ttl_s, threshold, tuned_for), embedder
        )

    @property
    def second_opinion(self) -> SecondOpinion | None:
        """For the router, where there is an encoder and a head for it."""
        found = SecondOpinion(self.embedder) if self.embedder is not None else None
        return found if found is not None and found.usable else None

    async def start(self) -> None:
        """Open the cache. A disk that cannot be used leaves it off, with a sentence in `why`."""
        if self._encoder is not None and await self._encoder.start():
            await asyncio.to_thread(give_back)
        if self._cache is None:
            return
        try:
            await self._cache.start()
        except MidstreamError as err:
            self.why = f"no cache: {err.message}; {err.next_step}"
            log.warning("%s", self.why)

    async def close(self) -> None:
        """Save and close; idempotent."""
        if self._cache is not None:
            await self._cache.close()
        if self._kept is not None:
            await self._kept.close()
        if self._encoder is not None:
            await self._encoder.close()


def remembering(mount: Mount, memory: TextMemory) -> Mount:
    """The mount with its memory: opened before the first request, closed after the last."""

    async def start() -> None:
        await memory.start()
        await mount.start()

    async def stop() -> None:
        await mount.stop()
        await memory.close()

    return Mount(routes=mount.routes, frame_routes=mount.frame_routes, start=start, stop=stop)

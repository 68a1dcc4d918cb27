"""Who may have how many sessions of the control channel, and which goes when there are too many; pure."""

from __future__ import annotations

from typing import Generic, TypeVar

from protocol.errors import Full

T = TypeVar("T")

Key = tuple[str, str]
"""(tenant, session id)"""

SHARE = 8
"""One tenant may hold eight times what stays free, so that a newcomer always finds a place."""

RETRY_S = 30.0


class SessionPlaces(Generic[T]):
    """Sessions of all tenants, `limit` at most. Those whose app is away give way to newcomers, the one that was gone
    longest first."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._sessions: dict[Key, T] = {}
        self._held: dict[str, int] = {}
        self._away: dict[str, dict[Key, float]] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def all(self) -> tuple[T, ...]:
        """Every session, the one that connected last at the end."""
        return tuple(self._sessions.values())

    def get(self, key: Key) -> T | None:
        return self._sessions.get(key)

    def connected(self, key: Key, session: T) -> None:
        """It has a connection now. A session that is new here needs a place first (`make_room`)."""
        if self._sessions.pop(key, None) is None:
            self._held[key[0]] = self._held.get(key[0], 0) + 1
        self._sessions[key] = session
        self._back(key)

    def left(self, key: Key, now_s: float) -> None:
        """Its connection ended."""
        if key in self._sessions:
            self._away.setdefault(key[0], {})[key] = now_s

    def drop(self, key: Key) -> None:
        """Forget it; one that is not there is no error."""
        if self._sessions.pop(key, None) is None:
            return
        self._back(key)
        self._held[key[0]] -= 1
        if not self._held[key[0]]:
            del self._held[key[0]]

    def make_room(self, tenant: str) -> None:
        """A place for one more session of a tenant, which may cost one that is away. Raises Full, by its name."""
        free = self._limit - len(self._sessions)
        held = self._held.get(tenant, 0)
        if free > 0 and held < max(1, SHARE * (free - 1)):
            return
        gone = self._first_away(tenant) if free > 0 or tenant in self._away else self._first_away(self._greediest())
        if gone is not None:
            self.drop(gone)
            return
        if free > 0:
            raise Full(
                f"{held} apps of this tenant hold the control channel, its share of the {self._limit} places",
                retry_after_s=RETRY_S,
                next_step="end apps that are not used, or connect again later",
            )
        raise Full(f"{self._limit} apps hold the control channel", retry_after_s=RETRY_S)

    def forget_away(self, before_s: float) -> int:
        """Drop what has been away since before that time; returns how many."""
        old = [key for away in self._away.values() for key, since_s in away.items() if since_s < before_s]
        for key in old:
            self.drop(key)
        return len(old)

    def _back(self, key: Key) -> None:
        away = self._away.get(key[0])
        if away is not None:
            away.pop(key, None)
            if not away:
                del self._away[key[0]]

    def _first_away(self, tenant: str) -> Key | None:
        return next(iter(self._away.get(tenant, ())), None)

    def _greediest(self) -> str:
        """The tenant with most sessions of those who have any away; empty where nobody has."""
        return max(self._away, key=lambda tenant: self._held[tenant], default="")

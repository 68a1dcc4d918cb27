"""The ledger on Redis: for gateways on several machines. The only user of the `redis` package (extra `redis`).

Each operation is one script, so it is atomic on the server. All keys of an account share a hash tag and thus a node of
a cluster. Places expire by the server's clock. How much a power cut forgets is the server's setting (`appendonly`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

from gateway.ledger import KEPT_SLOTS, MAX_SLOT_AHEAD, Bill, Change, Dimension, Draw, Drawn, LedgerError
from protocol.errors import ConfigError
from protocol.extras import install_step

if TYPE_CHECKING:
    from redis.asyncio import Redis

T = TypeVar("T")

PREFIX = "midstream"
TIMEOUT_S = 2.0
KEEP_S = {"requests": 300, "tokens": 300, "day": 62 * 86_400, "month": 400 * 86_400}
BILL_KEEP_S = 400 * 86_400

# KEYS[1]: a hash slot -> units. ARGV: slot, span, cap, wanted, least, slots kept, slots ahead, seconds kept
DRAW = """
local slot, span, cap = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local wanted, least, kept, ahead = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7])
local room = cap
local found = redis.call('HGETALL', KEYS[1])
for at = 1, #found, 2 do
  local one = tonumber(found[at])
  if one <= slot - span - kept then
    redis.call('HDEL', KEYS[1], found[at])
  elseif one > slot - span and one <= slot + ahead then
    room = room - tonumber(found[at + 1])
  end
end
local granted = 0
if room >= least then granted = math.min(wanted, math.max(least, math.floor(room / 2))) end
if granted > 0 then
  redis.call('HINCRBY', KEYS[1], ARGV[1], string.format('%.0f', granted))
  redis.call('EXPIRE', KEYS[1], ARGV[8])
end
return {string.format('%.0f', granted), string.format('%.0f', math.max(0, room - granted))}
"""

# KEYS[1]: the same hash. ARGV: slot, units, seconds kept
CHANGE = """
local units = tonumber(ARGV[2])
if units < 0 and redis.call('HEXISTS', KEYS[1], ARGV[1]) == 0 then return 0 end
if redis.call('HINCRBY', KEYS[1], ARGV[1], ARGV[2]) < 0 then redis.call('HSET', KEYS[1], ARGV[1], 0) end
redis.call('EXPIRE', KEYS[1], ARGV[3])
return 1
"""

# KEYS[1]: a hash holder -> "places until_ms". ARGV: holder, cap, wanted, ttl_ms
LEASE = """
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local others = 0
local found = redis.call('HGETALL', KEYS[1])
for at = 1, #found, 2 do
  local places, till = string.match(found[at + 1], '(%d+) (%d+)')
  if found[at] == ARGV[1] or tonumber(till) <= now then
    redis.call('HDEL', KEYS[1], found[at])
  else
    others = others + tonumber(places)
  end
end
local held = math.max(0, math.min(tonumber(ARGV[3]), tonumber(ARGV[2]) - others))
if held > 0 then
  redis.call('HSET', KEYS[1], ARGV[1], string.format('%.0f %.0f', held, now + tonumber(ARGV[4])))
  redis.call('PEXPIRE', KEYS[1], 10 * tonumber(ARGV[4]))
end
return held
"""

_BILL_FIELDS = ("requests", "prompt_tokens", "completion_tokens", "nano_usd")


class RedisLedger:
    """`url`: redis://[user:password@]HOST:PORT/DB, or rediss:// for TLS. `prefix` keeps fleets apart on one server."""

    def __init__(self, url: str, prefix: str = PREFIX) -> None:
        self._prefix = prefix
        self._redis = _client(url)
        self._draw = self._redis.register_script(DRAW)
        self._change = self._redis.register_script(CHANGE)
        self._lease = self._redis.register_script(LEASE)

    def draw_now(self, draws: Sequence[Draw]) -> None:
        """It is never without a wait for the server."""

    async def draw(self, draws: Sequence[Draw]) -> Sequence[Drawn]:
        return [await self._draw_one(draw) for draw in draws]

    async def _draw_one(self, draw: Draw) -> Drawn:
        ahead = MAX_SLOT_AHEAD if draw.span > 1 else 0
        values = (
            draw.slot, draw.span, draw.cap, draw.wanted, draw.least, KEPT_SLOTS[draw.dimension], ahead,
            KEEP_S[draw.dimension],
        )  # fmt: skip
        granted, room = await _asked(self._draw(keys=[self._count(draw.account, draw.dimension)], args=values))
        return Drawn(int(granted), int(room))

    async def change(self, changes: Sequence[Change]) -> None:
        for change in changes:
            values = change.slot, change.units, KEEP_S[change.dimension]
            await _asked(self._change(keys=[self._count(change.account, change.dimension)], args=values))

    async def lease(self, account: str, holder: str, cap: int, wanted: int, ttl_s: float) -> int:
        values = holder, cap, wanted, round(ttl_s * 1000)
        return int(await _asked(self._lease(keys=[f"{self._prefix}:{{{account}}}:places"], args=values)))

    async def taken(self, account: str, dimension: Dimension, slot: int) -> int:
        key = self._count(account, dimension)
        found = await _asked(cast(Awaitable[Any], self._redis.hget(key, str(slot))))
        return int(found or 0)

    async def bill(self, bills: Sequence[Bill]) -> None:
        async with self._redis.pipeline(transaction=True) as pipe:
            for bill in bills:
                key = self._bill(bill.tenant, bill.day)
                for name in _BILL_FIELDS:
                    pipe.hincrby(key, name, getattr(bill, name))
                pipe.expire(key, BILL_KEEP_S)
            await _asked(pipe.execute())

    async def bills(self, tenant: str, first_day: int, last_day: int) -> Sequence[Bill]:
        days = range(first_day, last_day + 1)
        async with self._redis.pipeline(transaction=False) as pipe:
            for day in days:
                pipe.hmget(self._bill(tenant, day), list(_BILL_FIELDS))
            rows = await _asked(pipe.execute())
        found = zip(days, rows, strict=True)
        return [Bill(tenant, day, *(int(value or 0) for value in row)) for day, row in found if any(row)]

    async def close(self) -> None:
        await self._redis.aclose()

    def _count(self, account: str, dimension: str) -> str:
        return f"{self._prefix}:{{{account}}}:{dimension}"

    def _bill(self, tenant: str, day: int) -> str:
        return f"{self._prefix}:{{{tenant}}}:bill:{day}"


def _client(url: str) -> Redis:
    try:
        from redis.asyncio import Redis
        from redis.asyncio.retry import Retry
        from redis.backoff import NoBackoff
    except ImportError as err:
        raise ConfigError(
            "limits over Redis need the package redis", next_step=install_step("redis"), field="limits_redis"
        ) from err
    try:
        return Redis.from_url(
            url, decode_responses=True, socket_timeout=TIMEOUT_S, socket_connect_timeout=TIMEOUT_S,
            # A draw that was sent and not answered may have been carried out: sent again it would be taken twice.
            retry=Retry(NoBackoff(), 0),
        )  # fmt: skip
    except ValueError as err:
        raise ConfigError(
            f"the address of Redis is not valid: {err}", next_step="write redis://HOST:PORT/0", field="limits_redis"
        ) from err


async def _asked(answer: Awaitable[T]) -> T:
    from redis.exceptions import RedisError

    try:
        return await answer
    except (RedisError, OSError, TimeoutError) as err:
        raise LedgerError(
            f"the ledger on Redis cannot be used: {err}", next_step="check that the server is up and may be written to"
        ) from err

"""The coordinator's keys, tenants, limits and audit: made from its state folder, opened and closed as one."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Mapping
from typing import Any

from cloud_stub.authority import Authority
from cloud_stub.config import CoordinatorConfig
from gateway.audit import FileAudit
from gateway.keys import sha256_of
from gateway.ledger import Ledger
from gateway.metering import MeteredLimits
from gateway.redis_ledger import RedisLedger
from gateway.settings import GatewaySettings
from gateway.sqlite_ledger import SqliteLedger
from gateway.tenancy import Tenancy
from gateway.tenant_store import SqliteTenants
from protocol.clock import WallClock
from protocol.errors import ConfigError
from protocol.events import Emit

log = logging.getLogger("midstream.coordinator")

OPERATOR_KEY = "operator"
CLIENT_KEY = "client"
REFRESH_S = 1.0


class TenantHouse:
    """What stands before the coordinator's models. Opened in a thread: it waits for the disk."""

    def __init__(self, config: CoordinatorConfig, authority: Authority, wall: WallClock, emit: Emit) -> None:
        with contextlib.ExitStack() as stack:
            self.audit = FileAudit(config.state_dir / "audit", wall)
            stack.callback(self.audit.close)
            store = SqliteTenants(config.state_dir / "tenants.sqlite")
            stack.callback(store.close)
            fixed = {OPERATOR_KEY: "delete admin.key in the state folder and restart the coordinator"}
            self.tenancy = Tenancy(store, wall, self.audit.management, fixed)
            self._adopt(authority)
            self.ledger: Ledger = (
                RedisLedger(config.limits_redis, f"midstream:{config.fleet}")
                if config.limits_redis
                else SqliteLedger(config.state_dir / "ledger", wall)
            )
            stack.pop_all()
        self.keys = self.tenancy.table
        self.limits = MeteredLimits(
            self.keys.tenant,
            self.ledger,
            clock=time.monotonic,
            wall=wall,
            holder=secrets.token_hex(8),
            emit=emit,
            room=GatewaySettings().max_concurrent,
        )
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin the work beside requests."""
        await self.limits.start()
        self._task = asyncio.get_running_loop().create_task(self._refresh())

    async def close(self) -> None:
        """After the last request: give blocks back, write what waits."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self.limits.stop()
        await self.ledger.close()
        await asyncio.to_thread(self.tenancy.close)
        await asyncio.to_thread(self.audit.close)

    def record(self, who: str, action: str, subject: str, detail: Mapping[str, Any]) -> None:
        """Write down what an operator does, before it is done; for threads."""
        self.audit.management(who, action, subject, detail)

    def _adopt(self, authority: Authority) -> None:
        """The two keys that the first start made are keys like any other."""
        note = "of the command line on this machine"
        self.tenancy.adopt(OPERATOR_KEY, "admin", sha256_of(authority.admin_key), note)
        self.tenancy.adopt(CLIENT_KEY, "invoke", authority.client_key_sha256, "printed at the first start")

    async def _refresh(self) -> None:
        """Keys and tenants that another process of this machine changed count within a second."""
        while True:
            await asyncio.sleep(REFRESH_S)
            try:
                await asyncio.to_thread(self.tenancy.refresh)
            except ConfigError as err:
                log.warning("keys and tenants are not read anew: %s", err)

"""Limits and audit of a front door that asks for no key: one tenant, whose limits are those of the policy in force."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path

from gateway.audit import AuditBounds, FileAudit
from gateway.context import LOCAL, Caller
from gateway.ledger import LedgerError
from gateway.metering import MeteredLimits
from gateway.ports import Estimate, FreeReservation, Invocation, Reservation
from gateway.quotas import Quota, Tenant
from gateway.shadow_measure import Difference
from gateway.sqlite_ledger import SqliteLedger
from links.port import Mount
from protocol.clock import Clock, WallClock
from protocol.errors import MidstreamError
from protocol.events import Emit, Event, PolicyJudged
from protocol.policy import LimitsPolicy, Policy

log = logging.getLogger("midstream.gateway.limits")

DEVICE_AUDIT = AuditBounds(file_bytes=4 << 20, files=16, sync_every_s=5.0)
"""A card is written to every five seconds at the most, and holds 64 MiB of records."""


def tenant_of(limits: LimitsPolicy) -> Tenant:
    """The local client as the policy limits it."""
    quota = Quota(
        limits.requests_per_s, limits.tokens_per_min, limits.max_concurrent, limits.usd_per_day, limits.usd_per_month
    )
    return Tenant(LOCAL.tenant, quota=quota, on_budget=limits.on_budget)


class DoorLimits:
    """`gateway.ports.Limits` and `Audit` in one, opened and closed with the front door.

    `folder` gets `ledger/` and `audit/`. A disk that cannot be used leaves the door open where there are no limits, and
    closed (503) where there are; `why` says so.
    """

    def __init__(self, folder: Path, policy: Callable[[], Policy], emit: Emit, clock: Clock, wall: WallClock) -> None:
        self.why = ""
        self._folder, self._policy, self._emit, self._clock, self._wall = folder, policy, emit, clock, wall
        self._held: tuple[LimitsPolicy, Tenant] | None = None
        self._ledger: SqliteLedger | None = None
        self._audit: FileAudit | None = None
        self._metered: MeteredLimits | None = None
        self._opened = asyncio.Event()
        self._opening: asyncio.Future[None] | None = None

    async def start(self) -> None:
        """Open what is on disk; requests that came before wait for it."""
        # A start that is cancelled must not leave files open that nobody knows of: stop() waits for the thread.
        self._opening = asyncio.get_running_loop().run_in_executor(None, self._open)
        await asyncio.shield(self._opening)
        if self.why:
            log.warning("%s", self.why)
        if self._ledger is not None:
            self._metered = MeteredLimits(
                self._tenant, self._ledger, clock=self._clock, wall=self._wall, holder=secrets.token_hex(8),
                emit=self._emit,
            )  # fmt: skip
            await self._metered.start()
        self._opened.set()

    def _open(self) -> None:
        """In a thread: it waits for the disk."""
        try:
            self._ledger = SqliteLedger(self._folder / "ledger", self._wall)
            self._audit = FileAudit(self._folder / "audit", self._wall, DEVICE_AUDIT)
        except MidstreamError as err:
            self.why = f"limits and audit are not kept: {err.message}; {err.next_step}"

    async def stop(self) -> None:
        """After the last request: give back what is not used, write what waits."""
        self._opened.clear()
        if self._opening is not None:
            await asyncio.wait([self._opening])
        metered, self._metered = self._metered, None
        ledger, self._ledger = self._ledger, None
        audit, self._audit = self._audit, None
        if metered is not None:
            await metered.stop()
        if ledger is not None:
            await ledger.close()
        if audit is not None:
            await asyncio.to_thread(audit.close)

    def left_ratios(self, caller: Caller) -> Mapping[str, float]:
        """Empty until limits are open."""
        return {} if self._metered is None else self._metered.left_ratios(caller)

    async def reserve(self, caller: Caller, estimate: Estimate) -> Reservation:
        """As gateway.ports.Limits has it. Raises LedgerError where there are limits and no disk to count them on."""
        if not self._opened.is_set():
            await self._opened.wait()
        if self._metered is not None:
            return await self._metered.reserve(caller, estimate)
        if self._tenant(caller.tenant).quota != Quota():
            raise LedgerError(self.why or "the limits are closed", next_step="see the log of this process")
        return FreeReservation()

    @property
    def reserved(self) -> Mapping[str, int]:
        """Units that running requests hold, by dimension and `places`."""
        return self._metered.reserved(LOCAL.tenant) if self._metered is not None else {}

    def invocation(self, record: Invocation) -> None:
        """As gateway.ports.Audit has it."""
        if self._audit is not None:
            self._audit.invocation(record)

    def heard(self, event: Event) -> None:
        """A listener: policies that the fleet's operator sent are changes of this door."""
        if self._audit is not None and isinstance(event, PolicyJudged):
            action = "policy.accept" if event.accepted else "policy.refuse"
            self._audit.noted("fleet", action, str(event.version), {"code": event.code})

    def shadow(self, difference: Difference) -> None:
        """As gateway.ports.Audit has it."""
        if self._audit is not None:
            self._audit.shadow(difference)

    def _tenant(self, name: str) -> Tenant:
        """The same object for as long as the policy's limits stay the same."""
        limits = self._policy().limits
        if self._held is None or self._held[0] is not limits:
            tenant = tenant_of(limits)
            same = self._held is not None and self._held[1] == tenant
            self._held = limits, self._held[1] if same and self._held is not None else tenant
        return self._held[1]


def limited(mount: Mount, limits: DoorLimits) -> Mount:
    """The mount with its limits: opened before the first request, closed after the last."""

    async def start() -> None:
        await limits.start()
        await mount.start()

    async def stop() -> None:
        await mount.stop()
        await limits.stop()

    return Mount(routes=mount.routes, frame_routes=mount.frame_routes, start=start, stop=stop)

"""The only zeroconf: a Browser over multicast DNS, with one shared responder per process and set of interfaces.

What is found are candidate addresses and nothing more: records are unauthenticated and outlive their host, so presence
comes from MQTT and identity from TLS. zeroconf (LGPL-2.1-or-later) is imported at first use and may be absent.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import socket
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from attrs import define, field

from links.port import Found
from links.service_record import MAX_TXT_BYTES, check_service, check_type
from protocol.errors import LinkError

log = logging.getLogger("midstream.links.mdns")

MAX_FOUND = 64
_RESOLVE_MS = 1500
_NAME_CHECK_S = 0.8
_NEXT_STEP = "give the coordinator's address in the configuration, or let it be found through the broker"


@define(eq=False)
class _Shared:
    """The responder of one event loop and set of interfaces, closed by its last user."""

    responder: Any
    users: int = 0


_shared: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[tuple[str, ...], _Shared]] = (
    weakref.WeakKeyDictionary()
)


class ZeroconfBrowser:
    """A Browser on the given interfaces.

    Args:
        interfaces: IPv4 addresses of this machine to use; empty means all of them.
        settle_s: browsing ends early once something was found and nothing new came for so long.
    """

    def __init__(self, interfaces: Sequence[str] = (), settle_s: float = 0.4) -> None:
        self._interfaces = tuple(interfaces)
        self._settle_s = settle_s
        self._holding: _Shared | None = None
        self._announced: dict[tuple[str, str], Any] = {}

    async def browse(self, service_type: str, seconds: float) -> Sequence[Found]:
        """Services that answered within `seconds`, all of their IPv4 addresses in the order they gave.

        Raises LinkError when this machine cannot do multicast DNS, ConfigError for a wrong type.
        """
        check_type(service_type)
        search = _Search(self._responder().responder.zeroconf)
        await self._search(service_type, search, lambda: search.settle(seconds, self._settle_s))
        return list(search.found.values())

    async def advertise(self, service_type: str, instance: str, port: int, txt: Mapping[str, str]) -> str:
        """Announce a service on the configured interfaces; takes about three seconds, so never on the way to ready.

        Calling it again for the same instance replaces the record. Raises LinkError, ConfigError.
        """
        check_service(service_type, instance, port, txt)
        shared = self._responder()
        from zeroconf import Error as ZeroconfError

        old = self._announced.pop((service_type, instance), None)
        try:
            if old is not None:
                await (await shared.responder.async_unregister_service(old))
            name = await self._free_name(service_type, instance)
            info = _service_info(service_type, name, port, txt, self._addresses())
            await (await shared.responder.async_register_service(info, allow_name_change=True))
        except (OSError, RuntimeError, ZeroconfError) as err:
            raise _unusable(err) from err
        self._announced[service_type, instance] = info
        return str(info.name).removesuffix(f".{service_type}.local.")

    async def close(self) -> None:
        """Take back what was announced; the last browser of a set of interfaces closes the sockets."""
        shared, self._holding = self._holding, None
        if shared is None:
            return
        from zeroconf import Error as ZeroconfError

        for info in self._announced.values():
            with contextlib.suppress(OSError, RuntimeError, ZeroconfError, TimeoutError):
                async with asyncio.timeout(2.0):
                    await (await shared.responder.async_unregister_service(info))
        self._announced.clear()
        shared.users -= 1
        if shared.users == 0:
            _shared.get(asyncio.get_running_loop(), {}).pop(self._interfaces, None)
            with contextlib.suppress(OSError, RuntimeError):
                await shared.responder.async_close()

    async def _search(self, service_type: str, search: _Search, until: Callable[[], Awaitable[None]]) -> None:
        from zeroconf import DNSQuestionType
        from zeroconf.asyncio import AsyncServiceBrowser

        try:
            browser = AsyncServiceBrowser(
                search.zeroconf,
                f"{service_type}.local.",
                handlers=[search.on_change],
                # Answers to one asker may reach another process of this host, for all share the port.
                question_type=DNSQuestionType.QM,
            )
        except (OSError, RuntimeError) as err:
            raise _unusable(err) from err
        try:
            await until()
        finally:
            with contextlib.suppress(OSError, RuntimeError):
                await browser.async_cancel()
            await search.close()

    async def _free_name(self, service_type: str, instance: str) -> str:
        """`instance`, or it with the first number that nobody shows: zeroconf's own probe misses names on this host."""
        search = _Search(self._responder().responder.zeroconf, resolves=False)
        await self._search(service_type, search, lambda: asyncio.sleep(_NAME_CHECK_S))
        name, number = instance, 1
        while f"{name}.{service_type}.local." in search.names:
            number += 1
            name = f"{instance}-{number}"
        return name

    def _responder(self) -> _Shared:
        """The shared responder, made at first use."""
        if self._holding is not None:
            return self._holding
        table = _shared.setdefault(asyncio.get_running_loop(), {})
        shared = table.get(self._interfaces)
        if shared is None:
            shared = table[self._interfaces] = _Shared(_start(self._interfaces))
        shared.users += 1
        self._holding = shared
        return shared

    def _addresses(self) -> list[str]:
        if self._interfaces:
            return list(self._interfaces)
        import ifaddr

        found = [str(ip.ip) for adapter in ifaddr.get_adapters() for ip in adapter.ips if ip.is_IPv4]
        outside = [address for address in found if not address.startswith("127.")]
        return outside or found


def _start(interfaces: tuple[str, ...]) -> Any:
    try:
        from zeroconf import Error as ZeroconfError
        from zeroconf import InterfaceChoice, IPVersion
        from zeroconf.asyncio import AsyncZeroconf
    except ImportError as err:
        raise LinkError("discovery by mDNS needs the package zeroconf", next_step=_NEXT_STEP) from err
    _check_interfaces(interfaces)
    try:
        return AsyncZeroconf(
            interfaces=list(interfaces) if interfaces else InterfaceChoice.All, ip_version=IPVersion.V4Only
        )
    except (OSError, RuntimeError, ValueError, ZeroconfError) as err:
        raise _unusable(err) from err


def _check_interfaces(interfaces: tuple[str, ...]) -> None:
    """zeroconf leaves a socket open when an address is not ours, so we look first."""
    for address in interfaces:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                probe.bind((address, 0))
            except (OSError, UnicodeError) as err:
                raise LinkError(f"{address} is not an address of this machine", next_step=_NEXT_STEP) from err


def _unusable(err: Exception) -> LinkError:
    return LinkError(f"multicast DNS does not work here: {err or type(err).__name__}", next_step=_NEXT_STEP)


def _service_info(service_type: str, instance: str, port: int, txt: Mapping[str, str], addresses: Sequence[str]) -> Any:
    from zeroconf.asyncio import AsyncServiceInfo

    host = re.sub(r"[^a-z0-9-]+", "-", instance.lower()).strip("-") or "midstream"
    return AsyncServiceInfo(
        f"{service_type}.local.",
        f"{instance}.{service_type}.local.",
        addresses=[socket.inet_aton(address) for address in addresses],
        port=port,
        properties=dict(txt),
        server=f"{host}.local.",
    )


@define(eq=False)
class _Search:
    """One browse: names as they appear, each resolved in a task of its own."""

    zeroconf: Any
    resolves: bool = True
    names: set[str] = field(factory=set)
    found: dict[str, Found] = field(factory=dict)
    _resolving: dict[str, asyncio.Task[None]] = field(factory=dict)
    _news: asyncio.Event = field(factory=asyncio.Event)

    def on_change(self, *, zeroconf: Any, service_type: str, name: str, state_change: Any) -> None:
        if state_change.name == "Removed":
            self.found.pop(name, None)
            self.names.discard(name)
            return
        if len(self.names) < MAX_FOUND:
            self.names.add(name)
        if self.resolves and name not in self._resolving and len(self._resolving) < MAX_FOUND:
            self._resolving[name] = asyncio.get_running_loop().create_task(self._resolve(service_type, name))

    async def settle(self, seconds: float, quiet_s: float) -> None:
        """Returns after `seconds`, or earlier when something was found and then nothing new for `quiet_s`."""
        loop = asyncio.get_running_loop()
        ends_s = loop.time() + seconds
        while (left_s := ends_s - loop.time()) > 0:
            waits_s = min(left_s, quiet_s) if self.found and not self._resolving else left_s
            self._news.clear()
            try:
                async with asyncio.timeout(waits_s):
                    await self._news.wait()
            except TimeoutError:
                if self.found and not self._resolving:
                    return

    async def close(self) -> None:
        tasks = list(self._resolving.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _resolve(self, service_type: str, name: str) -> None:
        from zeroconf import DNSQuestionType, IPVersion
        from zeroconf.asyncio import AsyncServiceInfo

        info = AsyncServiceInfo(service_type, name)
        try:
            answered = await info.async_request(self.zeroconf, _RESOLVE_MS, DNSQuestionType.QM)
            addresses = tuple(info.parsed_addresses(IPVersion.V4Only))
        except Exception as err:  # noqa: BLE001 - any record of any host on the network may be malformed
            log.debug("cannot resolve %s: %s", name, err)
            return
        else:
            if answered and addresses and info.port:
                instance = name.removesuffix(f".{service_type}")
                self.found[name] = Found(instance, addresses, info.port, _text(info.properties))
        finally:
            self._resolving.pop(name, None)
            self._news.set()


def _text(properties: Mapping[bytes, bytes | None]) -> dict[str, str]:
    """TXT as text, cut off at the size that we would send ourselves."""
    taken: dict[str, str] = {}
    room = MAX_TXT_BYTES
    for key, value in properties.items():
        room -= len(key) + len(value or b"") + 2
        if room < 0:
            break
        taken[key.decode("ascii", "replace").lower()] = (value or b"").decode("utf-8", "replace")
    return taken

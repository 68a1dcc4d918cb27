"""Settings + ports -> the tensor way of a house: what it mounts, with symmetric start and stop."""

from __future__ import annotations

from links.port import Mount
from split_models.device_way import DeviceWay
from split_models.server_way import ServerWay
from split_models.settings import Remote, SplitPorts, SplitSettings, views_of

__all__ = ["DeviceWay", "Remote", "ServerWay", "SplitPorts", "SplitSettings", "build", "views_of"]


def build(settings: SplitSettings, ports: SplitPorts) -> Mount:
    """The mount of a server when `settings` names a bundle folder, of a device otherwise.

    Use DeviceWay or ServerWay directly to reach status, benchmark probes and refresh beside the mount.
    """
    way = DeviceWay(settings, ports) if settings.bundle_root is None else ServerWay(settings, ports)
    return way.mount

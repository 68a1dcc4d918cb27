"""A ready configuration for mosquitto: TLS by the fleet's CA, identity from the client certificate, topics per device.

midstream coordinator mosquitto-conf --out /etc/mosquitto/midstream --names broker.lan
mosquitto -c /etc/mosquitto/midstream/mosquitto.conf
midstream coordinator --broker mqtts://broker.lan:8883
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from attrs import frozen

from cloud_stub.authority import OWN_NAME, Authority
from cloud_stub.certificates import issue_server
from protocol.durable import write_durable
from protocol.topics import ROOT

CONF, ACL, CA, CERTIFICATE, KEY = "mosquitto.conf", "acl", "ca.pem", "broker.pem", "broker.key"


@frozen
class MosquittoFiles:
    """Where everything was written."""

    folder: Path

    @property
    def conf(self) -> Path:
        return self.folder / CONF


def mosquitto_conf(folder: Path, port: int, host: str = "") -> str:
    """The text of mosquitto.conf; `host` binds one address, empty all of them.

    There is no store on disk: a power cut can tear one so that mosquitto refuses to start, and what it held (births,
    profiles, policy, addresses) both sides publish again when they reconnect. Sessions of devices that are away are
    kept for a day, with at most a thousand messages each, so that one dead device cannot fill the broker.
    """
    bind = f" {host}" if host else ""
    return (
        "# Written by `midstream coordinator mosquitto-conf`; for mosquitto 2.0 and later.\n"
        "per_listener_settings false\n"
        "allow_anonymous false\n"
        f"listener {port}{bind}\n"
        f"cafile {folder / CA}\n"
        f"certfile {folder / CERTIFICATE}\n"
        f"keyfile {folder / KEY}\n"
        "require_certificate true\n"
        "use_identity_as_username true\n"
        f"acl_file {folder / ACL}\n"
        "persistent_client_expiration 1d\n"
        "max_queued_messages 1000\n"
        "message_size_limit 262144\n"
        "persistence false\n"
    )


def mosquitto_acl(fleet: str) -> str:
    """Topic rules: a device (%u, its certificate's name) writes its own documents and reads what is meant for it."""
    own = f"{ROOT}/{fleet}/%u"
    return (
        f"user {OWN_NAME}\n"
        f"topic readwrite {ROOT}/{fleet}/#\n"
        "\n"
        f"pattern read {ROOT}/{fleet}/_coord/state\n"
        f"pattern read {own}/#\n"
        f"pattern write {own}/state\n"
        f"pattern write {own}/profile\n"
        f"pattern write {own}/policy/reported\n"
        f"pattern write {own}/signal/offer\n"
        f"pattern write {own}/tele/+\n"
    )


def write_mosquitto(
    authority: Authority, folder: Path, names: Sequence[str], port: int, now_s: float, host: str = ""
) -> MosquittoFiles:
    """Write configuration, access rules, the CA certificate and a fresh broker certificate for `names`.

    Raises ConfigError when the folder cannot be written.
    """
    folder = folder.resolve()
    pair = issue_server(authority.ca, names, now_s)
    write_durable(folder / CA, authority.ca.cert_pem, 0o644)
    write_durable(folder / CERTIFICATE, pair.cert_pem, 0o644)
    write_durable(folder / KEY, pair.key_pem, 0o600)
    write_durable(folder / ACL, mosquitto_acl(authority.fleet).encode(), 0o644)
    write_durable(folder / CONF, mosquitto_conf(folder, port, host).encode(), 0o644)
    return MosquittoFiles(folder)

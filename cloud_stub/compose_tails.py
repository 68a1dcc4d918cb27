"""Composition of the way to a foreign inference server that runs the tails."""

from __future__ import annotations

import ssl
from pathlib import Path

from cloud_stub.config import CoordinatorConfig
from links.http import HttpLink
from links.port import Link
from links.tls import client_context
from protocol.errors import ConfigError

MAX_TOKEN_BYTES = 8192
KEEP_IDLE_S = 2.0
"""Foreign servers close idle connections after 5 s and more."""


def tail_server(config: CoordinatorConfig) -> Link | None:
    """A link to `config.tails_url`, or None when tails run here. Raises ConfigError for a file that cannot be used."""
    if not config.tails_url:
        return None
    return HttpLink(
        "tails",
        config.tails_url,
        ssl=_trust(config) if config.tails_url.startswith("https://") else None,
        headers=_credentials(config),
        keep_idle_s=KEEP_IDLE_S,
    )


def _trust(config: CoordinatorConfig) -> ssl.SSLContext | None:
    """The system's trust is the link's own default."""
    if config.tails_ca is None:
        return None
    return client_context(_text(config.tails_ca, "tails_ca"), check_hostname=True)


def _credentials(config: CoordinatorConfig) -> dict[str, str]:
    if config.tails_token_file is None:
        return {}
    token = _text(config.tails_token_file, "tails_token_file").strip()
    if not token or len(token) > MAX_TOKEN_BYTES or not token.isascii() or not token.isprintable():
        raise ConfigError(
            f"{config.tails_token_file} holds no token", next_step="one line of ASCII text", field="tails_token_file"
        )
    return {"authorization": f"Bearer {token}"}


def _text(file: Path, field: str) -> str:
    try:
        return file.read_text()
    except (OSError, UnicodeDecodeError) as err:
        raise ConfigError(f"cannot read {file}: {err}", next_step=f"check {field}", field=field) from err

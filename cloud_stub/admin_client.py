"""The command line's way to the coordinator of this machine: key, port and CA are read from its state folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from attrs import frozen

from cloud_stub.admin import ADMIN
from cloud_stub.authority import ROOTS_FILE, read_admin_key
from cloud_stub.certificates import read_roots
from links.http import HttpLink
from links.tls import client_context
from protocol.decode import decode
from protocol.durable import read_durable
from protocol.errors import BadRequest, ConfigError, LinkError, NotFound

DEADLINE_S = 15.0


@frozen
class RunRecord:
    """run.json of a running coordinator."""

    host: str
    port: int
    pid: int


class AdminClient:
    """One question per call, over TLS that trusts the fleet's CA alone."""

    def __init__(self, state_dir: Path) -> None:
        self._state_dir = state_dir

    async def ask(
        self, method: str, path: str, body: bytes = b"", query: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        """The answer's JSON.

        Raises what the coordinator refused; ConfigError when none runs here or its files cannot be read; LinkError when
        what answered is no coordinator.
        """
        key = read_admin_key(self._state_dir)
        run = read_durable(self._state_dir / "run.json", lambda data: decode(RunRecord, data, what="run.json"))
        if run is None:
            raise self._not_running()
        roots = read_roots(
            self._state_dir / ROOTS_FILE, next_step="restart the coordinator: each start writes it", field="state_dir"
        )
        link = HttpLink("coordinator", f"https://{run.host}:{run.port}", ssl=client_context(roots))
        target = f"{ADMIN}{path}" + (f"?{urlencode(query)}" if query else "")
        try:
            reply = await link.exchange(target, {"authorization": f"Bearer {key}"}, body, DEADLINE_S, method)
        except LinkError as err:
            raise self._not_running() from err
        finally:
            await link.close()
        if reply.status >= 400:
            raise _refusal(reply.status, reply.body)
        return _document(reply.body)

    def _not_running(self) -> ConfigError:
        return ConfigError(
            f"no coordinator runs with the state of {self._state_dir}", next_step="start it: midstream coordinator"
        )


def _document(body: bytes) -> dict[str, Any]:
    try:
        found = json.loads(body)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise LinkError(
            "what answered on the coordinator's port sent no JSON object",
            next_step="check that coordinator and command are of the same release",
        )
    return found


def _refusal(status: int, body: bytes) -> BadRequest | NotFound | LinkError:
    try:
        error = json.loads(body)["error"]
        message, field = str(error["message"]), error.get("param")
    except (ValueError, KeyError, TypeError):
        return LinkError(f"the coordinator answered with status {status}", next_step="see the log of the coordinator")
    if status == 404:
        return NotFound(message)
    return BadRequest(message, field=field if isinstance(field, str) else None)

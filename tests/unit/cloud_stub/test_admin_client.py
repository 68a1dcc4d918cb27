"""The command line's way to the coordinator: whatever is wrong on it is told with a next step."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from attrs import define

from cloud_stub.admin import ADMIN
from cloud_stub.admin_client import AdminClient
from cloud_stub.authority import ROOTS_FILE, ensure_certificates, open_authority
from cloud_stub.certificates import read_roots
from links.http_server import serve
from links.port import Request, Response, Route
from links.tls import server_context
from protocol.clock import wall_now
from protocol.errors import BadRequest, ConfigError, LinkError


@define
class Desk:
    """A server with a coordinator's certificate that answers what a test wants."""

    state_dir: Path
    answer: Response

    @property
    def client(self) -> AdminClient:
        return AdminClient(self.state_dir)


@pytest.fixture
async def desk(tmp_path: Path) -> AsyncIterator[Desk]:
    authority, now_s = open_authority(tmp_path, "lab", wall_now().unix_s), wall_now().unix_s
    ensure_certificates(authority, ["127.0.0.1"], now_s)
    found = Desk(tmp_path, Response())

    async def handle(request: Request) -> Response:
        return found.answer

    files = authority.server_file, authority.server_file, authority.roots_file
    context = server_context(*files, require_client=False)
    server = await serve([Route("GET", f"{ADMIN}/policy", handle)], host="127.0.0.1", port=0, ssl=context)
    (tmp_path / "run.json").write_text(json.dumps({"host": "127.0.0.1", "port": server.port, "pid": 1}))
    yield found
    await server.close()


async def test_an_answer_comes_back_as_it_was_sent(desk: Desk) -> None:
    desk.answer = Response(body=b'{"policies": []}')
    assert await desk.client.ask("GET", "/policy") == {"policies": []}


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b"null", b"\xff"])
async def test_an_answer_that_is_no_document(desk: Desk, body: bytes) -> None:
    desk.answer = Response(body=body)
    with pytest.raises(LinkError, match="no JSON object") as caught:
        await desk.client.ask("GET", "/policy")
    assert "same release" in caught.value.next_step


@pytest.mark.parametrize("body", [b"", b"oops", b"[]", b'{"error": "text"}', b'{"error": {}}'])
async def test_a_refusal_that_is_no_document(desk: Desk, body: bytes) -> None:
    desk.answer = Response(500, body=body)
    with pytest.raises(LinkError, match="status 500") as caught:
        await desk.client.ask("GET", "/policy")
    assert caught.value.next_step


async def test_a_refusal_names_its_field(desk: Desk) -> None:
    desk.answer = Response(400, body=b'{"error": {"message": "no", "param": "split.ratio"}}')
    with pytest.raises(BadRequest) as caught:
        await desk.client.ask("GET", "/policy")
    assert caught.value.field == "split.ratio"


@pytest.mark.parametrize("content", [None, b"", b"not a certificate", b"\xff" * 100])
async def test_a_ca_file_that_cannot_be_used(desk: Desk, content: bytes | None) -> None:
    file = desk.state_dir / ROOTS_FILE
    file.unlink()
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=ROOTS_FILE) as caught:
        await desk.client.ask("GET", "/policy")
    assert "restart the coordinator" in caught.value.next_step


def test_roots_may_have_comments(tmp_path: Path) -> None:
    authority, file = open_authority(tmp_path / "s", "lab", wall_now().unix_s), tmp_path / "roots.pem"
    file.write_text("# Würzburg\n" + authority.ca_pem, encoding="utf-8")
    assert authority.ca_pem in read_roots(file, next_step="", field="broker_ca")

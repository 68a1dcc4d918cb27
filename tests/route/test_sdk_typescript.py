"""The TypeScript SDK: built, its own tests, and against a gateway that is restarted under it."""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path

import pytest

from engines.fakes_text import FakeTextEngine
from gateway.mount import GatewayPorts, build
from gateway.settings import GatewaySettings
from gateway.targets import Target
from links.http_server import serve
from protocol.policy import Policy
from tests.conftest import ROOT
from tests.route.test_control_channel import House

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("npm") is None, reason="node and npm are not here"),
]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy with its packages, compiled."""
    folder = tmp_path_factory.mktemp("sdk")
    source = ROOT / "sdk_typescript"
    shutil.copytree(source, folder / "sdk", ignore=shutil.ignore_patterns("node_modules", "dist"))
    code = os.system(
        f"cd {folder / 'sdk'} && npm install --no-audit --no-fund >npm.log 2>&1 && npm run build >tsc.log 2>&1"
    )
    assert code == 0, (folder / "sdk" / "npm.log").read_text()[-2000:]
    return folder / "sdk"


async def node(built: Path, test: str, **environment: str) -> str:
    process = await asyncio.create_subprocess_exec(
        "node", "--test", f"dist/test/{test}.test.js",
        cwd=built, env={**os.environ, **environment}, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    output, _ = await asyncio.wait_for(process.communicate(), 60)
    text = output.decode()
    assert process.returncode == 0, text[-4000:]
    return text


async def test_its_own_tests_pass(built: Path) -> None:
    assert "# pass 5" in await node(built, "handle")


async def test_a_restart_of_the_gateway_loses_nothing(built: Path, tmp_path: Path) -> None:
    house = House(tmp_path)
    await house.open()
    running = asyncio.create_task(node(built, "live", MIDSTREAM_URL=house.url))
    async with asyncio.timeout(30):
        while sum(result.kind == "part" for result in house.results) < 20:
            await asyncio.sleep(0.02)
    await house.close()
    await asyncio.sleep(0.2)
    await house.open()
    await running
    kept = await house.store.results("local", "c" * 32)
    assert [result.body["part"] for result in kept if result.kind == "part"] == list(range(100))
    await house.close()


async def test_answers_come_in_pieces(built: Path) -> None:
    engine = FakeTextEngine(answer_tokens=12)
    target = Target("device", True, engine, frozenset({"m"}))
    mount = build(GatewaySettings(), GatewayPorts(lambda: [target], Policy))
    await mount.start()
    server = await serve(mount.routes, [], host="127.0.0.1", port=0)
    output = await node(built, "live", MIDSTREAM_URL=f"http://127.0.0.1:{server.port}", MIDSTREAM_MODEL="m")
    assert "# pass 1" in output
    await server.close()
    await mount.stop()
    await engine.close()

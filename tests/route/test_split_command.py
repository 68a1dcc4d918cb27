"""`midstream split` against a running device with a real model and a real server behind a shaper."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from attrs import define

from agent.cli.split import split
from links.http import HttpLink
from protocol.errors import BadRequest, ConfigError, MidstreamError
from protocol.oip import InferRequest, bytes_tensor, encode_request
from split_models.recipes import recipe
from tests.tensor_house import CLS, Cloud, Device, bundle_root, cloud, device, store_with

TRACE = "seconds,up_bytes_per_s,down_bytes_per_s,delay_s\n" + "".join(
    f"{second},{12_500_000 if second % 60 < 30 else 20_000},12_500_000,0.01\n" for second in range(120)
)


@define(eq=False)
class Houses:
    url: str
    device: Device
    cloud: Cloud


@pytest.fixture
async def houses(
    model_file: Callable[[str], Path], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Houses]:
    root = bundle_root([CLS], model_file, tmp_path_factory.mktemp("bundles"))
    files = {CLS: model_file(CLS)}
    async with cloud(root, store_with(tmp_path / "there", files)) as there:
        url = f"http://127.0.0.1:{there.proxy.port}"
        async with device(store_with(tmp_path / "here", files), url) as here:
            for _ in range(200):
                if here.way.runners[CLS].plan.manifest.cuts:
                    break
                await asyncio.sleep(0.05)
            yield Houses(f"http://127.0.0.1:{here.server.port}", here, there)


async def ask(url: str, times: int) -> None:
    """Answer a picture so many times."""
    link = HttpLink("agent", url)
    picture = recipe("ppocr-cls").calibration()[0]
    headers, body = encode_request(InferRequest(CLS, (bytes_tensor("image", [picture]),), binary=True))
    for _ in range(times):
        reply = await link.exchange(f"/v2/models/{CLS}/infer", headers, body, 20.0)
        assert reply.status == 200
    await link.close()


async def test_explain_tells_every_arm_and_draws_it(
    houses: Houses, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    await ask(houses.url, 4)
    assert await asyncio.to_thread(split, ["--url", houses.url, "explain", CLS]) == 0
    text = capsys.readouterr().out
    manifest = houses.device.way.runners[CLS].plan.manifest
    for cut in manifest.cuts:
        assert f"cut:{cut.id}:{cut.codec}" in text
    assert "Mbit/s: " in text and "held: " in text and " o device" in text
    png = tmp_path / "arms.png"
    assert await asyncio.to_thread(split, ["--url", houses.url, "explain", CLS, "--png", str(png)]) == 0
    assert png.read_bytes().startswith(b"\x89PNG")
    capsys.readouterr()
    assert await asyncio.to_thread(split, ["--url", houses.url, "explain", CLS, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["report"]["digest"] == manifest.digest
    assert len(found["best"]) == len(found["bytes_per_s"]) == len(found["curves"][0]["seconds"])


async def test_replay_compares_ours_with_fixed_arms_and_the_oracle(
    houses: Houses, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "walk.csv"
    trace.write_text(TRACE)
    arguments = ["--url", houses.url, "replay", CLS, "--trace", str(trace), "--every-ms", "500", "--json"]
    assert await asyncio.to_thread(split, arguments) == 0
    runs = json.loads(capsys.readouterr().out)["runs"]
    assert {"device", "cloud", "midstream", "oracle"} <= set(runs)
    assert all(runs["oracle"]["mean_s"] <= run["mean_s"] + 1e-9 for run in runs.values())
    assert runs["midstream"]["mean_s"] < runs["cloud"]["mean_s"]
    assert await asyncio.to_thread(split, arguments[:-1]) == 0
    assert "oracle" in capsys.readouterr().out


async def test_mistakes_are_named(houses: Houses, tmp_path: Path) -> None:
    for arguments, kind, words in (
        (["explain", "nothing"], BadRequest, "models with arms: " + CLS),
        (["explain", CLS, "--from-mbit", "5", "--to-mbit", "1"], ConfigError, "--from-mbit"),
        (["replay", CLS, "--trace", str(tmp_path / "none.csv")], ConfigError, "none.csv"),
    ):
        with pytest.raises(MidstreamError) as caught:
            await asyncio.to_thread(split, ["--url", houses.url, *arguments])
        assert isinstance(caught.value, kind) and words in str(caught.value)

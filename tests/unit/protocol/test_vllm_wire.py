"""vLLM's documented wire form: our adapter reads it, and the fake server of the tests writes no other.

tests/unit/protocol/vllm_wire.json tells where each form is documented; it is no live recording.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from links.http import HttpLink
from protocol.errors import ContextOverflow, EngineError
from protocol.openai_wire import dump
from protocol.provider_kinds import codec_of
from protocol.text import Message, Sampling, TextRequest, Token, Usage
from tests.route.vllm_server import vllm_server

WIRE = json.loads((Path(__file__).parent / "vllm_wire.json").read_text())
TALK = (Message("user", "Where?"),)
SO_FAR = Token(index=0, id=None, data=b"The mill stands")
ASK = TextRequest("m", TALK, Sampling(max_tokens=9), prefix=(SO_FAR,))


def events(lines: list[dict[str, Any]]) -> bytes:
    return b"".join(b"data: " + dump(line) + b"\n\n" for line in lines) + b"data: [DONE]\n\n"


@pytest.mark.parametrize("step", [1, 33, 100_000])
@pytest.mark.parametrize("name", ["chat_stream", "completion_stream"])
def test_streams_are_read(name: str, step: int) -> None:
    form, reader = WIRE[name], codec_of("vllm").reader(ASK)
    data = events(form["lines"])
    deltas = [delta for at in range(0, len(data), step) for delta in reader.feed(data[at : at + step])]
    assert "".join(delta.text for delta in deltas) == form["text"]
    assert [delta.finish for delta in deltas if delta.finish] == [form["finish"]]
    assert [delta.usage for delta in deltas if delta.usage] == [Usage(*form["usage"], 0)]
    assert reader.ended


def test_an_error_in_a_stream_of_status_200_is_one() -> None:
    reader = codec_of("vllm").reader(ASK)
    with pytest.raises(EngineError, match="Internal server error"):
        list(reader.feed(events(WIRE["error_in_stream"]["lines"])))


@pytest.mark.parametrize("row", WIRE["refusals"], ids=lambda row: row["source"].split(":")[0])
def test_refusals_are_told_with_their_numbers(row: dict[str, Any]) -> None:
    found = codec_of("vllm").error(400, {}, dump({"error": row["error"]}))
    assert type(found).__name__ == row["family"]
    if isinstance(found, ContextOverflow):
        assert [found.prompt_tokens, found.context_tokens] == row["counts"]


def test_a_whole_answer_is_read() -> None:
    found = codec_of("vllm").whole(dump(WIRE["chat_whole"]["body"]))
    assert (found.text, found.finish, found.usage) == (" hill", "stop", Usage(3, 2, 0))


async def test_the_fake_server_writes_nothing_else() -> None:
    async with vllm_server("vllm") as server:
        link = HttpLink("stock", server.url)
        try:
            for stream in (True, False):
                call = codec_of("vllm").call("m", ASK, stream=stream)
                reply = await link.exchange(call.path, {}, call.body, 10.0)
                if stream:
                    assert reply.body.endswith(b"data: [DONE]\n\n")
                    check([json.loads(line[6:]) for line in reply.body.splitlines() if line.startswith(b"data: {")])
                else:
                    known(json.loads(reply.body), WIRE["chat_whole"]["body"])
            known(json.loads((await link.exchange("/v1/models", {}, b"", 10.0, "GET")).body), WIRE["models"]["body"])
            both = json.dumps({**json.loads(call.body), "add_generation_prompt": True}).encode()
            refused = await link.exchange(call.path, {}, both, 10.0)
            assert (refused.status, json.loads(refused.body)) == (400, {"error": WIRE["refusals"][0]["error"]})
        finally:
            await link.close()


def check(chunks: list[dict[str, Any]]) -> None:
    """A role first, text after it, then an end, then usage without choices; each with fields of the real ones."""
    lines = WIRE["chat_stream"]["lines"]
    known(chunks[0], lines[0])
    assert chunks[0]["choices"][0]["delta"] == lines[0]["choices"][0]["delta"]
    for chunk in chunks[1:-1]:
        known(chunk, lines[2])
    assert [bool(chunk["choices"][0]["finish_reason"]) for chunk in chunks[:-1]] == [False] * (len(chunks) - 2) + [True]
    known(chunks[-1], lines[3])
    assert chunks[-1]["choices"] == [] and set(chunks[-1]["usage"]) == set(lines[3]["usage"])


def known(mine: dict[str, Any], real: dict[str, Any]) -> None:
    """All fields, in choices too, are among the documented ones."""
    assert set(mine) <= set(real)
    for name in ("choices", "data"):
        for one, other in zip(mine.get(name, []), real.get(name, []), strict=False):
            assert set(one) <= set(other)
            assert set(one.get("message", {})) <= set(other.get("message", {}))

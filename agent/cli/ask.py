"""`midstream infer` and `midstream chat`: one request to the running agent, shown with what ran where."""

from __future__ import annotations

import argparse
import asyncio
import json
import struct
import sys
import time
from pathlib import Path
from typing import Any, TextIO
from urllib.parse import quote

from agent.cli.answers import ChatStream, labels_of, painted
from agent.config import DEFAULT_PORT, AgentConfig, colours_wanted, load
from links.http import HttpLink
from links.port import Link, RejectedStatus, Reply
from protocol.errors import BadRequest, ConfigError, LinkError, MidstreamError
from protocol.oip import InferRequest, InferResponse, decode_response, encode_request
from protocol.sse import SseParser
from protocol.tensors import Tensor

MAX_IMAGE_BYTES = 16 << 20
MAX_EVENT_BYTES = 1 << 20
MAX_PROMPT_BYTES = 2 << 20
DEFAULT_DEADLINE_S = 60.0
VERIFY = "midstream models verify"
# First use of a text model loads it.
CHAT_DEADLINE_S = 120.0


def infer(argv: list[str]) -> int:
    """Send an encoded image to a model and print what it found, on which arm, in how many milliseconds."""
    parser = _parser("infer", "run an image model through the running agent")
    parser.add_argument("model")
    parser.add_argument("image", type=Path, help="a JPEG or PNG file")
    parser.add_argument("--repeat", type=int, default=1, help="how many times (default 1)")
    options = parser.parse_args(argv)
    image = _read_image(options.image)
    return asyncio.run(_infer(options, image))


def chat(argv: list[str]) -> int:
    """Stream an answer, each token in the colour of the side that made it."""
    parser = _parser("chat", "ask the text model; device tokens are green, cloud tokens are blue")
    parser.add_argument("prompt", help="what to ask; - reads standard input")
    parser.add_argument("--model", default="", help="default: the agent's text model")
    parser.add_argument("--system", default="", help="system message")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--color", action="store_true", help="colours even when the output is no terminal")
    options = parser.parse_args(argv)
    options.color = options.color or (sys.stdout.isatty() and colours_wanted())
    prompt = _prompt(
        sys.stdin.buffer.read(MAX_PROMPT_BYTES + 1)
        if options.prompt == "-"
        else options.prompt.encode("utf-8", "surrogateescape")
    )
    return asyncio.run(_chat(options, prompt))


def agent_link(url: str) -> Link:
    """A link to the running agent; who asks for it closes it."""
    return HttpLink("agent", url)


def agent_url(given: str | None) -> str:
    """The running agent's address: given, else where the configuration puts it."""
    if given:
        return given
    return local_url(load())


def local_url(config: AgentConfig) -> str:
    """Where a running agent of this configuration answers on this machine."""
    return f"http://127.0.0.1:{config.port or DEFAULT_PORT}"


async def get_json(url: str, path: str, deadline_s: float = 5.0) -> dict[str, Any]:
    """GET a JSON object of the agent. Raises LinkError with a next step when it does not run."""
    link = HttpLink("agent", url)
    try:
        reply = await link.exchange(path, {}, b"", deadline_s, method="GET")
    except LinkError as err:
        raise not_running(url, err) from err
    finally:
        await link.close()
    if reply.status not in (200, 503):
        raise error_of(reply)
    try:
        found = json.loads(reply.body)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise LinkError(f"{url}{path} did not answer with an object", next_step="check what listens there")
    return found


def not_running(url: str, err: LinkError) -> LinkError:
    """The error for an agent that does not answer."""
    return LinkError(f"no agent answers at {url}: {err.message}", next_step="start one with `midstream agent`")


def error_of(reply: Reply) -> MidstreamError:
    """The error that an answer of the agent carries (OIP: a string, OpenAI: an object)."""
    try:
        found = json.loads(reply.body)["error"]
        message = str(found["message"] if isinstance(found, dict) else found)
    except (ValueError, KeyError, TypeError):
        message = reply.body[:200].decode("utf-8", "replace")
    return BadRequest(f"the agent answered {reply.status}: {message}")


def _parser(verb: str, text: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"midstream {verb}", description=text)
    parser.add_argument("--url", help="the agent's address (default: from the configuration)")
    parser.add_argument("--json", action="store_true", help="one JSON object per answer")
    return parser


def _read_image(path: Path) -> bytes:
    try:
        with path.open("rb") as file:  # bounded by what is read: a device file has no size
            data = file.read(MAX_IMAGE_BYTES + 1)
    except OSError as err:
        raise ConfigError(f"cannot read {path}: {err.strerror}", next_step="check the path") from err
    if len(data) > MAX_IMAGE_BYTES:
        raise ConfigError(f"{path} is larger than {MAX_IMAGE_BYTES >> 20} MiB", next_step="scale the image down")
    return data


def _prompt(data: bytes) -> str:
    """What to ask, whatever encoding the terminal claims to have."""
    if len(data) > MAX_PROMPT_BYTES:
        raise ConfigError(f"the prompt is larger than {MAX_PROMPT_BYTES >> 10} KiB", next_step="shorten it")
    try:
        prompt = data.decode("utf-8")
    except UnicodeDecodeError as err:
        raise ConfigError(f"the prompt is not text in UTF-8 at byte {err.start}", next_step="convert it first") from err
    if not prompt.strip():
        raise ConfigError("there is nothing to ask", next_step='midstream chat "a question", or - with text on stdin')
    return prompt


def image_request(model: str, image: bytes) -> InferRequest:
    """An encoded image as a BYTES tensor named `image`, answers in binary."""
    tensor = Tensor("image", "BYTES", (1,), struct.pack("<I", len(image)) + image)
    return InferRequest(model=model, inputs=(tensor,), binary=True)


async def _infer(options: argparse.Namespace, image: bytes) -> int:
    headers, body = encode_request(image_request(options.model, image))
    path = f"/v2/models/{quote(options.model, safe='')}/infer"
    link = HttpLink("agent", agent_url(options.url))
    try:
        for _ in range(max(1, options.repeat)):
            began_s = time.monotonic()
            try:
                reply = await link.exchange(path, headers, body, DEFAULT_DEADLINE_S)
            except LinkError as err:
                raise not_running(agent_url(options.url), err) from err
            if reply.status != 200:
                raise error_of(reply)
            _show(options, decode_response(reply.headers, reply.body), (time.monotonic() - began_s) * 1000)
    finally:
        await link.close()
    return 0


def _show(options: argparse.Namespace, response: InferResponse, elapsed_ms: float) -> None:
    found = labels_of(response)
    arm = str(response.parameters.get("midstream_arm", response.parameters.get("arm", "?")))
    if options.json:
        print(json.dumps({"model": response.model_name, "arm": arm, "ms": round(elapsed_ms, 2), **found}))
        return
    print(f"{response.model_name}: arm {arm}, {elapsed_ms:.1f} ms")
    for line in found.get("lines", ()):
        print(f"  {line}")


async def _chat(options: argparse.Namespace, prompt: str) -> int:
    messages = [{"role": "system", "content": options.system}] if options.system else []
    url = agent_url(options.url)
    model = options.model or await _text_model(url)
    body = {
        "model": model,
        "messages": [*messages, {"role": "user", "content": prompt}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": options.max_tokens,
        "temperature": options.temperature,
    }
    stream = ChatStream()
    link = HttpLink("agent", url)
    try:
        await _read_stream(link, body, stream, None if options.json else sys.stdout, color=options.color)
    except RejectedStatus as err:
        raise error_of(Reply(err.status, {}, err.body)) from err
    except LinkError as err:
        raise (not_running(url, err) if not stream.text else err) from err
    finally:
        await link.close()
    if options.json:
        print(json.dumps(stream.summary(model)))
    else:
        print("\n" + stream.footer())
    return 0


async def _text_model(url: str) -> str:
    status = await get_json(url, "/midstream/v1/status")
    model = status.get("text_model")
    if not model:
        for warning in status.get("warnings", ()):
            if warning.get("name") == "text_model":  # it was asked for, and this is why it is not there
                raise ConfigError(str(warning.get("text")), next_step=str(warning.get("next_step") or VERIFY))
        raise ConfigError(
            "the agent serves no text model", next_step="start it with --text-model NAME; `midstream models list`"
        )
    return str(model)


async def _read_stream(
    link: HttpLink, body: dict[str, Any], stream: ChatStream, out: TextIO | None, *, color: bool
) -> None:
    parser = SseParser(MAX_EVENT_BYTES)
    headers = {"content-type": "application/json", "accept": "text/event-stream"}
    async for chunk in link.lines("/v1/chat/completions", headers, json.dumps(body).encode(), CHAT_DEADLINE_S):
        for event in parser.feed(chunk):
            for side, text in stream.take(event.data):
                if out is not None:
                    out.write(painted(side, text) if color else text)
                    out.flush()

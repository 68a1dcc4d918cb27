"""Every setting of the agent once: its name, how text becomes its value, and what it means.

The same name serves all three sources: `port = 8790` in agent.toml, MIDSTREAM_PORT in the environment, `--port` as a
flag. Later sources win.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attrs import frozen

ENV_PREFIX = "MIDSTREAM_"
TRUE_WORDS = frozenset({"1", "true", "yes", "on"})
FALSE_WORDS = frozenset({"0", "false", "no", "off"})
LOG_LEVELS = ("debug", "info", "warning", "error")


@frozen
class Setting:
    """`parse` takes TOML values and text alike and raises ValueError with what it wants instead.

    secret: comes from the file or the environment only, for a command line shows in the process list; errors leave its
    value out.
    """

    name: str
    parse: Callable[[Any], Any]
    help: str
    env: str = ""
    secret: bool = False

    @property
    def form(self) -> str:
        """What the value looks like, for the list of flags: `HOST:PORT`, `off|exact|semantic`."""
        return "|".join(self.parse.words) if isinstance(self.parse, Choice) else _FORMS.get(self.parse, "NUMBER")

    @property
    def variable(self) -> str:
        """Name of the environment variable."""
        return self.env or ENV_PREFIX + self.name.upper()


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError("a non-empty string")
    return value.strip()


def _key(value: Any) -> str:
    text = _text(value)
    if not all("!" <= letter <= "~" for letter in text):
        raise ValueError("printable ASCII without spaces")
    return text


def _flag(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    word = str(value).strip().lower()
    if word in TRUE_WORDS | FALSE_WORDS:
        return word in TRUE_WORDS
    raise ValueError("true or false")


def _names(value: Any) -> tuple[str, ...]:
    items = value.split(",") if isinstance(value, str) else value
    if not isinstance(items, list | tuple) or not all(isinstance(item, str) for item in items):
        raise ValueError("a list of names, or names with commas between them")
    return tuple(item.strip() for item in items if item.strip())


def _whole(low: int, high: int) -> Callable[[Any], int]:
    def parse(value: Any) -> int:
        wanted = f"a whole number from {low} to {high}"
        if isinstance(value, bool):
            raise ValueError(wanted)
        try:
            number = int(value)
        except (TypeError, ValueError):
            raise ValueError(wanted) from None
        if (number != value and not isinstance(value, str)) or not low <= number <= high:
            raise ValueError(wanted)
        return number

    return parse


def _real(low: float, high: float) -> Callable[[Any], float]:
    def parse(value: Any) -> float:
        wanted = f"a number from {low:g} to {high:g}"
        if isinstance(value, bool):
            raise ValueError(wanted)
        try:
            number = float(value)
        except (TypeError, ValueError):
            raise ValueError(wanted) from None
        if not low <= number <= high:
            raise ValueError(wanted)
        return number

    return parse


@frozen
class Choice:
    """One of `words`."""

    words: tuple[str, ...]

    def __call__(self, value: Any) -> str:
        if value not in self.words:
            raise ValueError("one of " + ", ".join(self.words))
        return str(value)


def _choice(*words: str) -> Choice:
    return Choice(words)


def parse_address(value: Any) -> tuple[str, int]:
    """`host:port` or `[v6]:port`; ValueError says what is wanted."""
    host, _, port = str(value).strip().rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError("host:port")
    return host, int(port)


_FORMS: dict[Callable[[Any], Any], str] = {
    _text: "TEXT", _key: "TEXT", _flag: "true|false", _names: "A,B", parse_address: "HOST:PORT",
}  # fmt: skip

SETTINGS: tuple[Setting, ...] = (
    Setting("state_dir", _text, "folder for identity, policy and what was learnt"),
    Setting("models_dir", _text, "folder of the model store", env="MIDSTREAM_MODELS"),
    Setting("device_id", _text, "name in the fleet, [a-z0-9-]{1,32}; made once when absent"),
    Setting("host", _text, "address the local API listens on"),
    Setting("port", _whole(0, 65535), "port the local API listens on; 0 takes a free one"),
    Setting("expose", _flag, "allow a `host` that is not a loopback address"),
    Setting("coordinator", parse_address, "static address of the coordinator, host:port; tried before anything found"),
    Setting("broker", parse_address, "MQTT broker, host:port; overrides what the coordinator names"),
    Setting("broker_tls", _flag, "whether the broker speaks TLS; by default as the coordinator says"),
    Setting("join_token", _text, "one-time token that the coordinator printed", secret=True),
    Setting("mdns", _flag, "look for the coordinator on the local network"),
    Setting("mdns_interfaces", _names, "addresses of the interfaces that mDNS uses; all when absent"),
    Setting(
        "webrtc",
        _choice("auto", "always", "off"),
        "a second way to the coordinator, through NAT: auto when its address cannot be reached (needs the extra)",
    ),
    Setting(
        "webrtc_servers", _names, "STUN and TURN servers: stun:HOST:PORT, turn:HOST:PORT?transport=udp; none: nobody"
    ),
    Setting("webrtc_username", _text, "user name at the TURN server"),
    Setting("webrtc_credential", _key, "credential at the TURN server", secret=True),
    Setting("webrtc_addresses", _names, "addresses of this device for WebRTC; all but loopback when absent"),
    Setting("data_proxy", parse_address, "send the data plane to this host:port instead (shapers, tests)"),
    Setting("tensor_models", _names, "tensor models to serve"),
    Setting("tensor_threads", _whole(0, 256), "threads for one tensor inference; 0: decided from the cores"),
    Setting("text_model", _text, "text model to serve"),
    Setting(
        "text_engine",
        _choice("auto", "llama_server", "llama_cpp", "onnx_genai", "openai_compat"),
        "engine for the text model; auto: the fastest installed one for it, as measured",
    ),
    Setting("text_stands_in_for", _names, "stronger models it may answer for, where dispatch.weaker_model consents"),
    Setting("text_threads", _whole(0, 256), "threads for text; 0: decided from the cores"),
    Setting("text_url", _text, "base URL of an OpenAI-compatible server, for text_engine openai_compat"),
    Setting("otel_endpoint", _text, "OpenTelemetry collector for traces, http(s)://HOST:4318 (extra otel); none: none"),
    Setting("text_key", _key, "API key of the server at text_url", secret=True),
    Setting("context_tokens", _whole(64, 1 << 20), "context of the text model in tokens"),
    Setting("slowdown", _real(1.0, 1000.0), "declared slow-down factor of this device's engines, for demonstrations"),
    Setting(
        "wait_target_s", _real(0.01, 600.0), "a new request should wait no longer than this; policy may not raise it"
    ),
    Setting(
        "cache", _choice("off", "exact", "semantic"), "keep answers and give them again (semantic needs the extra)"
    ),
    Setting("cache_entries", _whole(1, 10_000_000), "answers that the cache keeps at most"),
    Setting("cache_ttl_s", _real(1.0, 1e8), "seconds after which a kept answer is too old"),
    Setting("cache_threshold", _real(0.0, 1.0), "least cosine of a semantic hit; 0: as tuned for the shipped encoder"),
    Setting("conversations", _flag, "keep the turns of requests that carry a conversation_id"),
    Setting("conversations_mib", _whole(1, 1 << 20), "room for the conversations of one tenant, in MiB; the oldest go"),
    Setting("benchmark", _flag, "measure this device's models after start, in the background"),
    Setting("allow_raw_input", _flag, "allow policy to send raw inputs off the device"),
    Setting("allow_cloud_text", _flag, "allow policy to send prompts off the device"),
    Setting("max_prompt_bytes", _whole(1, 64 << 20), "upper bound over policy for one prompt"),
    Setting("max_answer_tokens", _whole(1, 1 << 20), "upper bound over policy for one answer"),
    Setting("usd_per_day", _real(0.0, 1e6), "upper bound over policy for what providers may cost a day"),
    Setting("usd_per_month", _real(0.0, 1e6), "upper bound over policy for what providers may cost a month"),
    Setting("log_level", _choice(*LOG_LEVELS), "debug, info, warning or error; stays whatever policy says when set"),
)

BY_NAME = {setting.name: setting for setting in SETTINGS}

"""The coordinator's configuration: one TOML file, the environment and flags, parsed once and frozen.

Later sources win: built-in defaults, file, `MIDSTREAM_COORDINATOR_<FIELD>`, flags. Every mistake is a ConfigError that
names the field and the next step.
"""

from __future__ import annotations

import difflib
import ipaddress
import os
import re
import tomllib
from argparse import ArgumentParser, BooleanOptionalAction, Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from attrs import evolve, field, frozen

from gateway.memory_settings import CacheKind, MemorySettings
from gateway.providers import NO_PROVIDERS, Providers, read_providers
from links.event_loop import LoopKind
from links.webrtc_settings import WebRtcSettings, check
from protocol.decode import decode_listing
from protocol.errors import ConfigError, ProtocolError
from protocol.policy_routing import ShadowRouting

DEFAULT_PORT = 8791
DEFAULT_BROKER_PORT = 8883
EMBEDDED = "embedded"
ENV_PREFIX = "MIDSTREAM_COORDINATOR_"
MAX_CONFIG_BYTES = 64 << 10

_HOST_NAME = re.compile(
    r"(?=.{1,253}$)[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?(\.[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?)*$"
)
_FLEET = re.compile(r"[a-z0-9-]{1,32}$")


@frozen
class BrokerUrl:
    """A foreign MQTT broker. `tls` is True for mqtts://."""

    host: str
    port: int
    tls: bool


@frozen(kw_only=True)
class CoordinatorConfig:
    """Everything the coordinator may be told; each field has a working default.

    addresses: where devices reach this machine (empty: the addresses of all interfaces). interfaces: addresses on
    which mDNS speaks (empty: all). broker: `embedded` or mqtts://host:port. models: names served whole (empty: every
    model in the store). bundles: tensor models to cut, with a recipe or without (empty: every one with a recipe).
    text_threads: 0 lets the engine choose. text_wait_target_s: a text request should wait no longer than this for its
    turn; past it, it is refused with the time to come back after. tails_url: a server that has the models of `midstream
    tails export`; they run here while it cannot. join_ttl_s: how long a fresh join string can be used.
    webrtc: answer devices that cannot reach the port (needs the extra). webrtc_servers: STUN and TURN servers to use,
    none is contacted otherwise. webrtc_addresses: addresses of this machine for it (empty: all but loopback).
    cache, cache_entries, cache_ttl_s, cache_threshold, conversations: see gateway.memory.MemorySettings.
    conversations_postgres: where gateways on several machines share conversations (None: a database in state_dir).
    limits_redis: where gateways on several machines share the limits of tenants (None: a database in state_dir).
    otel_endpoint: the OpenTelemetry collector that gets traces (None: nobody does; needs the extra).
    shadow_share, shadow_usd_per_day: see protocol.policy_routing.ShadowRouting.
    """

    state_dir: Path
    models_dir: Path
    fleet: str = "default"
    host: str = "0.0.0.0"
    port: int = DEFAULT_PORT
    addresses: tuple[str, ...] = ()
    interfaces: tuple[str, ...] = ()
    mdns: bool = True
    broker: str = EMBEDDED
    broker_port: int = DEFAULT_BROKER_PORT
    broker_ca: Path | None = None
    models: tuple[str, ...] = ()
    bundles: tuple[str, ...] = ()
    cut: bool = True
    text_engine: Literal["llama_server", "llama_cpp", "onnx_genai", "none"] = "llama_server"
    text_threads: int = 0
    text_slots: int = 2
    text_context_tokens: int = 2048
    text_wait_target_s: float = 2.0
    tensor_threads: int = 0
    tensor_batch_rows: int = 8
    tensor_batch_wait_ms: int = 0
    tails_url: str = ""
    tails_ca: Path | None = None
    tails_token_file: Path | None = None
    join_ttl_s: float = 86_400.0
    webrtc: bool = True
    webrtc_servers: tuple[str, ...] = ()
    webrtc_username: str | None = None
    webrtc_credential: str | None = field(default=None, repr=False)
    webrtc_addresses: tuple[str, ...] = ()
    limits_redis: str | None = field(default=None, repr=False)
    otel_endpoint: str | None = None
    shadow_share: float = 0.0
    shadow_usd_per_day: float = ShadowRouting().usd_per_day
    cache: CacheKind = "off"
    cache_entries: int = MemorySettings().cache_entries
    cache_ttl_s: float = MemorySettings().cache_ttl_s
    cache_threshold: float = 0.0
    conversations: bool = True
    conversations_mib: int = MemorySettings().conversations_mib
    conversations_postgres: str | None = field(default=None, repr=False)
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    event_loop: LoopKind = "auto"
    providers: Providers = NO_PROVIDERS
    source: str = field(default="defaults", eq=False)

    @property
    def broker_url(self) -> BrokerUrl | None:
        """The foreign broker, or None for the embedded one."""
        return None if self.broker == EMBEDDED else parse_broker(self.broker)

    @property
    def memory(self) -> MemorySettings:
        """What the text way keeps between requests."""
        return MemorySettings(
            self.cache, self.cache_entries, self.cache_ttl_s, self.cache_threshold, self.conversations,
            self.conversations_mib, self.conversations_postgres,
        )  # fmt: skip

    @property
    def webrtc_settings(self) -> WebRtcSettings:
        """What the WebRTC side is made with."""
        return WebRtcSettings(
            servers=self.webrtc_servers, username=self.webrtc_username, credential=self.webrtc_credential,
            addresses=self.webrtc_addresses,
        )  # fmt: skip


def load_config(flags: Mapping[str, Any], environ: Mapping[str, str]) -> CoordinatorConfig:
    """Merge defaults, file, environment and `flags` (absent or None: not given). Raises ConfigError."""
    path = _config_path(flags.get("config"), environ)
    merged: dict[str, Any] = {"state_dir": str(_state_dir(environ)), "models_dir": str(_models_dir(environ))}
    if path is not None:
        merged |= _read_file(path)
    merged |= _from_environment(environ)
    merged |= {k: _as_document(v) for k, v in flags.items() if v is not None and k != "config"}
    merged["source"] = str(path) if path else "defaults"
    providers = read_providers(merged.pop("provider", None), merged.pop("provider_models", None))
    return evolve(_check(_decode(merged, merged["source"])), providers=providers)


def parse_broker(text: str) -> BrokerUrl:
    """`mqtts://host[:8883]` or `mqtt://host[:1883]`. Raises ConfigError."""
    wrong = ConfigError(
        f"broker is {text[:80]!r}", next_step="use `embedded`, mqtts://HOST:PORT or mqtt://HOST:PORT", field="broker"
    )
    try:
        url = urlsplit(text)
        port = url.port
    except ValueError:
        raise wrong from None
    if url.scheme not in ("mqtt", "mqtts") or not url.hostname or url.path not in ("", "/") or url.query:
        raise wrong
    if url.username or url.password:
        raise ConfigError(
            "the broker URL carries a password",
            next_step="name the host and port only; the coordinator identifies itself by its certificate",
            field="broker",
        )
    tls = url.scheme == "mqtts"
    return BrokerUrl(url.hostname, port or (8883 if tls else 1883), tls)


def _config_path(given: Any, environ: Mapping[str, str]) -> Path | None:
    named = given or environ.get(ENV_PREFIX + "CONFIG")
    if named:
        path = Path(named)
        if not path.is_file():
            raise ConfigError(f"no configuration file at {path}", next_step="check --config", field="config")
        return path
    home = Path(environ.get("XDG_CONFIG_HOME") or Path(environ.get("HOME", "/")) / ".config")
    candidates = (home / "midstream" / "coordinator.toml", Path("/etc/midstream/coordinator.toml"))
    return next((p for p in candidates if p.is_file()), None)


def _state_dir(environ: Mapping[str, str]) -> Path:
    if environ.get("STATE_DIRECTORY"):  # set by systemd; may list several, the first is ours
        return Path(environ["STATE_DIRECTORY"].split(":")[0]) / "coordinator"
    home = Path(environ.get("XDG_STATE_HOME") or Path(environ.get("HOME", "/")) / ".local" / "state")
    return home / "midstream" / "coordinator"


def _models_dir(environ: Mapping[str, str]) -> Path:
    if environ.get("MIDSTREAM_MODELS"):
        return Path(environ["MIDSTREAM_MODELS"])
    home = Path(environ.get("XDG_CACHE_HOME") or Path(environ.get("HOME", "/")) / ".cache")
    return home / "midstream" / "models"


def _read_file(path: Path) -> dict[str, Any]:
    try:
        data = path.read_bytes()
    except OSError as err:
        raise ConfigError(f"cannot read {path}: {err.strerror}", next_step="check its owner and mode") from err
    if len(data) > MAX_CONFIG_BYTES:
        raise ConfigError(f"{path} has {len(data)} bytes, at most {MAX_CONFIG_BYTES} are read")
    try:
        return tomllib.loads(data.decode("utf-8"))
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as err:
        raise ConfigError(f"{path} is not TOML: {err}", next_step="correct the line it names") from err


_LISTS = frozenset({"addresses", "interfaces", "models", "bundles", "webrtc_addresses", "webrtc_servers"})
_INTEGERS = frozenset({
    "port", "broker_port", "text_threads", "text_slots", "text_context_tokens", "tensor_threads", "tensor_batch_rows",
    "tensor_batch_wait_ms", "cache_entries", "conversations_mib",
})  # fmt: skip
_REALS = frozenset(
    {"join_ttl_s", "text_wait_target_s", "cache_ttl_s", "cache_threshold", "shadow_share", "shadow_usd_per_day"}
)
_FLAGS = frozenset({"mdns", "cut", "webrtc", "conversations"})
_SWITCH = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
_KNOWN = frozenset(a.name for a in CoordinatorConfig.__attrs_attrs__) - {"source", "providers"}


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, text in environ.items():
        if not key.startswith(ENV_PREFIX) or key == ENV_PREFIX + "CONFIG":
            continue
        name = key.removeprefix(ENV_PREFIX).lower()
        if name not in _KNOWN:
            raise ConfigError(f"{key} names no field", next_step=_names_hint(name), field=name)
        found[name] = _from_text(name, text, key)
    return found


def _from_text(name: str, text: str, where: str) -> Any:
    try:
        if name in _LISTS:
            return [part.strip() for part in text.split(",") if part.strip()]
        if name in _INTEGERS:
            return int(text)
        if name in _REALS:
            return float(text)
        return _SWITCH[text.lower()] if name in _FLAGS else text
    except (ValueError, KeyError) as err:
        raise ConfigError(f"{where} is {text[:64]!r}", next_step=f"give {_kind(name)}", field=name) from err


def _kind(name: str) -> str:
    if name in _INTEGERS:
        return "a whole number"
    return "a number" if name in _REALS else "true or false"


def _names_hint(name: str) -> str:
    near = difflib.get_close_matches(name, _KNOWN, n=1)
    return f"did you mean {near[0]}?" if near else f"known: {', '.join(sorted(_KNOWN))}"


def _as_document(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    return list(value) if isinstance(value, tuple) else value


def _decode(merged: dict[str, Any], where: str) -> CoordinatorConfig:
    try:
        config, unknown = decode_listing(CoordinatorConfig, merged, what="the coordinator's configuration")
    except ProtocolError as err:
        raise ConfigError(f"{where}: {err.message}", next_step="correct the field", field=err.field) from err
    if unknown:
        hint = _names_hint(unknown[0])
        raise ConfigError(f"{where}: unknown field {unknown[0]!r}", next_step=hint, field=unknown[0])
    return config


def _check(config: CoordinatorConfig) -> CoordinatorConfig:
    if not _FLEET.match(config.fleet):
        raise ConfigError(f"fleet is {config.fleet[:64]!r}", next_step="use [a-z0-9-], 1 to 32 of them", field="fleet")
    for name, low, high in (
        ("port", 0, 65_535), ("broker_port", 0, 65_535), ("text_threads", 0, 1024), ("tensor_threads", 0, 1024),
        ("text_wait_target_s", 0.01, 600.0), ("tensor_batch_rows", 1, 1024), ("tensor_batch_wait_ms", 0, 1000),
        ("shadow_share", 0.0, 1.0), ("shadow_usd_per_day", 0.0, 1e6),
        ("cache_entries", 1, 10_000_000), ("cache_ttl_s", 1.0, 1e8), ("cache_threshold", 0.0, 1.0),
        ("conversations_mib", 1, 1 << 20),
        ("text_slots", 1, 64), ("text_context_tokens", 128, 1 << 20), ("join_ttl_s", 60.0, 30 * 86_400.0),
    ):  # fmt: skip
        value = getattr(config, name)
        if not low <= value <= high:
            raise ConfigError(f"{name} is {value}", next_step=f"choose from {low} to {high}", field=name)
    for name in ("addresses", "interfaces"):
        for text in getattr(config, name):
            check_address(name, text, names_allowed=name == "addresses")
    check_address("host", config.host, names_allowed=True)
    _check_tails(config)
    check(config.webrtc_settings)
    if config.broker != EMBEDDED:
        url = parse_broker(config.broker)
        if url.tls and config.broker_ca is not None and not config.broker_ca.is_file():
            raise ConfigError(f"no CA file at {config.broker_ca}", next_step="check broker_ca", field="broker_ca")
    return config


def _check_tails(config: CoordinatorConfig) -> None:
    url = config.tails_url
    if url and not re.fullmatch(r"https?://[^/@\s]+(/[^@\s]*)?", url):
        raise ConfigError(f"tails_url is {url[:80]!r}", next_step="write it as https://HOST:PORT", field="tails_url")
    for name in ("tails_ca", "tails_token_file"):
        file = getattr(config, name)
        if file is not None and not file.is_file():
            raise ConfigError(f"no file at {file}", next_step=f"check {name}", field=name)
        if file is not None and not url:
            raise ConfigError(f"{name} is given without tails_url", next_step="name the server", field="tails_url")


def check_address(name: str, text: str, *, names_allowed: bool) -> None:
    """Whether `text`, of the setting or flag `name`, is an address (or a host name). Raises ConfigError."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        if names_allowed and _HOST_NAME.match(text):
            return
        kinds = "an IP address or a host name" if names_allowed else "the IP address of an interface"
        raise ConfigError(f"{name} has {text[:80]!r}", next_step=f"give {kinds}", field=name) from None


_HELP = {
    "state_dir": "where keys, registry and policy history are kept",
    "models_dir": "the model store",
    "fleet": "name of the fleet, [a-z0-9-]",
    "host": "address to listen on",
    "port": "port of the API, 0 takes a free one",
    "addresses": "addresses by which devices reach this machine, comma-separated",
    "interfaces": "addresses on which mDNS speaks, comma-separated",
    "mdns": "announce by mDNS",
    "broker": "embedded, or mqtts://HOST:PORT",
    "broker_port": "port of the embedded broker, 0 takes a free one",
    "broker_ca": "CA file of the named broker (default: the fleet's)",
    "models": "models to serve, comma-separated (default: all that are pulled)",
    "bundles": "models to cut, comma-separated (default: all with a recipe)",
    "cut": "cut models for devices",
    "text_engine": "llama_server, llama_cpp, onnx_genai or none",
    "text_threads": "threads of the text engine, 0: its own choice",
    "text_slots": "text answers at once per model",
    "text_context_tokens": "room for prompt and answer",
    "text_wait_target_s": "a text request should wait no longer than this for its turn, in seconds",
    "tensor_threads": "threads of one tensor run, 0: 1",
    "tensor_batch_rows": "requests of one model that wait may run together, so many rows at once; 1: never",
    "tensor_batch_wait_ms": "how long a batch may be held for more while another one runs",
    "tails_url": "inference server (Open Inference Protocol v2) that runs the tails, as http(s)://HOST:PORT",
    "tails_ca": "CA file of that server (default: the system's)",
    "tails_token_file": "file with a bearer token for that server",
    "webrtc": "answer devices that cannot reach the port by WebRTC (needs the extra webrtc)",
    "webrtc_servers": "STUN and TURN servers, comma-separated: stun:HOST:PORT, turn:HOST:PORT?transport=udp",
    "webrtc_username": "user name at the TURN server; the credential comes from the file or the environment",
    "webrtc_addresses": "addresses of this machine for WebRTC, comma-separated (default: all but loopback)",
    "cache": "keep answers and give them again: off, exact, semantic (semantic needs the extra cache)",
    "cache_entries": "answers that the cache keeps at most",
    "cache_ttl_s": "seconds after which a kept answer is too old",
    "cache_threshold": "least cosine of a semantic hit, 0: as tuned for the shipped encoder",
    "conversations": "keep the turns of requests that carry a conversation_id",
    "conversations_mib": "room for the conversations of one tenant, in MiB; the oldest go",
    "otel_endpoint": "OpenTelemetry collector that gets traces, http(s)://HOST:4318 (needs the extra otel)",
    "shadow_share": "share of requests that own models and providers both answer, to compare; nobody sees the second",
    "shadow_usd_per_day": "what those second answers may cost in a day",
    "join_ttl_s": "seconds for which a join string can be used",
    "log_level": "debug, info, warning or error",
    "event_loop": "auto (uvloop where it is installed, extra fast), asyncio or uvloop",
}


def add_flags(parser: ArgumentParser) -> None:
    """One flag per field, `--field-name`; on/off fields also have `--no-field-name`."""
    parser.add_argument("--config", type=Path, help="configuration file (TOML)")
    for name, text in _HELP.items():
        flag = "--" + name.replace("_", "-")
        if name in _FLAGS:
            parser.add_argument(flag, action=BooleanOptionalAction, default=None, help=text)
        else:
            parser.add_argument(flag, metavar=name.upper().rpartition("_")[2], help=text)


def flags_of(options: Namespace) -> dict[str, Any]:
    """The fields that were given on the command line, typed. Raises ConfigError."""
    found: dict[str, Any] = {"config": options.config}
    for name in _HELP:
        value = getattr(options, name)
        if value is not None:
            found[name] = value if name in _FLAGS else _from_text(name, value, "--" + name.replace("_", "-"))
    return found


def local_environment() -> dict[str, str]:
    """A copy of the process's environment; read here and nowhere else in this room."""
    return dict(os.environ)

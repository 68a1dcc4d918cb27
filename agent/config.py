"""The agent's configuration: file, environment and flags become one frozen AgentConfig. Nobody else reads them."""

from __future__ import annotations

import difflib
import ipaddress
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from attrs import field, frozen

from agent.settings_table import BY_NAME, ENV_PREFIX, SETTINGS
from gateway.memory_settings import CacheKind, MemorySettings
from gateway.providers import NO_PROVIDERS, Providers, read_providers
from links.webrtc_settings import WebRtcSettings, check
from protocol.errors import ConfigError

DEFAULT_PORT = 8790
MAX_CONFIG_BYTES = 256 << 10

Address = tuple[str, int]


@frozen
class PolicyBounds:
    """What local configuration lets policy do; policy may only be stricter."""

    allow_raw_input: bool = True
    allow_cloud_text: bool = True
    wait_target_s: float | None = None
    max_prompt_bytes: int | None = None
    max_answer_tokens: int | None = None
    usd_per_day: float | None = None
    usd_per_month: float | None = None
    log_level: Literal["debug", "info", "warning", "error"] | None = None


@frozen
class AgentConfig:
    """Everything the agent was told, checked. Addresses are (host, port)."""

    state_dir: Path
    models_dir: Path
    device_id: str | None = None
    labels: Mapping[str, str] = field(factory=dict)
    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    coordinator: Address | None = None
    broker: Address | None = None
    broker_tls: bool | None = None
    join_token: str | None = field(default=None, repr=False)
    mdns: bool = True
    mdns_interfaces: tuple[str, ...] = ()
    webrtc: Literal["auto", "always", "off"] = "auto"
    webrtc_servers: tuple[str, ...] = ()
    webrtc_username: str | None = None
    webrtc_credential: str | None = field(default=None, repr=False)
    webrtc_addresses: tuple[str, ...] = ()
    data_proxy: Address | None = None
    tensor_models: tuple[str, ...] = ()
    tensor_threads: int = 0
    text_model: str | None = None
    text_engine: Literal["auto", "llama_server", "llama_cpp", "onnx_genai", "openai_compat"] = "auto"
    text_stands_in_for: tuple[str, ...] = ()
    text_threads: int = 0
    text_url: str | None = None
    otel_endpoint: str | None = None
    text_key: str | None = field(default=None, repr=False)
    context_tokens: int = 2048
    slowdown: float = 1.0
    cache: CacheKind = "off"
    cache_entries: int = MemorySettings().cache_entries
    cache_ttl_s: float = MemorySettings().cache_ttl_s
    cache_threshold: float = 0.0
    conversations: bool = True
    conversations_mib: int = MemorySettings().conversations_mib
    benchmark: bool = True
    bounds: PolicyBounds = field(factory=PolicyBounds)
    providers: Providers = NO_PROVIDERS

    @property
    def identity_dir(self) -> Path:
        """Key, certificate and trust anchors."""
        return self.state_dir / "identity"

    @property
    def memory(self) -> MemorySettings:
        """What the text way keeps between requests."""
        return MemorySettings(
            self.cache, self.cache_entries, self.cache_ttl_s, self.cache_threshold, self.conversations,
            self.conversations_mib,
        )  # fmt: skip

    @property
    def webrtc_settings(self) -> WebRtcSettings:
        """What the WebRTC side is made with."""
        return WebRtcSettings(
            servers=self.webrtc_servers, username=self.webrtc_username, credential=self.webrtc_credential,
            addresses=self.webrtc_addresses,
        )  # fmt: skip


def load(
    flags: Mapping[str, Any] | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    file: Path | None = None,
) -> AgentConfig:
    """Read file, then the service manager's credentials, then environment, then flags; later ones win.

    Args:
        flags: setting name -> value; None values are absent.
        environ: the process environment unless given.
        file: agent.toml; the first existing default place unless given.

    Raises:
        ConfigError: names the setting and its source.
    """
    env = os.environ if environ is None else environ
    values: dict[str, Any] = {}
    labels: dict[str, str] = {}
    path = file or _default_file(env)
    if path is not None:
        _take_file(path, values, labels)
    if env.get("CREDENTIALS_DIRECTORY"):
        _take_credentials(Path(env["CREDENTIALS_DIRECTORY"]), values)
    _refuse_misspelt(env)
    for setting in SETTINGS:
        if env.get(setting.variable):
            where = f"environment variable {setting.variable}"
            values[setting.name] = _parsed(setting.name, env[setting.variable], where)
    for name, value in (flags or {}).items():
        if value is not None:
            values[name] = _parsed(name, value, f"flag --{name.replace('_', '-')}")
    return _build(values, labels, env)


def _default_file(env: Mapping[str, str]) -> Path | None:
    """The file that the environment names, which must be there, else the first that is at a usual place."""
    named = env.get(ENV_PREFIX + "CONFIG")
    if named:
        if not _is_readable(Path(named)):
            where = f"check {ENV_PREFIX}CONFIG"
            raise ConfigError(f"no configuration file at {named}", next_step=where, field="config")
        return Path(named)
    home = Path(env.get("XDG_CONFIG_HOME") or Path(env.get("HOME", "/")) / ".config")
    places = (home / "midstream" / "agent.toml", Path("/etc/midstream/agent.toml"))
    return next((place for place in places if _is_readable(place)), None)


def _refuse_misspelt(env: Mapping[str, str]) -> None:
    """Clients have variables of their own with our prefix; one that is nearly a setting's was meant as that."""
    known = [setting.variable.removeprefix(ENV_PREFIX) for setting in SETTINGS]
    for variable, text in env.items():
        name = variable.removeprefix(ENV_PREFIX)
        if name == variable or not text or name in (*known, *_OTHER_VARIABLES) or name.startswith("COORDINATOR_"):
            continue
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
        if near:
            raise ConfigError(
                f"environment variable {variable} names no setting",
                next_step=f"did you mean {ENV_PREFIX}{near[0]}?",
                field=name.lower(),
            )


def _is_readable(place: Path) -> bool:
    """Somebody else's home, as under `sudo -u`, has no configuration of ours."""
    try:
        return place.is_file()
    except PermissionError:
        return False


def _take_file(path: Path, values: dict[str, Any], labels: dict[str, str]) -> None:
    try:
        data = path.read_bytes()[: MAX_CONFIG_BYTES + 1]
        if len(data) > MAX_CONFIG_BYTES:
            raise ConfigError(f"{path} is larger than {MAX_CONFIG_BYTES} bytes", next_step="check which file this is")
        table = tomllib.loads(data.decode())
    except OSError as err:
        raise ConfigError(
            f"cannot read {path}: {err.strerror}", next_step="check the path and its permissions"
        ) from err
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as err:
        raise ConfigError(f"{path} is not valid TOML: {err}", next_step="correct the line it names") from err
    found = table.pop("labels", {})
    if not isinstance(found, dict) or not all(isinstance(v, str) for v in found.values()):
        raise ConfigError(f"labels in {path} must be a table of strings", next_step='write [labels] name = "value"')
    labels.update(found)
    values["providers"] = read_providers(table.pop("provider", None), table.pop("provider_models", None))
    for name, value in table.items():
        values[name] = _parsed(name, value, str(path))


def _take_credentials(folder: Path, values: dict[str, Any]) -> None:
    """Secrets that systemd hands over as files (LoadCredential=), each under its setting's name."""
    for setting in SETTINGS:
        file = folder / setting.name
        if not setting.secret or not file.is_file():
            continue
        try:
            text = file.read_bytes()[:MAX_CONFIG_BYTES].decode().strip()
        except (OSError, UnicodeDecodeError) as err:
            raise ConfigError(
                f"the credential {setting.name} cannot be read: {err}", next_step="write it anew", field=setting.name
            ) from err
        values[setting.name] = _parsed(setting.name, text, f"the credential {setting.name}")


def _parsed(name: str, value: Any, source: str) -> Any:
    setting = BY_NAME.get(name)
    if setting is None:
        near = difflib.get_close_matches(name, [*BY_NAME, *_TABLES], n=1)
        hint = f"did you mean {near[0]}?" if near else "see `midstream agent --help` for the settings"
        raise ConfigError(f"unknown setting {name!r} in {source}", next_step=hint, field=name)
    try:
        return setting.parse(value)
    except ValueError as err:
        shown = str(value).lower() if isinstance(value, bool) else repr(value)  # as TOML writes it
        found = "not valid" if setting.secret else shown
        raise ConfigError(
            f"{name} in {source} is {found}", next_step=f"it must be {err}: {setting.help}", field=name
        ) from err


def _build(values: dict[str, Any], labels: Mapping[str, str], env: Mapping[str, str]) -> AgentConfig:
    expose = values.pop("expose", False)
    bounds = {name: values.pop(name) for name in _BOUND_NAMES if name in values}
    for name, place in (("state_dir", _state_home(env)), ("models_dir", _cache_home(env) / "models")):
        values[name] = Path(values[name]).expanduser() if name in values else place
    config = AgentConfig(**values, labels=labels, bounds=PolicyBounds(**bounds))
    if not expose and not is_loopback(config.host):
        raise ConfigError(
            f"host {config.host!r} is reachable from other machines, and the local API asks nobody for a key",
            next_step="keep 127.0.0.1, or set expose = true if that is what you want",
            field="host",
        )
    check(config.webrtc_settings)
    return config


_OTHER_VARIABLES = ("CONFIG", "HUB_URL", "URL", "MODEL")
"""Read elsewhere, or by clients; no settings of the agent."""

_TABLES = ("labels", "provider", "provider_models")

_BOUND_NAMES = (
    "allow_raw_input", "allow_cloud_text", "wait_target_s", "max_prompt_bytes", "max_answer_tokens", "usd_per_day",
    "usd_per_month", "log_level",
)  # fmt: skip


def colours_wanted(environ: Mapping[str, str] | None = None) -> bool:
    """False when the user asked programs for plain output (NO_COLOR)."""
    return not (os.environ if environ is None else environ).get("NO_COLOR")


def is_loopback(host: str) -> bool:
    """True for addresses that only this machine can reach."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _state_home(env: Mapping[str, str]) -> Path:
    # systemd names the folders it made; otherwise the user's own.
    if env.get("STATE_DIRECTORY"):
        return Path(env["STATE_DIRECTORY"].split(":")[0])
    return Path(env.get("XDG_STATE_HOME") or Path(env.get("HOME", "/")) / ".local" / "state") / "midstream"


def _cache_home(env: Mapping[str, str]) -> Path:
    if env.get("CACHE_DIRECTORY"):
        return Path(env["CACHE_DIRECTORY"].split(":")[0])
    return Path(env.get("XDG_CACHE_HOME") or Path(env.get("HOME", "/")) / ".cache") / "midstream"

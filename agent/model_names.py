"""Names of models in the configuration against what is known: a slip is told at the start, with what was meant."""

from __future__ import annotations

import difflib

from agent.config import AgentConfig
from engines.catalogue import load_catalogue
from engines.store import ModelStore
from protocol.errors import ConfigError

TEXT_FORMATS = ("gguf", "genai")
MAX_NAMED = 20


def check_text_model(config: AgentConfig) -> None:
    """Raises ConfigError for a `text_model` that is neither in the catalogue nor in the store, or is no text model.

    One that is known and not pulled yet, or that a server at `text_url` serves, is none of it.
    """
    name = config.text_model
    if name is None or config.text_url is not None or config.text_engine == "openai_compat":
        return
    step = unknown_step(config, name)
    if step:
        raise ConfigError(f"there is no text model {name[:100]!r}", next_step=step, field="text_model")


def unknown_step(config: AgentConfig, name: str) -> str:
    """What helps with a text model that nobody knows; empty for a known one."""
    store = ModelStore(config.models_dir, load_catalogue(config.models_dir / "catalogue.toml"))
    known = [stored.entry.name for stored in store.list() if stored.entry.format in TEXT_FORMATS]
    if name in known:
        return ""
    near = difflib.get_close_matches(name, known, 1)
    meant = f"did you mean {near[0]}? " if near else ""
    return f"{meant}known: {', '.join(known[:MAX_NAMED]) or 'none'}; `midstream models add FILE` adds another"

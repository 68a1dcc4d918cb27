"""A text engine in this process or in a worker process, as its settings say."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from engines.port import TextEngine
from engines.worker import WorkerEngine
from engines.wrapping import WrappedTextEngine


class HereOrWorker(WrappedTextEngine):
    """TextEngine that passes everything on to the one it made.

    Args:
        target: "module:Class" of the engine, for the worker process.
        make: the same class, for this process.
        settings: its keyword arguments, as JSON can carry them.
        name: name of the model in messages.
        in_process: run here; a native crash then ends this process.
    """

    def __init__(
        self,
        target: str,
        make: Callable[..., TextEngine],
        settings: Mapping[str, Any],
        *,
        name: str,
        in_process: bool,
    ) -> None:
        self.model = name
        super().__init__(make(**settings) if in_process else WorkerEngine(target, settings, name=name))

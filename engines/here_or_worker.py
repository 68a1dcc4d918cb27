"""A text engine in this process or in a worker process, as its settings say."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from engines.owned_text import OwnedTextEngine
from engines.worker import WorkerEngine
from engines.wrapping import WrappedTextEngine


class HereOrWorker(WrappedTextEngine):
    """A model on the engine that `embedded` names, in a worker process unless `in_process`.

    Args:
        model_path: the model's file or folder.
        model: name of the model in messages.
        context_tokens: room for prompt and answer of one generation.
        threads: 0 takes all cores but one.
        slots: generations at once; more are refused with Full.
        chat_template: Jinja text for models that carry none.
        in_process: run here; a native crash then ends this process.
    """

    embedded: ClassVar[type[OwnedTextEngine]]

    def __init__(
        self,
        model_path: Path | str,
        *,
        model: str = "",
        context_tokens: int = 2048,
        threads: int = 0,
        slots: int = 2,
        chat_template: str | None = None,
        in_process: bool = False,
    ) -> None:
        self.model = model or self._name_of(Path(model_path))
        settings: dict[str, Any] = {
            "model_path": str(model_path),
            "context_tokens": context_tokens,
            "threads": threads,
            "slots": slots,
            "chat_template": chat_template,
        }
        target = f"{self.embedded.__module__}:{self.embedded.__qualname__}"
        super().__init__(self.embedded(**settings) if in_process else WorkerEngine(target, settings, name=self.model))

    def _name_of(self, path: Path) -> str:
        return path.stem

"""What the demo prints: headings, steps with their time, tokens in the colour of the side that made them."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TextIO

BOLD, DIM, DEVICE, CLOUD, PLAIN = "\033[1m", "\033[2m", "\033[32m", "\033[36m", "\033[0m"


class Screen:
    """Plain lines for a pipe, colours for a terminal."""

    def __init__(self, out: TextIO = sys.stdout) -> None:
        self.out = out
        self.colours = out.isatty()
        self.column = 0

    def _paint(self, text: str, colour: str) -> str:
        return f"{colour}{text}{PLAIN}" if self.colours else text

    def _write(self, text: str) -> None:
        self.out.write(text)
        self.out.flush()
        self.column = len(text) - text.rfind("\n") - 1 if "\n" in text else self.column + len(text)

    def say(self, text: str) -> None:
        """One whole line."""
        if self.column:
            self._write("\n")
        self._write(text + "\n")

    def heading(self, text: str) -> None:
        """A scene begins."""
        self.say("\n" + self._paint(f"--- {text}", BOLD))

    @contextlib.contextmanager
    def step(self, text: str) -> Iterator[None]:
        """A line when something long starts, and its time when it ended well."""
        started_s = time.monotonic()
        self.say(self._paint(f"... {text}", DIM))
        yield
        self.say(self._paint(f"    done in {time.monotonic() - started_s:.1f} s", DIM))

    def token(self, text: str, side: str) -> None:
        """A piece of an answer, green from the device, blue from the cloud."""
        shown = text.replace("\n", " ")
        self.out.write(self._paint(shown, DEVICE if side == "device" else CLOUD))
        self.out.flush()
        self.column += len(shown)
        if self.column > 110 and shown.startswith(" "):
            self._write("\n")

    def mark(self, text: str) -> None:
        """Something happened in the middle of an answer."""
        self.say(self._paint(text, BOLD))

    def table(self, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Columns as wide as their widest cell."""
        widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
        for row in [head, ["-" * w for w in widths], *rows]:
            self.say("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())

"""The shape of every tensor of a TFLite file for given input shapes, worked out by the runtime in a child process.

Shapes that follow from other shapes are only known once the operators ran, so the child runs the model once on zeros.
A child, because a damaged or hostile file may crash the runtime.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from engines.tflite import tensor_shapes
from protocol.errors import EngineError, MidstreamError

ROOT = Path(__file__).resolve().parent.parent
CHILD_S = 120.0
"""Import, load and one run; a minute on the slowest board that was tried would be ten times what is usual."""

MAX_ANSWER_BYTES = 16 << 20


def shapes_by_runtime(file: Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """By tensor name. Raises EngineError when the runtime is absent, refuses the shapes or crashes."""
    command = [sys.executable, "-m", "engines.tflite_shapes", str(file), json.dumps(shapes)]
    path = os.pathsep.join(part for part in (str(ROOT), os.environ.get("PYTHONPATH", "")) if part)
    try:
        done = subprocess.run(
            command, timeout=CHILD_S, stdin=subprocess.DEVNULL, capture_output=True, check=False,
            env={**os.environ, "PYTHONPATH": path},
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as err:
        raise _refused(file, f"no answer: {type(err).__name__}") from err
    if done.returncode != 0 or len(done.stdout) > MAX_ANSWER_BYTES:
        lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
        raise _refused(file, lines[-1][:300] if lines and done.returncode > 0 else f"it ended with {done.returncode}")
    return {name: tuple(shape) for name, shape in json.loads(done.stdout).items()}


def _refused(file: Path, why: str) -> EngineError:
    return EngineError(
        f"the shapes of {file.name} cannot be worked out: {why}",
        next_step="check input_shapes in the catalogue entry and the model file",
    )


def child_main(file: str, shapes: str) -> int:
    """Print {name: shape} as JSON."""
    try:
        found = tensor_shapes(Path(file), {name: tuple(shape) for name, shape in json.loads(shapes).items()})
    except MidstreamError as err:
        sys.stderr.write(f"{err}\n")
        return 1
    sys.stdout.write(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(child_main(sys.argv[1], sys.argv[2]))

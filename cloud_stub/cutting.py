"""Builds bundles, one model after the other, each in a child process: a crash of a native library ends the child only.

The child writes one JSON object per line: {"done", "total", "what"} as it goes, then {"cuts": n} or {"error": text}.
It ends when its standard input does, so it never outlives the coordinator.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import threading
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from attrs import define, field

from protocol.decode import decode, encode
from protocol.errors import MidstreamError
from protocol.models import CatalogueEntry

log = logging.getLogger("midstream.coordinator.cutting")

ROOT = Path(__file__).resolve().parent.parent
BUILD_S = 600.0
"""A build bounds its own work to 90 s of a desktop; an hour-long one is stuck."""

MAX_LINE_BYTES = 64 << 10
MAX_ERROR_CHARACTERS = 500

MAX_SAMPLES = 4
MAX_SAMPLE_BYTES = 4 << 20
"""A build runs the model on every sample for every range it tries: a few pictures of the user's, none huge."""

OWN_SAMPLE = "sample.npz"
MAX_OWN_SAMPLE_BYTES = 64 << 20

SAMPLE_SUFFIXES = frozenset({".png", ".jpg", ".jpeg"})


@define
class CutJob:
    """One model to cut: its file and entry."""

    entry: CatalogueEntry
    file: Path


@define(eq=False)
class Cutter:
    """Runs the jobs in order. `state` tells of each model; `on_ready` is awaited with a finished model's name.

    samples: pictures to calibrate with beside the recipe's own; see `usable_samples`.
    """

    out_dir: Path
    jobs: Sequence[CutJob]
    on_ready: Callable[[str], Awaitable[None]]
    threads: int = 0
    samples: Sequence[Path] = ()
    state: dict[str, str] = field(factory=dict)

    async def run(self) -> None:
        """Ends when every job has ended, one way or the other."""
        self.state.update({job.entry.name: "waiting" for job in self.jobs})
        for job in self.jobs:
            try:
                async with asyncio.timeout(BUILD_S):
                    await self._build(job)
            except TimeoutError:
                self._failed(job, f"not done after {BUILD_S:.0f} s")
            except OSError as err:
                self._failed(job, f"cannot start a process: {err.strerror or err}")
            except (MidstreamError, ValueError) as err:  # ValueError: a line of the child's that is too long
                self._failed(job, str(err))

    async def _build(self, job: CutJob) -> None:
        name = job.entry.name
        task = {"entry": json.loads(encode(job.entry)), "file": str(job.file), "out": str(self.out_dir)}
        task["samples"] = [str(path) for path in self.samples]
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "cloud_stub.cutting", json.dumps(task | {"threads": self.threads}),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=MAX_LINE_BYTES,
            start_new_session=True, env=_child_environment(),
        )  # fmt: skip
        last: dict[str, Any] = {}
        try:
            assert process.stdout is not None
            async for line in process.stdout:
                last = _parsed(line) or last
                if "what" in last:
                    self.state[name] = f"building {last.get('done')}/{last.get('total')}: {last['what']}"
            code = await process.wait()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
            _close(process)
        if "cuts" in last and code == 0:
            self.state[name] = "ready"
            log.info("%s: bundle with %s cuts is ready", name, last["cuts"])
            await self.on_ready(name)
        else:
            self._failed(job, str(last.get("error") or f"the process ended with {code}"))

    def _failed(self, job: CutJob, why: str) -> None:
        self.state[job.entry.name] = f"failed: {why[:MAX_ERROR_CHARACTERS]}"
        log.warning("%s cannot be cut, it is served whole: %s", job.entry.name, why[:MAX_ERROR_CHARACTERS])


def usable_samples(files: Sequence[Path]) -> tuple[Path, ...]:
    """The pictures among `files` that a build reads, by name: bounded in number and size."""
    pictures = sorted(file for file in files if file.suffix.lower() in SAMPLE_SUFFIXES)
    return tuple(file for file in pictures if _size_bytes(file) <= MAX_SAMPLE_BYTES)[:MAX_SAMPLES]


def _size_bytes(file: Path) -> float:
    try:
        return file.stat().st_size
    except OSError:
        return float("inf")


def _own_sample(file: Path) -> list[bytes]:
    """`sample.npz` beside a model's file: inputs of its user, for a model without a recipe."""
    try:
        with (file.parent / OWN_SAMPLE).open("rb") as stream:
            data = stream.read(MAX_OWN_SAMPLE_BYTES + 1)
    except OSError:
        return []
    return [data] if len(data) <= MAX_OWN_SAMPLE_BYTES else []


def _contents(paths: Sequence[str]) -> list[bytes]:
    """What can be read: a sample that vanished is no reason not to build."""
    found = []
    for path in paths[:MAX_SAMPLES]:
        try:
            with Path(path).open("rb") as stream:
                data = stream.read(MAX_SAMPLE_BYTES + 1)
        except OSError:
            continue
        if len(data) <= MAX_SAMPLE_BYTES:
            found.append(data)
    return found


def child_main(text: str) -> int:
    """The child: build one bundle and report on standard output."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.nice(5)
    task = json.loads(text)
    from cloud_stub.kept_bundles import Order, finished_bundle
    from split_models.bundle import BundleLimits, Progress

    def tell(progress: Progress) -> None:
        _say({"done": progress.done, "total": progress.total, "what": progress.what})

    try:
        entry = decode(CatalogueEntry, task["entry"], what="catalogue entry")
        limits = BundleLimits(threads=int(task["threads"]))
        samples = [*_own_sample(Path(task["file"])), *_contents(task.get("samples", []))]
        manifest = finished_bundle(Order(entry, Path(task["file"]), Path(task["out"]), samples, limits), tell)
    except MidstreamError as err:
        _say({"error": str(err)[:MAX_ERROR_CHARACTERS]})
        return 1
    _say({"cuts": len(manifest.cuts)})
    return 0


def _say(record: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(record) + "\n")
    sys.stdout.flush()


def _end_with_parent() -> None:
    while os.read(0, 4096):  # below the buffered layer, whose lock a daemon thread must not hold at exit
        pass
    os._exit(3)


def _child_environment() -> dict[str, str]:
    """Ours, so that the child finds the same packages."""
    path = os.pathsep.join(part for part in (str(ROOT), os.environ.get("PYTHONPATH", "")) if part)
    return {**os.environ, "PYTHONPATH": path}


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _close(process: asyncio.subprocess.Process) -> None:
    transport = getattr(process, "_transport", None)
    if transport is not None:
        transport.close()


if __name__ == "__main__":
    sys.exit(child_main(sys.argv[1]))

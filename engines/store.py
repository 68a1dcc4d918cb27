"""The model store: <root>/<name>/<filename> with entry.json beside it. Files appear whole and checked, or not at all.

Blocking; the command line calls it directly, the houses from a thread.
"""

from __future__ import annotations

import difflib
import errno
import fcntl
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from attrs import evolve, frozen

from engines.catalogue import check_filename, check_name, is_name, load_catalogue
from engines.digest import file_sha256
from engines.fetch import FetchSettings, copy_from, fetch, needed_bytes
from engines.incoming import FreeBytes, Incoming, Progress, check_space, free_bytes, no_progress
from engines.model_files import sniff
from engines.side_files import folder_files, side_files
from protocol.decode import decode, encode
from protocol.durable import disk_error, read_durable, write_durable
from protocol.errors import ConfigError, EngineError, NotFound
from protocol.models import CatalogueEntry, SideFile, Source

ENTRY_FILE = "entry.json"
LOCK_WAIT_S = 3600.0
"""How long a pull waits for another process that pulls the same model."""
_LIST_STEP = "`midstream models list` marks those that are"


@frozen
class Stored:
    """A known model; `path` is None until it is pulled."""

    entry: CatalogueEntry
    path: Path | None


class ModelStore:
    """Models on disk, by catalogue name.

    Args:
        root: folder of the store; made when first needed.
        catalogue: entries by name, see engines.catalogue.
        settings: how sources are reached.
        measure_free: free bytes on a folder's disk.
    """

    def __init__(
        self,
        root: Path,
        catalogue: Mapping[str, CatalogueEntry],
        settings: FetchSettings | None = None,
        *,
        measure_free: FreeBytes = free_bytes,
        lock_wait_s: float = LOCK_WAIT_S,
    ) -> None:
        self.root = root
        self._catalogue = dict(catalogue)
        self._settings = settings or FetchSettings()
        self._measure_free = measure_free
        self._lock_wait_s = lock_wait_s

    def list(self) -> tuple[Stored, ...]:
        """Every known model with where it is, by name."""
        names = set(self._catalogue) | {folder.name for folder in self._folders()}
        found = [self._stored(name) for name in sorted(names)]
        return tuple(stored for stored in found if stored is not None)

    def entry(self, name: str) -> CatalogueEntry:
        """The entry of a known model. Raises NotFound."""
        stored = self._stored(name)
        if stored is None:
            names = sorted(self._catalogue)
            near = difflib.get_close_matches(name[:100], names, 1)
            meant = f"did you mean {near[0]}? " if near else ""
            step = f"{meant}midstream models list; known: {', '.join(names[:20])}"
            raise NotFound(f"there is no model {name[:100]!r}", next_step=step, field="model")
        return stored.entry

    def path(self, name: str) -> Path:
        """The file of a pulled model. Raises NotFound when it is unknown or not here yet."""
        entry = self.entry(name)
        file = self.root / name / entry.filename
        if not file.is_file():
            raise NotFound(f"{name} is not on this machine", next_step=f"midstream models pull {name}", field="model")
        return file

    def pull(self, name: str, progress: Progress = no_progress) -> Path:
        """Bring a model here, continuing an interrupted pull; at once when it is here already.

        Raises NotFound, LinkError, EngineError (wrong bytes) or ConfigError (disk, pip).
        """
        entry = self._catalogue.get(name) or self.entry(name)
        progress = _rising(progress)
        target = self.root / name / entry.filename
        with self._locked(name):
            if not self._holds(name, entry):
                self._pull_into(target, entry, progress)
                self._write_entry(name, entry)
        progress(entry.size_bytes, entry.size_bytes)
        return target

    def add(
        self,
        file: Path,
        *,
        name: str | None = None,
        recipe: str | None = None,
        licence: str = "",
        description: str = "",
        chat_template: str | None = None,
        input_shapes: Mapping[str, tuple[int, ...]] | None = None,
        progress: Progress = no_progress,
    ) -> CatalogueEntry:
        """Copy a model file of the user's into the store, under `name` or the file's own.

        Raises ConfigError when it is not an ONNX, TFLite or GGUF file or the name is taken.
        """
        kind = sniff(file)
        sides = side_files(file) if kind == "onnx" else folder_files(file) if kind == "genai" else ()
        name = check_name(name or _plain(file.resolve().parent.name if kind == "genai" else file.stem))
        if self._stored(name) is not None:
            raise ConfigError(
                f"there is a model {name!r} already", next_step="choose another with --name", field="name"
            )
        entry = CatalogueEntry(
            name=name,
            format=kind,
            filename=check_filename(_plain(file.name)),
            sha256=file_sha256(file),
            size_bytes=file.stat().st_size,
            source=Source("file", file=str(file.resolve())),
            licence=licence,
            description=description,
            recipe=recipe,
            input_shapes=dict(input_shapes or {}),
            chat_template=chat_template,
            side_files=tuple(_side(side) for side in sides),
        )
        with self._locked(name):
            self._pull_into(self.root / name / entry.filename, entry, progress)
            self._write_entry(name, entry)
        return entry

    def remove(self, name: str) -> None:
        """Delete a model's files and partial downloads; the catalogue still knows it. Raises NotFound when absent."""
        check_name(name)
        with self._locked(name):
            present = (self.root / name).is_dir() or self._work(name).is_dir()
            if not present:
                raise NotFound(f"{name} is not on this machine", next_step=_LIST_STEP, field="model")
            try:
                shutil.rmtree(self._work(name), ignore_errors=True)
                if (self.root / name).is_dir():
                    shutil.rmtree(self.root / name)
            except OSError as err:
                raise disk_error(err, self.root / name) from err

    def verify(self, name: str) -> Path:
        """Hash the file again. Raises NotFound, or EngineError after moving a wrong file aside."""
        file = self.path(name)
        entry = self.entry(name)
        with self._locked(name):
            wanted = {entry.filename: entry.sha256, **{side.filename: side.sha256 for side in entry.side_files}}
            for filename, sha256 in wanted.items():
                self._verify_one(name, file.with_name(filename), sha256)
        return file

    def _verify_one(self, name: str, file: Path, sha256: str) -> None:
        try:
            found = file_sha256(file)
            if found == sha256:
                return
            aside = self.root / ".aside" / f"{name}-{file.name}"
            aside.parent.mkdir(parents=True, exist_ok=True)
            file.replace(aside)
        except OSError as err:
            raise disk_error(err, file) from err
        raise EngineError(
            f"{name} is damaged: sha256 {found[:16]}... instead of {sha256[:16]}...; the file is kept as {aside}",
            next_step=f"midstream models pull {name}",
        )

    def part_bytes(self, name: str, filename: str) -> int:
        """How much of a file of a set came so far, in earlier runs too; see extend_file."""
        try:
            return self._part(name, filename).stat().st_size
        except FileNotFoundError:
            return 0
        except OSError as err:
            raise disk_error(err, self._part(name, filename)) from err

    def extend_file(self, name: str, filename: str, offset: int, chunk: bytes, size_bytes: int) -> int:
        """Append what comes at `offset` of a file that is not in the catalogue (a bundle's heads), `size_bytes` long.

        Returns the bytes that are here now. When another process wrote meanwhile, nothing is appended. Raises
        EngineError past the end, ConfigError for a full disk.
        """
        part = self._part(name, filename)
        if offset + len(chunk) > size_bytes:
            raise EngineError(f"{filename} is longer than the {size_bytes} bytes announced")
        with self._locked(name):
            check_space(self.root, size_bytes - offset, self._measure_free)
            try:
                part.parent.mkdir(parents=True, exist_ok=True)
                with part.open("ab") as file:
                    if file.tell() == offset:
                        file.write(chunk)
                    return file.tell()
            except OSError as err:
                if err.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                    part.unlink(missing_ok=True)
                raise disk_error(err, part) from err

    def place_file(self, name: str, filename: str, sha256: str, size_bytes: int) -> Path:
        """Put a file whose bytes all came into its place, checked; other unfinished files of the set are dropped.

        Raises EngineError for wrong bytes, which are removed. A right file that is there already is left alone.
        """
        target = self.file_path(name, filename)
        with self._locked(name):
            if not (target.is_file() and file_sha256(target) == sha256):
                with Incoming(self._part(name, filename), target, sha256, size_bytes, no_progress) as incoming:
                    incoming.commit()
            shutil.rmtree(self._work(name), ignore_errors=True)
            return target

    def _part(self, name: str, filename: str) -> Path:
        return self._work(check_name(name)) / f"{check_filename(filename)}.part"

    def file_path(self, name: str, filename: str) -> Path:
        """Where place_file puts a file; it need not be there."""
        return self.root / check_name(name) / check_filename(filename)

    def _pull_into(self, target: Path, entry: CatalogueEntry, progress: Progress) -> None:
        work = self._work(entry.name)
        partial = work / f"{entry.sha256[:16]}.part"
        here_bytes = partial.stat().st_size if partial.exists() else 0
        beside_bytes = sum(side.size_bytes for side in entry.side_files)
        check_space(self.root, max(0, needed_bytes(entry) + beside_bytes - here_bytes), self._measure_free)
        for side in entry.side_files:  # first, so that a model that is there is there with all of its weights
            with Incoming(
                work / f"{side.sha256[:16]}.part",
                target.with_name(side.filename),
                side.sha256,
                side.size_bytes,
                progress,
            ) as incoming:
                copy_from(Path(entry.source.file).expanduser().with_name(side.filename), incoming)
                incoming.commit()
        with Incoming(partial, target, entry.sha256, entry.size_bytes, progress) as incoming:
            fetch(entry, incoming, work, self._settings, progress)
            incoming.commit()
        shutil.rmtree(work, ignore_errors=True)

    def _holds(self, name: str, entry: CatalogueEntry) -> bool:
        """Whether the pulled file is the one that `entry` means; a new release may mean another one."""
        file = self.root / name / entry.filename
        try:
            if not file.is_file() or file.stat().st_size != entry.size_bytes:
                return False
            if any(file.with_name(side.filename).stat().st_size != side.size_bytes for side in entry.side_files):
                return False
        except OSError:
            return False
        kept = self._read_entry(name)
        if kept is not None and kept.sha256 == entry.sha256:
            return True
        if file_sha256(file) != entry.sha256:
            return False
        self._write_entry(name, entry)
        return True

    def _stored(self, name: str) -> Stored | None:
        if not is_name(name):
            return None
        kept = self._read_entry(name) if (self.root / name / ENTRY_FILE).exists() else None
        entry = self._catalogue.get(name)
        if entry is None:
            entry = kept
        elif kept is not None and kept.sha256 != entry.sha256:
            # Until it is pulled again, what is here is what answers, with the digest that it has.
            entry = evolve(entry, sha256=kept.sha256, size_bytes=kept.size_bytes, filename=kept.filename)
        if entry is None:
            return None
        file = self.root / name / entry.filename
        return Stored(entry, file if file.is_file() else None)

    def _folders(self) -> Iterator[Path]:
        try:
            listed = sorted(self.root.iterdir())
        except FileNotFoundError:
            return
        except OSError as err:
            raise disk_error(err, self.root) from err
        for folder in listed:
            if not folder.name.startswith(".") and (folder / ENTRY_FILE).exists():
                yield folder

    def _read_entry(self, name: str) -> CatalogueEntry | None:
        check = lambda data: decode(CatalogueEntry, data, what=f"{name}/{ENTRY_FILE}")  # noqa: E731
        return read_durable(self.root / name / ENTRY_FILE, check)

    def _write_entry(self, name: str, entry: CatalogueEntry) -> None:
        write_durable(self.root / name / ENTRY_FILE, encode(entry), mode=0o644)

    def _work(self, name: str) -> Path:
        return self.root / ".incoming" / name

    @contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        """One writer per model, across processes; the lock ends with the process that held it."""
        file = self.root / ".locks" / f"{check_name(name)}.lock"
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            handle = file.open("a")
        except OSError as err:
            raise disk_error(err, file) from err
        with handle:
            self._take(handle, name)
            yield

    def _take(self, handle: TextIO, name: str) -> None:
        end_s = time.monotonic() + self._lock_wait_s
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as err:
                if time.monotonic() > end_s:
                    raise ConfigError(
                        f"another process has been working on {name} for {self._lock_wait_s:g} s",
                        next_step="wait for it, or end it",
                    ) from err
                time.sleep(0.1)
            else:
                return


def _rising(progress: Progress) -> Progress:
    """Never goes back: a wheel is downloaded first and unpacked then, and a server may not resume."""
    most_bytes = 0

    def report(done_bytes: int, total_bytes: int) -> None:
        nonlocal most_bytes
        most_bytes = max(most_bytes, done_bytes)
        progress(most_bytes, total_bytes)

    return report


def default_store() -> ModelStore:
    """The store that the command line uses without options: MIDSTREAM_MODELS, else the user's cache folder."""
    root = os.environ.get("MIDSTREAM_MODELS")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = Path(root) if root else cache / "midstream" / "models"
    return ModelStore(folder, load_catalogue(folder / "catalogue.toml"))


def _side(file: Path) -> SideFile:
    return SideFile(check_filename(file.name), file_sha256(file), file.stat().st_size)


def _plain(text: str) -> str:
    """`text` with everything that a name may not hold turned into dashes."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-.") or "model"

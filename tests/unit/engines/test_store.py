"""The model store: atomic placing, verifying, adding, locks, disks that are full, pulls that were interrupted."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import resource
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest

from engines.catalogue import load_catalogue
from engines.incoming import SPACE_MARGIN_BYTES, Incoming, no_progress
from engines.model_files import sniff
from engines.store import ModelStore
from protocol.errors import ConfigError, EngineError, NotFound
from protocol.models import CatalogueEntry, Source

BODY = bytes(range(256)) * 4096  # 1 MiB


def entry_for(file: Path, name: str = "m", body: bytes = BODY) -> CatalogueEntry:
    sha256 = hashlib.sha256(body).hexdigest()
    return CatalogueEntry(name, "data", "m.bin", sha256, len(body), Source("file", file=str(file)))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    file = tmp_path / "source.bin"
    file.write_bytes(BODY)
    return file


@pytest.fixture
def store(tmp_path: Path, source: Path) -> ModelStore:
    return ModelStore(tmp_path / "models", {"m": entry_for(source)})


def files_in(root: Path) -> list[str]:
    """Everything but the lock files."""
    found = (p.relative_to(root) for p in root.rglob("*") if p.is_file())
    return sorted(str(p) for p in found if p.parts[0] != ".locks")


def test_pull_places_the_file_and_its_entry_and_a_second_pull_does_nothing(store: ModelStore, source: Path) -> None:
    with pytest.raises(NotFound, match="midstream models pull m"):
        store.path("m")
    seen: list[tuple[int, int]] = []
    assert store.pull("m", lambda done, total: seen.append((done, total))) == store.path("m")
    assert store.path("m").read_bytes() == BODY
    assert files_in(store.root) == ["m/entry.json", "m/m.bin"]
    assert seen[-1] == (len(BODY), len(BODY))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    source.unlink()
    assert store.pull("m").exists()


def test_unknown_and_hostile_names_are_not_found(store: ModelStore) -> None:
    for name in ("nobody", "../m", "/etc/passwd", "", "a\0b", ".locks"):
        with pytest.raises(NotFound):
            store.path(name)


def test_a_slip_in_a_name_is_told_with_what_was_meant(tmp_path: Path) -> None:
    with pytest.raises(NotFound) as missed:
        ModelStore(tmp_path, load_catalogue()).path("smollm2-135")
    assert str(missed.value.next_step).startswith("did you mean smollm2-135m?")


def test_wrong_bytes_never_appear(store: ModelStore, source: Path) -> None:
    for body in (BODY[:-1] + b"x", BODY[:-1], BODY + b"x"):
        source.write_bytes(body)
        with pytest.raises(EngineError):
            store.pull("m")
        assert not (store.root / "m" / "m.bin").exists()
    source.write_bytes(BODY)
    assert store.pull("m").read_bytes() == BODY


def test_verify_moves_a_damaged_file_aside(store: ModelStore) -> None:
    path = store.pull("m")
    assert store.verify("m") == path
    path.write_bytes(BODY[:-1] + b"x")
    with pytest.raises(EngineError, match="midstream models pull m"):
        store.verify("m")
    assert not path.exists()
    assert files_in(store.root) == [".aside/m-m.bin", "m/entry.json"]
    assert store.pull("m").read_bytes() == BODY


def test_remove_deletes_and_the_catalogue_still_knows(store: ModelStore) -> None:
    store.pull("m")
    store.remove("m")
    assert [s.path for s in store.list()] == [None]
    with pytest.raises(NotFound) as absent:
        store.remove("m")
    assert "midstream models list" in absent.value.next_step
    assert files_in(store.root) == []


def test_a_new_release_with_another_file_pulls_it(store: ModelStore, tmp_path: Path) -> None:
    store.pull("m")
    other = tmp_path / "other.bin"
    other.write_bytes(BODY[::-1])
    newer = ModelStore(store.root, {"m": entry_for(other, body=BODY[::-1])})
    # What is here answers under its own digest until it is pulled again.
    assert newer.entry("m").sha256 == hashlib.sha256(BODY).hexdigest()
    assert newer.pull("m").read_bytes() == BODY[::-1]
    assert newer.entry("m").sha256 == hashlib.sha256(BODY[::-1]).hexdigest()


def test_a_file_put_there_by_hand_is_taken_after_hashing(store: ModelStore, source: Path) -> None:
    (store.root / "m").mkdir(parents=True)
    (store.root / "m" / "m.bin").write_bytes(BODY)
    source.unlink()
    assert store.pull("m").exists()
    assert (store.root / "m" / "entry.json").exists()


@pytest.mark.parametrize("name", ["ppocr-v2-cls", "face-short-range", "smollm2-135m"])
def test_add_takes_real_models_by_their_bytes(tmp_path: Path, model_file: Callable[[str], Path], name: str) -> None:
    formats = {"ppocr-v2-cls": "onnx", "face-short-range": "tflite", "smollm2-135m": "gguf"}
    file = model_file(name)
    assert sniff(file) == formats[name]
    if file.stat().st_size > 10_000_000:
        return
    store = ModelStore(tmp_path / "models", {})
    entry = store.add(file, name="mine", recipe="r")
    assert (entry.format, entry.recipe) == (formats[name], "r")
    again = ModelStore(tmp_path / "models", {})
    assert again.entry("mine") == entry
    assert again.path("mine").read_bytes() == file.read_bytes()
    assert [s.entry.name for s in again.list()] == ["mine"]
    with pytest.raises(ConfigError, match="--name"):
        store.add(file, name="mine")


@pytest.mark.parametrize(
    "body",
    [
        b"", b"hello", b"\x89PNG\r\n", b"PK\x03\x04", bytes(1000), b"\x08\x08" + bytes(50),
        b"\x3a\xff\xff\xff\xff\x0f", b"\x80" * 99,
    ],
)  # fmt: skip
def test_add_refuses_what_is_no_model(tmp_path: Path, body: bytes) -> None:
    file = tmp_path / "some.onnx"
    file.write_bytes(body)
    store = ModelStore(tmp_path / "models", {})
    with pytest.raises(ConfigError, match="not an ONNX, TFLite or GGUF"):
        store.add(file)
    assert not store.root.exists() or files_in(store.root) == []


def test_add_of_an_absent_file_or_a_folder_is_a_config_error(tmp_path: Path) -> None:
    store = ModelStore(tmp_path / "models", {})
    for path in (tmp_path / "absent.onnx", tmp_path):
        with pytest.raises(ConfigError):
            store.add(path)


def test_a_file_of_a_set_comes_in_parts_and_is_placed_when_right(tmp_path: Path) -> None:
    store, head, size_bytes = ModelStore(tmp_path / "models", {}), ("det-heads", "head_1.onnx"), len(BODY)
    sha256 = hashlib.sha256(BODY).hexdigest()
    assert store.part_bytes(*head) == 0
    assert store.extend_file(*head, 0, BODY[:5], size_bytes) == 5
    again = ModelStore(tmp_path / "models", {})
    assert again.part_bytes(*head) == 5, "a part outlives who wrote it"
    assert again.extend_file(*head, 0, BODY[:5], size_bytes) == 5, "what another one wrote is not written twice"
    with pytest.raises(EngineError, match="announced"):
        again.extend_file(*head, 5, BODY, size_bytes)
    with pytest.raises(EngineError, match="ended after 5"):
        again.place_file(*head, sha256, size_bytes)
    assert again.extend_file(*head, 5, BODY[5:], size_bytes) == size_bytes
    path = again.place_file(*head, sha256, size_bytes)
    assert path.read_bytes() == BODY
    assert store.place_file(*head, sha256, size_bytes) == path, "it is here already"
    assert files_in(store.root) == ["det-heads/head_1.onnx"]
    assert [s.entry.name for s in store.list()] == []


def test_wrong_files_of_a_set_are_removed_and_names_stay_inside(tmp_path: Path) -> None:
    store = ModelStore(tmp_path / "models", {})
    sha256 = hashlib.sha256(BODY).hexdigest()
    store.extend_file("det-heads", "head_2.onnx", 0, BODY[::-1], len(BODY))
    with pytest.raises(EngineError, match="sha256"):
        store.place_file("det-heads", "head_2.onnx", sha256, len(BODY))
    assert store.part_bytes("det-heads", "head_2.onnx") == 0
    for name, filename in (("../x", "a"), ("x", "../a"), ("x", "entry.json")):
        with pytest.raises(ConfigError):
            store.extend_file(name, filename, 0, BODY, len(BODY))
        with pytest.raises(ConfigError):
            store.place_file(name, filename, sha256, len(BODY))
    full = ModelStore(tmp_path / "full", {}, measure_free=lambda folder: 0)
    with pytest.raises(ConfigError, match="to spare"):
        full.extend_file("det-heads", "head_2.onnx", 0, BODY, len(BODY))
    assert files_in(store.root) == []


def test_too_little_space_is_said_with_numbers_before_anything_is_written(source: Path, tmp_path: Path) -> None:
    store = ModelStore(
        tmp_path / "models", {"m": entry_for(source)}, measure_free=lambda folder: len(BODY) + SPACE_MARGIN_BYTES - 1
    )
    with pytest.raises(ConfigError, match=r"1\.0 MiB and 64\.0 MiB to spare .* 65\.0 MiB are free"):
        store.pull("m")
    assert files_in(store.root) == []


FILL = """
    import resource, signal, sys
    from pathlib import Path
    from engines.store import ModelStore
    from protocol.errors import ConfigError
    from tests.unit.engines.test_store import entry_for
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))
    store = ModelStore(Path(sys.argv[1]), {"m": entry_for(Path(sys.argv[2]))})
    try:
        store.pull("m")
    except ConfigError as err:
        print(err)
"""


def test_a_disk_that_fills_up_while_writing_leaves_nothing(tmp_path: Path, source: Path) -> None:
    root = tmp_path / "models"
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(FILL), str(root), str(source)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "cannot use" in done.stdout, done.stderr
    assert "m.bin" in done.stdout
    assert files_in(root) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_a_real_full_disk_leaves_nothing(tmp_path: Path, source: Path) -> None:
    root = tmp_path / "small"
    root.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", str(root)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("this machine mounts no tmpfs")
    try:
        store = ModelStore(root, {"m": entry_for(source)}, measure_free=lambda folder: 1 << 40)
        with pytest.raises(ConfigError, match="no space left"):
            store.pull("m")
        assert files_in(root) == []
    finally:
        subprocess.run(["umount", str(root)], check=True)


def test_an_interrupted_file_is_continued_where_it_stopped(tmp_path: Path) -> None:
    sha256 = hashlib.sha256(BODY).hexdigest()
    partial, target = tmp_path / "w" / "p.part", tmp_path / "m.bin"
    with pytest.raises(KeyboardInterrupt), Incoming(partial, target, sha256, len(BODY), no_progress) as incoming:
        incoming.write(BODY[:1000])
        raise KeyboardInterrupt
    with Incoming(partial, target, sha256, len(BODY), no_progress) as incoming:
        assert incoming.offset == 1000
        with pytest.raises(EngineError, match="pull again"):
            incoming.commit()
        incoming.write(BODY[1000:])
        assert incoming.commit().read_bytes() == BODY
    assert not partial.exists()


def test_a_partial_file_longer_than_the_model_starts_over(tmp_path: Path) -> None:
    partial = tmp_path / "p.part"
    partial.write_bytes(BODY + b"more")
    sha256 = hashlib.sha256(BODY).hexdigest()
    with Incoming(partial, tmp_path / "m.bin", sha256, len(BODY), no_progress) as incoming:
        assert incoming.offset == 0


def test_two_threads_that_pull_the_same_model_write_once(store: ModelStore) -> None:
    paths: list[Path] = []
    threads = [threading.Thread(target=lambda: paths.append(store.pull("m"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert paths == [store.path("m")] * 4


def hold(root: str, held: Event, go: Event) -> None:
    with ModelStore(Path(root), {})._locked("m"):
        held.set()
        go.wait(20)


def test_another_process_that_works_on_the_model_is_waited_for(store: ModelStore, source: Path) -> None:
    context = multiprocessing.get_context("spawn")
    held, go = context.Event(), context.Event()
    process = context.Process(target=hold, args=(str(store.root), held, go))
    process.start()
    try:
        assert held.wait(20)
        impatient = ModelStore(store.root, {"m": entry_for(source)}, lock_wait_s=0.2)
        with pytest.raises(ConfigError, match="another process"):
            impatient.pull("m")
        go.set()
        assert store.pull("m").exists()
    finally:
        go.set()
        process.join(20)


def test_a_damaged_entry_file_is_survived(store: ModelStore) -> None:
    store.pull("m")
    (store.root / "m" / "entry.json").write_bytes(b"\xff{")
    (store.root / "stray").mkdir()
    (store.root / "stray" / "entry.json").write_text(json.dumps({"name": 3}))
    assert [s.entry.name for s in store.list()] == ["m"]
    assert store.pull("m") == store.path("m")


def test_a_root_that_cannot_be_a_folder_is_a_config_error(tmp_path: Path, source: Path) -> None:
    (tmp_path / "models").write_text("a file")
    store = ModelStore(tmp_path / "models", {"m": entry_for(source)})
    for use in (store.list, lambda: store.pull("m")):
        with pytest.raises(ConfigError, match="models: it is no folder"):
            use()
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 300_000

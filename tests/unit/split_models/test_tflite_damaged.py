"""TFLite files that are none, damaged, too large or hostile end in a named error; nothing native reads them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engines.tflite import TfliteRuntime
from protocol.errors import EngineError, MidstreamError
from split_models.codec import RAW
from split_models.cuts import single_tensor_cuts
from split_models.partition_tflite import Partitioner
from split_models.prepare_tflite import inputs_of, prepare
from split_models.tflite_files import MAX_MODEL_BYTES
from tests.unit.split_models.test_tflite_cutting import FACE, SHAPE, free_batch
from tests.unit.split_models.tflite_models import chain, int8_net


@pytest.mark.parametrize(
    "content", [b"", b"not a model", bytes(1000), b"\x1c\0\0\0TFL3", b"\x08\0\0\0TFL3" + bytes(64)]
)
def test_files_that_are_no_model(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "x.tflite"
    file.write_bytes(content)
    with pytest.raises(EngineError) as raised:
        prepare(file, {})
    assert raised.value.next_step


def test_an_absent_file_and_one_that_is_too_large(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="cannot read"):
        prepare(tmp_path / "none.tflite", {})
    with (tmp_path / "huge.tflite").open("wb") as sparse:
        sparse.truncate(MAX_MODEL_BYTES + 1)
    with pytest.raises(EngineError, match="is over"):
        prepare(tmp_path / "huge.tflite", {})


def test_a_name_that_is_no_text_is_no_crash(tmp_path: Path) -> None:
    """The library itself raises a bare UnicodeDecodeError when such a file's ports are read."""
    drawn = chain("x", "abcdef", "y")
    drawn.last.tensors[2].name = b"\xff\xfe"
    file = drawn.save(tmp_path / "m.tflite")
    with pytest.raises(EngineError, match="not a model that"):
        TfliteRuntime().load(file, 1)
    prepared = prepare(file, {})
    assert [t.name for t in prepared.graph.outputs] == ["\ufffd\ufffd"]


def test_inputs_are_read_without_the_runtime(tmp_path: Path, model_file: Callable[[str], Path]) -> None:
    free = free_batch().save(tmp_path / "free.tflite")
    assert [(p.name, p.datatype, p.sizes) for p in inputs_of(free)] == [("x", "FP32", (None, 4))]
    assert [(p.name, p.sizes) for p in inputs_of(model_file(FACE))] == [("input", SHAPE)]
    broken = tmp_path / "broken.tflite"
    broken.write_bytes(free.read_bytes()[:300])
    with pytest.raises(EngineError, match="damaged"):
        inputs_of(broken)
    with pytest.raises(EngineError, match="shape"):
        inputs_of(chain("x", "y", shape=(1 << 14, 1 << 15)).save(tmp_path / "vast.tflite"))


SOUND = int8_net().data()


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(flips=st.lists(st.tuples(st.integers(0, len(SOUND) - 1), st.integers(1, 255)), min_size=1, max_size=6))
def test_damaged_bytes_end_in_a_named_error_or_a_sound_model(tmp_path: Path, flips: list[tuple[int, int]]) -> None:
    data = bytearray(SOUND)
    for place, change in flips:
        data[place] ^= change
    _prepare_and_cut(tmp_path, bytes(data))


STRUCTURE = chain("x", "a", "b", "y").data()


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(flips=st.lists(st.tuples(st.integers(8, len(STRUCTURE) - 1), st.integers(1, 255)), min_size=1, max_size=3))
def test_damaged_structure_does_so_too(tmp_path: Path, flips: list[tuple[int, int]]) -> None:
    """This file is all tables and offsets, no weights."""
    data = bytearray(STRUCTURE)
    for place, change in flips:
        data[place] ^= change
    _prepare_and_cut(tmp_path, bytes(data))


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(length=st.integers(0, len(SOUND) - 1))
def test_a_truncated_file_ends_in_a_named_error(tmp_path: Path, length: int) -> None:
    _prepare_and_cut(tmp_path, SOUND[:length])


def _prepare_and_cut(folder: Path, data: bytes) -> None:
    """Nothing but our own errors may come out; nothing native is loaded."""
    file = folder / "damaged.tflite"
    file.write_bytes(data)
    try:
        prepared = prepare(file, {})
        for cut in single_tensor_cuts(prepared.graph)[:2]:
            Partitioner(prepared).split(cut, RAW)
    except MidstreamError as err:
        assert err.message
        assert err.next_step


def test_a_machine_without_the_schema_says_where_to_cut(model_file: Callable[[str], Path]) -> None:
    script = (
        "import sys; sys.modules['ai_edge_litert'] = None\n"
        "from pathlib import Path\n"
        "from protocol.errors import ConfigError\n"
        "from split_models.prepare_tflite import prepare\n"
        "try:\n    prepare(Path(sys.argv[1]), {})\n"
        "except ConfigError as err:\n    print(err)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(model_file(FACE))], capture_output=True, text=True, check=True,
        cwd=Path(__file__).resolve().parents[3],
    )  # fmt: skip
    assert "ai-edge-litert" in done.stdout

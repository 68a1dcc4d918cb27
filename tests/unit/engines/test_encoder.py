"""The sentence encoder's two copies: the same vectors, and the quicker one is used."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from attrs import define

from engines.encoder import ENCODER, NEAR_COSINE, QUICK, TOKENIZER, Encoder
from engines.onnx import OnnxRuntime
from engines.port import TensorModel
from engines.quick_encoder import write_quick_copy
from engines.store import ModelStore, default_store
from protocol.errors import ConfigError, EngineError

TEXTS = ("ring me at six", "把这段话翻译成英文", "what does 1,250 euros come to in dollars today, and why? " * 8)


@pytest.fixture
def models(model_file: Callable[[str], Path]) -> ModelStore:
    for name in (ENCODER, TOKENIZER):
        model_file(name)
    return default_store()


@define
class Turns:
    """A clock for which a copy takes as long as it is told."""

    plain_s: float
    quick_s: float
    encoder: Encoder | None = None
    now_s: float = 0.0

    def __call__(self) -> float:
        assert self.encoder is not None
        self.now_s += (self.quick_s if self.encoder.quick else self.plain_s) / 2
        return self.now_s


async def started(
    models: ModelStore,
    folder: Path,
    plain_s: float,
    quick_s: float,
    make_copy: Callable[[Path, Path], int] = write_quick_copy,
) -> Encoder:
    clock = Turns(plain_s, quick_s)
    clock.encoder = Encoder(models, folder, clock=clock, make_copy=make_copy)
    await clock.encoder.start()
    return clock.encoder


def never(source: Path, target: Path) -> int:
    raise AssertionError("nothing is tried again")


async def test_the_quicker_copy_answers_with_the_same_vectors_under_the_same_id(
    models: ModelStore, tmp_path: Path
) -> None:
    slow = await started(models, tmp_path / "slow", 1.0, 0.95)
    quick = await started(models, tmp_path / "quick", 1.0, 0.5)
    try:
        assert (slow.quick, quick.quick) == (False, True)
        assert slow.embedder.id == quick.embedder.id
        for text in TEXTS:
            (one,), (other,) = await slow.embedder.embed([text]), await quick.embedder.embed([text])
            assert sum(float(a) * float(b) for a, b in zip(one, other, strict=True)) > NEAR_COSINE
            assert [float(a) for a in one] != [float(b) for b in other], "two copies, not one"
        assert [file.name for file in (tmp_path / "slow").iterdir()] == ["encoder.json"], "the slower one is gone"
    finally:
        await slow.close()
        await quick.close()


async def test_a_later_start_keeps_the_choice_and_one_whose_copy_is_damaged_makes_it_again(
    models: ModelStore, tmp_path: Path
) -> None:
    await (await started(models, tmp_path, 1.0, 0.5)).close()
    again = await started(models, tmp_path, 1.0, 2.0, never)
    assert again.quick and not await again.start()
    await again.close()
    (tmp_path / "minilm-int8-quick.onnx").write_bytes(b"half of it")
    repaired = await started(models, tmp_path, 1.0, 0.5)
    assert repaired.quick and len(await repaired.embedder.embed(["hello"])) == 1
    await repaired.close()
    assert {file.name for file in tmp_path.glob("*.onnx*")} == {"minilm-int8-quick.onnx"}, "no copy of the copy"


async def test_both_copies_stay_in_memory_while_they_are_tried_and_none_after_the_end(
    models: ModelStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else each turn would time a load."""
    loads: list[str] = []
    load = OnnxRuntime.load

    def counted(self: OnnxRuntime, file: Path, threads: int) -> TensorModel:
        loads.append(file.name)
        return load(self, file, threads)

    monkeypatch.setattr(OnnxRuntime, "load", counted)
    encoder = await started(models, tmp_path, 1.0, 0.5)
    assert sorted(loads) == ["minilm-int8-quick.onnx", "model.onnx"]
    assert encoder.endpoint.loaded(QUICK) and not encoder.endpoint.loaded(ENCODER)
    await encoder.close()
    assert not encoder.endpoint.loaded(QUICK)


async def test_a_copy_that_says_something_else_is_not_used_however_quick(models: ModelStore, tmp_path: Path) -> None:
    import onnx
    from onnx import numpy_helper

    def wrong(source: Path, target: Path) -> int:
        count = write_quick_copy(source, target)
        model = onnx.load(str(target))
        scales = next(one for one in model.graph.initializer if one.name.endswith("_quick_scales"))
        scales.CopyFrom(numpy_helper.from_array(-numpy_helper.to_array(scales), scales.name))
        onnx.save(model, str(target))
        return count

    encoder = await started(models, tmp_path, 1.0, 0.1, wrong)
    assert not encoder.quick and len(await encoder.embedder.embed(["hello"])) == 1
    await encoder.close()


def late() -> EngineError:
    error = EngineError("it did not answer within 10 s")
    error.__cause__ = TimeoutError()
    return error


@pytest.mark.parametrize(
    ("error", "kept"),
    [
        (EngineError("no such operator"), True),
        (ConfigError("no onnx"), False),
        (late(), False),
        (PermissionError("the copy cannot be read"), False),
    ],
)
async def test_without_a_copy_the_encoder_runs_as_it_came(
    models: ModelStore, tmp_path: Path, error: Exception, kept: bool
) -> None:
    """A runtime that cannot is not asked at each start; a missing package may come, a busy machine rest."""

    def fails(source: Path, target: Path) -> int:
        raise error

    encoder = await started(models, tmp_path, 1.0, 0.5, fails)
    assert not encoder.quick and len(await encoder.embedder.embed(["hello"])) == 1
    assert (tmp_path / "encoder.json").is_file() == kept
    await encoder.close()


async def test_a_choice_that_cannot_be_kept_leaves_one_copy_in_memory(models: ModelStore, tmp_path: Path) -> None:
    (tmp_path / "encoder.json.tmp").mkdir()
    encoder = await started(models, tmp_path, 1.0, 0.5)
    assert not encoder.quick and encoder.endpoint.loaded(ENCODER) and not encoder.endpoint.loaded(QUICK)
    await encoder.close()


async def test_a_start_that_is_cancelled_leaves_the_encoder_as_it_came(models: ModelStore, tmp_path: Path) -> None:
    encoder: Encoder

    def clock() -> float:
        if encoder.quick:
            start.cancel()
        return 0.0

    encoder = Encoder(models, tmp_path, clock=clock)
    start = asyncio.create_task(encoder.start())
    with pytest.raises(asyncio.CancelledError):
        await start
    assert not encoder.quick and len(await encoder.embedder.embed(["hello"])) == 1
    await encoder.close()


def test_the_copy_holds_each_product_once_and_a_model_without_such_weights_has_none(
    models: ModelStore, tmp_path: Path
) -> None:
    copy = tmp_path / "copy.onnx"
    assert write_quick_copy(models.path(ENCODER), copy) == 36
    assert copy.stat().st_size < 1.02 * models.path(ENCODER).stat().st_size
    with pytest.raises(EngineError, match="no int8 weights"):
        write_quick_copy(copy, tmp_path / "again.onnx")
    (tmp_path / "text.onnx").write_text("not a model")
    with pytest.raises(EngineError, match="not an ONNX model"):
        write_quick_copy(tmp_path / "text.onnx", tmp_path / "again.onnx")
    assert not (tmp_path / "again.onnx").exists()

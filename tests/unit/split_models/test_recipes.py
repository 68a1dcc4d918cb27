"""Recipes on pictures: real text lines are found, and pictures that are none are refused by name."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from engines.arrays import to_array, to_tensor
from engines.onnx import OnnxRuntime
from engines.port import TensorModel
from protocol.errors import BadRequest, ConfigError, EngineError, TooLarge
from protocol.tensors import Tensor
from split_models.images import MAX_ENCODED_BYTES, MAX_SIDE, decode, drawn_text, encode
from split_models.recipes import RECIPES, Recipe, recipe

DET_SHAPE, CLS_SHAPE = (1, 3, 480, 480), (1, 3, 48, 192)
SHAPES = {"ppocr-det": DET_SHAPE, "ppocr-cls": CLS_SHAPE}


@pytest.fixture(scope="module")
def det(model_file: Callable[[str], Path]) -> Iterator[TensorModel]:
    model = OnnxRuntime().load(model_file("ppocr-v4-det"), threads=1)
    yield model
    model.close()


@pytest.fixture(scope="module")
def cls(model_file: Callable[[str], Path]) -> Iterator[TensorModel]:
    model = OnnxRuntime().load(model_file("ppocr-v2-cls"), threads=1)
    yield model
    model.close()


def answer(model: TensorModel, name: str, encoded: bytes) -> tuple[Tensor, ...]:
    found = recipe(name)
    made = found.before(encoded, "x", SHAPES[name])
    return found.after(model.run(made.inputs), made.context)


def bounds(box: np.ndarray) -> tuple[float, float, float, float]:
    return (*box.min(axis=0).tolist(), *box.max(axis=0).tolist())  # type: ignore[return-value]


def test_every_line_of_a_scanned_page_is_found(det: TensorModel, model_file: Callable[[str], Path]) -> None:
    boxes, scores = answer(det, "ppocr-det", model_file("sample-page").read_bytes())
    found = [bounds(box) for box in to_array(boxes)]
    centres = sorted((top + bottom) / 2 for _, top, _, bottom in found)
    # Rows of the scan (384 x 191 pixels): heading, five lines of text, one of code.
    for row in (22, 56, 74, 92, 108, 128, 178):
        assert any(abs(centre - row) < 10 for centre in centres), f"no box near row {row}: {centres}"
    assert len(found) <= 9
    assert (to_array(scores) > 0.4).all()
    assert all(0 <= left < right <= 383 and 0 <= top < bottom <= 190 for left, top, right, bottom in found)


def test_boxes_are_in_pixels_of_the_input(det: TensorModel) -> None:
    page = np.full((300, 900, 3), 255, dtype=np.uint8)
    page[80:180, 200:640] = drawn_text(["somewhere in the middle"], 440, 100, 30, dark_on_light=True)
    boxes, _ = answer(det, "ppocr-det", encode(page, "PNG"))
    lefts, tops, rights, bottoms = zip(*(bounds(box) for box in to_array(boxes)), strict=True)
    assert 200 < min(lefts) < 250
    assert 95 < min(tops) < max(bottoms) < 165
    assert max(rights) < 640


def test_a_blank_picture_has_no_boxes(det: TensorModel) -> None:
    boxes, scores = answer(det, "ppocr-det", encode(np.full((200, 300, 3), 255, dtype=np.uint8)))
    assert to_array(boxes).shape == (0, 4, 2)
    assert to_array(scores).shape == (0,)


def test_upright_and_turned_lines_are_told_apart(cls: TensorModel) -> None:
    line = drawn_text(["which way is up"], 260, 64, 24, dark_on_light=True)
    for pixels, label in ((line, 0), (line[::-1, ::-1].copy(), 180)):
        labels, scores = answer(cls, "ppocr-cls", encode(pixels, "PNG"))
        assert to_array(labels).tolist() == [label]
        assert to_array(scores)[0] > 0.8


@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA", "P", "CMYK", "1", "LA", "I;16"])
def test_every_colour_mode_is_taken(mode: str) -> None:
    out = io.BytesIO()
    Image.new(mode, (40, 30)).save(out, format="JPEG" if mode == "CMYK" else "PNG")
    assert decode(out.getvalue(), "image").shape == (30, 40, 3)


@pytest.mark.parametrize("mode", ["CMYK", "P", "L", "RGBA"])
def test_colours_keep_their_meaning(mode: str) -> None:
    """White stays white and black black: an inverted CMYK or a lost palette would show here."""
    picture = Image.new("RGB", (16, 8), "white")
    picture.paste((0, 0, 0), (0, 0, 8, 8))
    out = io.BytesIO()
    picture.convert(mode).save(out, format="JPEG" if mode == "CMYK" else "PNG", quality=95)
    pixels = decode(out.getvalue(), "image").astype(int)
    assert pixels[:, :6].max() < 40
    assert pixels[:, 10:].min() > 215


def test_an_orientation_tag_turns_nothing() -> None:
    """Boxes are in pixels of the stored picture: 16 wide and 8 high, its left half black."""
    picture = Image.new("RGB", (16, 8), "white")
    picture.paste((0, 0, 0), (0, 0, 8, 8))
    tag = Image.Exif()
    tag[0x0112] = 6
    out = io.BytesIO()
    picture.save(out, format="JPEG", quality=95, exif=tag)
    pixels = decode(out.getvalue(), "image").astype(int)
    assert pixels.shape == (8, 16, 3)
    assert pixels[:, :6].max() < 40
    assert pixels[:, 10:].min() > 215


@pytest.mark.parametrize("size", [(1, 1), (MAX_SIDE, 4)])
def test_the_smallest_and_the_widest_picture_have_an_answer(
    det: TensorModel, cls: TensorModel, size: tuple[int, int]
) -> None:
    picture = encode(np.full((size[1], size[0], 3), 255, dtype=np.uint8), "PNG")
    boxes, scores = answer(det, "ppocr-det", picture)
    assert to_array(boxes).shape[1:] == (4, 2)
    assert len(to_array(boxes)) == len(to_array(scores))
    labels, _ = answer(cls, "ppocr-cls", picture)
    assert to_array(labels).tolist() in ([0], [180])


@pytest.mark.parametrize("share", [0.05, 0.5, 0.9])
def test_a_truncated_jpeg_is_refused(share: float) -> None:
    whole = jpeg()
    with pytest.raises(BadRequest, match="cannot be decoded") as raised:
        decode(whole[: int(len(whole) * share)], "x")
    assert raised.value.field == "x"
    assert " at 0x" not in raised.value.message, "an address in memory tells nobody anything"


@pytest.mark.parametrize("size", [(1, 1), (1, 900), (900, 1), (2, 3000)])
@pytest.mark.parametrize("name", RECIPES)
def test_extreme_shapes_do_not_break_the_recipe(name: str, size: tuple[int, int]) -> None:
    pixels = np.zeros((size[1], size[0], 3), dtype=np.uint8)
    made = recipe(name).before(encode(pixels, "PNG"), "x", SHAPES[name])
    assert made.inputs[0].shape == SHAPES[name]


def png_that_claims(width: int, height: int) -> bytes:
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(bytes(1000))), (b"IEND", b"")]
    body = b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + body


def jpeg() -> bytes:
    return encode(drawn_text(["text"], 120, 60, 20, dark_on_light=True))


BROKEN = {
    "empty": b"",
    "text": b"hello, this is not a picture",
    "zeros": bytes(4096),
    "jpeg magic only": b"\xff\xd8\xff\xe0" + bytes(40),
    "half a jpeg header": b"\xff\xd8",
    "a bomb": png_that_claims(60_000, 60_000),
    "too many pixels": png_that_claims(6_000, 6_000),
    "too wide": png_that_claims(20_000, 10),
    "no width": png_that_claims(0, 10),
    "less data than claimed": png_that_claims(3_000, 3_000),
    "gif": encode(np.zeros((2, 2, 3), dtype=np.uint8), "GIF"),
    "svg": b"<svg xmlns='http://www.w3.org/2000/svg' width='9' height='9'/>",
}


@pytest.mark.parametrize("kind", BROKEN)
@pytest.mark.parametrize("name", RECIPES)
def test_pictures_that_are_none_are_refused_by_name(name: str, kind: str) -> None:
    with pytest.raises(BadRequest) as raised:
        recipe(name).before(BROKEN[kind], "x", SHAPES[name])
    assert raised.value.field == "x"
    assert "JPEG or PNG" in raised.value.next_step


def test_truncated_jpegs_never_escape_as_foreign_errors() -> None:
    whole = jpeg()
    for end in range(0, len(whole) - 2, 97):
        try:
            decode(whole[:end], "x")
        except BadRequest as err:
            assert err.field == "x"


def test_an_encoded_picture_has_a_maximum_size() -> None:
    with pytest.raises(TooLarge) as raised:
        decode(bytes(MAX_ENCODED_BYTES + 1), "x")
    assert raised.value.field == "x"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_outputs_that_are_not_finite_are_no_answer(value: float) -> None:
    context = {"width": 8.0, "height": 8.0, "inner_width": 8.0, "inner_height": 8.0}
    bad_map = to_tensor("y", np.full((1, 1, 8, 8), value, dtype=np.float32))
    with pytest.raises(EngineError, match="finite"):
        recipe("ppocr-det").after([bad_map], context)
    with pytest.raises(EngineError, match="finite"):
        recipe("ppocr-cls").after([to_tensor("y", np.full((1, 2), value, dtype=np.float32))], {})


@pytest.mark.parametrize("name", RECIPES)
def test_outputs_of_another_shape_are_no_answer(name: str) -> None:
    context = {"width": 8.0, "height": 8.0, "inner_width": 8.0, "inner_height": 8.0}
    with pytest.raises(EngineError, match="expected FP32"):
        recipe(name).after([to_tensor("y", np.zeros((3, 3, 3), dtype=np.float32))], context)


def test_likeness_counts_boxes_and_measures_them() -> None:
    found: Recipe = recipe("ppocr-det")
    one = np.array([[[0, 0], [10, 0], [10, 10], [0, 10]]], dtype=np.float32)
    scores = to_tensor("scores", np.array([0.9], dtype=np.float32))
    same = found.compare((to_tensor("boxes", one), scores), (to_tensor("boxes", one), scores))
    moved = found.compare((to_tensor("boxes", one + 1), scores), (to_tensor("boxes", one), scores))
    none = found.compare((to_tensor("boxes", one[:0]), scores), (to_tensor("boxes", one), scores))
    assert (same.same, same.error_ratio) == (True, pytest.approx(0.0))
    assert 0.2 < moved.error_ratio < 0.4
    assert (none.same, none.error_ratio) == (False, 1.0)


def test_an_unknown_recipe_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="ppocr-det"):
        recipe("ocr")

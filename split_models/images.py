"""The only place that names Pillow: encoded pictures to arrays, with bounds checked before pixels are allocated."""

from __future__ import annotations

import io
import warnings
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from protocol.errors import BadRequest, ConfigError, TooLarge
from protocol.extras import install_step

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MAX_ENCODED_BYTES = 16 << 20
MAX_PIXELS = 24_000_000
"""A 24-megapixel photo takes 72 MB as RGB; a bomb of a few KB could ask for gigabytes."""

MAX_SIDE = 16_384
FORMATS = ("JPEG", "PNG")
_NEXT = f"send a JPEG or PNG of at most {MAX_PIXELS // 1_000_000} megapixels"


def decode(data: bytes | memoryview, field: str) -> NDArray[np.uint8]:
    """RGB [height, width, 3] of a JPEG or PNG. Raises BadRequest or TooLarge naming `field`.

    Pixels are taken as they are stored: an orientation tag (EXIF) turns nothing, so that answers in pixel coordinates
    fit the stored picture whatever a viewer does with it. Transparency is dropped.
    """
    numpy, image_module = _libraries()
    if len(data) > MAX_ENCODED_BYTES:
        raise TooLarge(f"the image is {len(data)} bytes, the maximum is {MAX_ENCODED_BYTES}", field=field)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with image_module.open(io.BytesIO(data), formats=FORMATS) as picture:
                width, height = picture.size
                _check_pixels(width, height, field)
                pixels: NDArray[np.uint8] = numpy.asarray(picture.convert("RGB"), dtype=numpy.uint8)
    except (BadRequest, TooLarge):
        raise
    except image_module.UnidentifiedImageError as err:  # its own text is an address in memory
        raise BadRequest(
            "the image cannot be decoded: it is no picture of a known kind", next_step=_NEXT, field=field
        ) from err
    except image_module.DecompressionBombError as err:
        raise BadRequest("the image holds too many pixels", next_step=_NEXT, field=field) from err
    except Exception as err:  # decoders raise OSError, SyntaxError, ValueError, struct.error and zlib.error
        raise BadRequest(f"the image cannot be decoded: {str(err)[:120]}", next_step=_NEXT, field=field) from err
    return pixels


def resize(pixels: NDArray[np.uint8], width: int, height: int) -> NDArray[np.uint8]:
    """Bilinear, with a wider kernel when shrinking, so that thin strokes survive."""
    numpy, image_module = _libraries()
    if pixels.shape[:2] == (height, width):
        return pixels
    picture = image_module.fromarray(pixels).resize((width, height), image_module.Resampling.BILINEAR)
    result: NDArray[np.uint8] = numpy.asarray(picture, dtype=numpy.uint8)
    return result


def encode(pixels: NDArray[np.uint8], format_name: str = "JPEG", quality: int = 85) -> bytes:
    """The encoded form of RGB or grey pixels, for calibration inputs and tests."""
    _, image_module = _libraries()
    out = io.BytesIO()
    image_module.fromarray(pixels).save(out, format=format_name, quality=quality)
    return out.getvalue()


def drawn_text(lines: list[str], width: int, height: int, text_pixels: int, dark_on_light: bool) -> NDArray[np.uint8]:
    """A page of text in the library's own font: a calibration input that needs no file."""
    numpy, image_module = _libraries()
    from PIL import ImageDraw, ImageFont

    paper, ink = ((250, 248, 240), (20, 20, 30)) if dark_on_light else ((25, 40, 60), (240, 235, 220))
    picture = image_module.new("RGB", (width, height), paper)
    draw = ImageDraw.Draw(picture)
    font = ImageFont.load_default(size=text_pixels)
    for index, line in enumerate(lines):
        draw.text((text_pixels, text_pixels * (1 + index * 2)), line, fill=ink, font=font)
    page: NDArray[np.uint8] = numpy.asarray(picture, dtype=numpy.uint8)
    return page


def _check_pixels(width: int, height: int, field: str) -> None:
    if width < 1 or height < 1 or max(width, height) > MAX_SIDE or width * height > MAX_PIXELS:
        raise BadRequest(f"the image is {width} x {height} pixels", next_step=_NEXT, field=field)


def check_libraries() -> None:
    """Raises ConfigError when pictures cannot be worked on here; imports nothing."""
    if find_spec("numpy") is None or find_spec("PIL") is None:
        raise _lacking()


def _lacking() -> ConfigError:
    return ConfigError(
        "numpy and Pillow are needed for image models",
        next_step=f"{install_step('onnx')} or {install_step('tflite')}",
    )


def _libraries() -> tuple[Any, Any]:
    try:
        import numpy
        from PIL import Image
    except ImportError as err:
        raise _lacking() from err
    return numpy, Image

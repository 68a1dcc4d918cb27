"""Pictures in requests: base64 or data URLs to ImagePart, checked by their first bytes, and back."""

from __future__ import annotations

import base64
import binascii

from protocol.errors import BadRequest, TooLarge, Unsupported
from protocol.text import ImagePart

MAX_IMAGES = 16
"""Of one request."""

MAX_IMAGE_BYTES = 4 << 20
MAX_URL_CHARS = 2048

_MARKS = ((b"\x89PNG\r\n\x1a\n", "image/png"), (b"\xff\xd8\xff", "image/jpeg"), (b"GIF8", "image/gif"))


def from_url(url: str, path: str, detail: str = "auto") -> ImagePart:
    """An image by `data:` URL, or by an https address that the target fetches. Raises BadRequest or Unsupported."""
    if url.startswith("data:"):
        head, comma, text = url.partition(",")
        if not comma or not head.endswith(";base64"):
            raise BadRequest("a data URL must read data:image/...;base64,...", field=path)
        return from_base64(text, path, detail)
    if not url.startswith(("https://", "http://")) or len(url) > MAX_URL_CHARS:
        raise Unsupported("an image comes as a data URL or by an https address", field=path)
    return ImagePart(url=url, detail=detail)


def from_base64(text: str, path: str, detail: str = "auto") -> ImagePart:
    """An image from base64. Its own first bytes say what it is, whatever the client called it."""
    if len(text) > MAX_IMAGE_BYTES * 4 // 3 + 4:
        raise TooLarge(f"an image may have {MAX_IMAGE_BYTES} bytes", next_step="send a smaller one", field=path)
    try:
        data = base64.b64decode(text.encode("ascii", "replace"), validate=True)
    except binascii.Error as err:
        raise BadRequest("the image is not base64", field=path) from err
    return ImagePart(media_type=_media_type(data, path), data=data, detail=detail)


def data_url(image: ImagePart) -> str:
    """The image as OpenAI's API takes it: its address, or its bytes as one (RFC 2397)."""
    return image.url or f"data:{image.media_type};base64,{base64_of(image)}"


def base64_of(image: ImagePart) -> str:
    """The image's bytes as most APIs take them."""
    return base64.b64encode(image.data).decode("ascii")


def _media_type(data: bytes, path: str) -> str:
    for mark, media_type in _MARKS:
        if data.startswith(mark):
            return media_type
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "image/webp"
    raise Unsupported("an image must be PNG, JPEG, GIF or WebP", field=path)

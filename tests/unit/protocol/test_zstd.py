"""Compressed bodies: bounded before anything is made, and damage is named."""

from __future__ import annotations

import sys
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol import zstd
from protocol.errors import ProtocolError, TooLarge
from protocol.oip import MAX_BODY_BYTES, InferRequest, decode_request, encode_request
from protocol.oip_fields import inflate
from protocol.tensors import Tensor

pytestmark = pytest.mark.skipif(not zstd.available(), reason="no Zstandard library here")


@given(body=st.binary(max_size=4096))
def test_a_body_comes_back(body: bytes) -> None:
    assert zstd.decompress(zstd.compress(body), len(body)) == body


@given(body=st.binary(min_size=1, max_size=512), cut=st.integers(0, 600), flip=st.integers(0, 600))
def test_damage_is_a_protocol_error_or_does_no_harm(body: bytes, cut: int, flip: int) -> None:
    frame = bytearray(zstd.compress(body))
    frame[flip % len(frame)] ^= 0x40
    for damaged in (bytes(frame), bytes(frame[: cut % len(frame)])):
        try:
            assert len(zstd.decompress(damaged, 1 << 16)) <= 1 << 16
        except (ProtocolError, TooLarge):
            continue


def test_a_bomb_is_refused_by_the_size_it_declares() -> None:
    bomb = zstd.compress(bytes(MAX_BODY_BYTES + 1))
    assert len(bomb) < 20_000
    with pytest.raises(TooLarge, match="inflates"):
        inflate({"content-encoding": "zstd"}, bomb, MAX_BODY_BYTES)


def test_a_bomb_that_declares_nothing_is_stopped_at_the_bound() -> None:
    module = zstd._module()
    packer = module.ZstdCompressor(level=1)
    bomb = b"".join([*(packer.compress(bytes(1 << 20)) for _ in range(9)), packer.flush()])
    assert module.get_frame_info(bomb).decompressed_size is None
    with pytest.raises(TooLarge, match="over"):
        zstd.decompress(bomb, 8 << 20)


def test_a_frame_that_asks_for_a_large_window_is_refused() -> None:
    """Its reader would have to hold the window, however short the frame is."""
    module = zstd._module()
    options = {module.CompressionParameter.window_log: 24}
    packer = module.ZstdCompressor(options=options)
    frame = packer.compress(bytes(1 << 20)) + packer.flush()
    with pytest.raises(ProtocolError, match="zstd"):
        zstd.decompress(frame, 2 << 20)


def test_two_frames_are_not_one_body() -> None:
    with pytest.raises(ProtocolError, match="after its end"):
        zstd.decompress(zstd.compress(b"a") + zstd.compress(b"b"), 100)


@given(
    shape=st.sampled_from([(1, 3, 40, 50), (1, 2, 5), (4,), (1, 2, 64, 64), (1, 1, 300, 300)]),
    kind=st.sampled_from(["UINT8", "FP16"]),
    head=st.binary(max_size=50),
)
def test_tensors_come_back_whatever_their_planes(shape: tuple[int, ...], kind: str, head: bytes) -> None:
    size = prod(shape) * (1 if kind == "UINT8" else 2)
    tensors = [Tensor("a", kind, shape, bytes(k % 251 for k in range(size))), Tensor("b", "UINT8", (3,), b"abc")]
    frame = zstd.compress_tensors(head, tensors)
    whole = head + bytes(tensors[0].data) + b"abc"
    assert zstd.decompress(frame, len(whole)) == whole
    assert zstd._module().get_frame_info(frame).decompressed_size == len(whole)


def test_a_request_in_a_compressed_body_is_the_same_request() -> None:
    asked = InferRequest("m", (Tensor("x", "FP16", (2,), b"\0\0\0\x3c"),), binary=True)
    headers, body = encode_request(asked)
    read = decode_request("m", {**headers, "content-encoding": "zstd"}, zstd.compress(body))
    assert bytes(read.inputs[0].data) == bytes(asked.inputs[0].data)


def test_the_library_is_not_loaded_before_it_is_used() -> None:
    import subprocess

    code = "import sys, split_models.front; print([n for n in sys.modules if n.endswith('.zstd')])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=50)
    assert out.stdout.strip() == "['protocol.zstd']"

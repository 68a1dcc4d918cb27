"""Messages in pieces: any interleaving becomes the same tensors; who goes first; what cannot add up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.frame_parts import FAIR_PART, FRAGMENT_BYTES, LARGE_BYTES, Incoming, Outgoing, OutgoingQueue, views_of
from protocol import zstd
from protocol.errors import BadRequest, ProtocolError, TooLarge
from protocol.tensor_frames import LAST, WAITED, Ask, Data, TensorHead, decode, heads_of
from protocol.tensors import Tensor


def tensor(name: str, size: int) -> Tensor:
    return Tensor(name, "UINT8", (size,), bytes(number % 251 for number in range(size)))


def message(request: int, *tensors: Tensor) -> Outgoing:
    told = heads_of(tensors)
    return Outgoing(request, lambda data: Ask("m", "", 1, told, 0, data), views_of(tensors))


@given(st.lists(st.integers(0, 60_000), min_size=1, max_size=4), st.integers(1_000, 30_000))
def test_what_leaves_in_frames_arrives_whole(sizes: list[int], room: int) -> None:
    sent = tuple(tensor(f"t{number}", size) for number, size in enumerate(sizes))
    outgoing, incoming = message(3, *sent), None
    for _ in range(4 + sum(sizes) // room):
        framed = decode(outgoing.frame(room)[0])
        frame = framed.frame
        assert isinstance(frame, Ask | Data)
        if isinstance(frame, Ask):
            incoming = Incoming(frame.tensors)
        assert incoming is not None
        if incoming.add(frame.data, framed.flags):
            break
    assert outgoing.left_bytes == 0
    assert incoming is not None
    assert [(t.name, bytes(t.data)) for t in incoming.tensors()] == [(t.name, t.data) for t in sent]


def test_the_head_of_a_large_message_that_is_timed_leaves_alone() -> None:
    for size_bytes, timed, first_bytes in (
        (LARGE_BYTES, True, 0),
        (LARGE_BYTES - 1, True, LARGE_BYTES - 1),
        (LARGE_BYTES, False, LARGE_BYTES),
    ):
        outgoing = message(1, tensor("x", size_bytes))
        outgoing.timed = timed
        frame, data_bytes = outgoing.frame(1 << 20)
        assert data_bytes == first_bytes
        assert bool(decode(frame).flags & LAST) == (data_bytes == size_bytes)


def drained(queue: OutgoingQueue) -> list[int]:
    order = []
    while (outgoing := queue.next()) is not None:
        outgoing.frame(1 << 62)
        order.append(outgoing.request)
        queue.back(outgoing, outgoing.left_bytes == 0)
    return order


def test_equal_messages_leave_in_order_and_small_ones_overtake() -> None:
    queue = OutgoingQueue()
    for request in (1, 2, 3):
        queue.add(message(request, tensor("x", 100)))
    assert drained(queue) == [1, 2, 3]
    large, small = message(4, tensor("x", 3 * FRAGMENT_BYTES)), message(5, tensor("x", 10))
    queue = OutgoingQueue()
    queue.add(large)
    queue.add(small)
    assert drained(queue)[0] == 5


def test_small_messages_that_keep_coming_do_not_starve_a_large_one() -> None:
    queue, order = OutgoingQueue(), []
    queue.add(message(1, tensor("x", 3 * FRAGMENT_BYTES)))
    for request in range(2, 40):
        queue.add(message(request, tensor("x", 10)))
        outgoing = queue.next()
        assert outgoing is not None
        outgoing.frame(1 << 62)
        order.append(outgoing.request)
        queue.back(outgoing, outgoing.left_bytes == 0)
    assert order.count(1) == 3  # its three fragments
    assert order.index(1) < FAIR_PART


@given(st.lists(st.integers(1, 5), max_size=30))
def test_dropped_messages_do_not_leave(drops: list[int]) -> None:
    queue = OutgoingQueue()
    for request in range(1, 6):
        queue.add(message(request, tensor("x", 100 * request)))
    for request in drops:
        queue.drop(request)
    assert sorted(drained(queue)) == sorted(set(range(1, 6)) - set(drops))


def test_a_message_that_stalled_in_the_middle_says_so() -> None:
    queue = OutgoingQueue()
    begun, fresh = message(1, tensor("x", LARGE_BYTES)), message(2, tensor("x", 2 * LARGE_BYTES))
    queue.add(begun)
    queue.add(fresh)
    begun.frame(1 << 20)
    queue.stalled()
    assert decode(begun.frame(1 << 20)[0]).flags & WAITED
    assert not decode(fresh.frame(1 << 20)[0]).flags & WAITED


def test_lengths_that_do_not_add_up() -> None:
    head = (TensorHead("x", "UINT8", (4,), 4),)
    with pytest.raises(ProtocolError, match="more data"):
        Incoming(head).add(b"12345", 0)
    with pytest.raises(ProtocolError, match="ends after 3 of 4"):
        Incoming(head).add(b"123", LAST)
    wrong = Incoming((TensorHead("x", "UINT8", (5,), 4),))
    assert wrong.add(b"1234", LAST)
    with pytest.raises(BadRequest):
        wrong.tensors()


@pytest.mark.skipif(not zstd.available(), reason="no Zstandard library")
@pytest.mark.parametrize("size", [4, 6])
def test_packed_data_of_another_length_is_refused(size: int) -> None:
    data = zstd.compress(bytes(size))
    incoming = Incoming((TensorHead("x", "UINT8", (5,), 5),), len(data))
    assert incoming.add(data, LAST)
    with pytest.raises((ProtocolError, TooLarge), match="bytes"):
        incoming.tensors()

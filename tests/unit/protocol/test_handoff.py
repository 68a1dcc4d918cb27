"""Bodies of handoff frames: round trips of every frame, garbage, bounds, size of tokens on the wire."""

from __future__ import annotations

import math
from typing import Any

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.errors import ProtocolError, TooLarge
from protocol.handoff import (
    MAX_EMBED_TEXTS,
    MAX_FRAME_BYTES,
    Ack,
    Capabilities,
    Embed,
    Extend,
    Finish,
    Frame,
    Prepare,
    Query,
    Ready,
    Refuse,
    Resume,
    Start,
    Stop,
    TokenIds,
    Tokenize,
    Tokens,
    Vectors,
    decode_body,
    encode_body,
)
from protocol.handoff_headers import HandoffReader, HandoffWriter, whole_frame
from protocol.text import (
    CallDelta,
    FinishReason,
    ImagePart,
    Message,
    Sampling,
    TextCapabilities,
    TextPart,
    TextRequest,
    Token,
    Usage,
)
from protocol.token_block import MAX_ALTERNATIVES, MAX_PIECE_BYTES, Reader, Writer, read_tokens, write_tokens

STREAM = bytes(range(16))

f32 = st.floats(width=32, allow_nan=False)
seconds = st.floats(0, 1e6)
texts = st.text(max_size=20)
counts = st.integers(0, 2**40)
ids = st.integers(0, 2**31 - 1)


@st.composite
def runs(draw: st.DrawFn, first: int | None = None) -> tuple[int, tuple[Token, ...]]:
    start = draw(st.integers(0, 2**30)) if first is None else first
    size = draw(st.integers(0, 5))
    finishes: list[FinishReason | None] = [None, "stop", "length", "tool_calls"]
    last = draw(st.sampled_from(finishes))
    tokens = tuple(
        Token(
            index=start + number,
            id=draw(st.none() | ids),
            data=draw(st.binary(max_size=8)),
            logprob=draw(st.none() | f32),
            margin=draw(st.none() | f32),
            finish=last if number + 1 == size else None,
            alternatives=draw(st.lists(st.tuples(st.binary(max_size=4), f32), max_size=3).map(tuple)),
            call=draw(st.none() | st.builds(CallDelta, st.integers(0, 9), texts, texts, texts)),
        )
        for number in range(size)
    )
    return start, tokens


samplings = st.builds(
    Sampling,
    temperature=st.floats(0, 2),
    seed=st.none() | st.integers(-5, 5),
    max_tokens=st.integers(1, 9999),
    logit_bias=st.dictionaries(st.integers(0, 9), st.floats(-9, 9), max_size=2),
    grammar=st.none() | texts,
    logprobs=st.integers(0, 20),
    json_schema=st.none() | st.just({"type": "object", "required": ["a"]}),
)
pictures = st.builds(ImagePart, texts, st.binary(max_size=9), texts, st.sampled_from(["auto", "low"]))
parts = st.lists(st.builds(TextPart, texts) | pictures, max_size=2).map(tuple)
messages = st.lists(
    st.builds(Message, role=st.sampled_from(["user", "assistant"]), content=texts, name=st.none() | texts, parts=parts),
    min_size=1,
    max_size=3,
).map(tuple)
prompts = texts | st.lists(ids, min_size=1, max_size=5).map(tuple) | messages
requests = st.builds(
    TextRequest,
    model=texts,
    prompt=prompts,
    sampling=samplings,
    prefix=runs(first=0).map(lambda run: run[1]),
    tools=st.lists(st.just({"type": "function", "function": {"name": "f"}}), max_size=1).map(tuple),
    tool_choice=st.sampled_from(["auto", "required", "function:f"]),
    parallel_tool_calls=st.booleans(),
    response_format=st.none() | st.just({"type": "json_object"}),
)
capabilities = st.builds(
    TextCapabilities,
    vocabulary=st.none() | texts,
    template=st.none() | texts,
    context_tokens=st.integers(1, 10**6),
    continues=st.sampled_from(["ids", "text", "no"]),
    grammar=st.booleans(),
    logprobs=st.booleans(),
    embeds=st.booleans(),
    images=st.booleans(),
    tools=st.booleans(),
)
frames: st.SearchStrategy[Frame] = st.one_of(
    st.builds(Prepare, requests, seconds, st.none() | texts, st.integers(0, 3), texts),
    runs().map(lambda run: Extend(*run)),
    st.builds(Ready, counts, st.none() | texts, seconds, seconds, counts, counts),
    st.builds(Start, counts, counts),
    st.tuples(runs(), counts).map(lambda pair: Tokens(*pair[0], echo_ms=pair[1])),
    st.builds(Ack, st.integers(-1, 2**40), counts),
    st.builds(Stop, counts),
    st.builds(Resume, counts),
    st.builds(Finish, counts, texts, st.builds(Usage, counts, counts, counts)),
    st.builds(Refuse, texts, texts, st.none() | seconds, st.none() | texts, st.dictionaries(texts, counts, max_size=2)),
    st.builds(Query, texts),
    st.builds(Capabilities, capabilities, counts, counts, seconds),
    st.builds(Tokenize, texts, st.binary(max_size=20)),
    st.builds(TokenIds, st.lists(ids, max_size=9).map(tuple)),
    st.builds(Embed, texts, st.lists(texts, max_size=3).map(tuple)),
    st.lists(st.tuples(f32, f32), max_size=3).map(lambda rows: Vectors(tuple(rows))),
)


@settings(max_examples=300)
@given(st.binary(min_size=16, max_size=16), st.integers(0, 2**32 - 1), frames)
def test_every_frame_comes_back(stream: bytes, epoch: int, frame: Frame) -> None:
    for data in (whole_frame(stream, epoch, frame), HandoffWriter().encode(stream, epoch, frame)):
        found = HandoffReader().decode(data)
        assert (found.stream, found.epoch, found.frame) == (stream, epoch, frame)


@settings(max_examples=300)
@given(st.sampled_from([*range(12), *range(15, 23), 255]), st.binary(max_size=60))
def test_any_bytes_give_a_frame_or_a_protocol_error(number: int, body: bytes) -> None:
    try:
        decode_body(number, body)
    except ProtocolError as err:
        assert err.field is not None or "JSON" in err.message or "UTF-8" in err.message or "object" in err.message


@settings(max_examples=200)
@given(frames, st.data())
def test_a_damaged_body_gives_a_frame_or_a_protocol_error(frame: Frame, data: st.DataObject) -> None:
    number, body = encode_body(frame)
    whole = bytearray(body)
    at = data.draw(st.integers(0, max(0, len(whole) - 1)))
    damaged = data.draw(
        st.sampled_from([bytes(whole[:at]), bytes(whole) + b"\0", bytes(whole[:at]) + b"\xff" + bytes(whole[at + 1 :])])
    )
    try:
        found = decode_body(number, damaged)
    except ProtocolError as err:
        assert err.message
    else:
        assert encode_body(found)[0] == number, "a frame of this kind"


def test_every_cut_of_a_token_frame_is_noticed() -> None:
    tokens = (Token(0, 300, b"ab", -0.5, 1.0, alternatives=((b"c", -1.0),)), Token(1, 5, b"d", finish="stop"))
    number, whole = encode_body(Tokens(0, tokens, 7))
    for size in range(len(whole)):
        with pytest.raises(ProtocolError):
            decode_body(number, whole[:size])
    with pytest.raises(ProtocolError):
        decode_body(number, whole + b"\0")


def test_the_largest_frame_fits_and_one_byte_more_does_not() -> None:
    def written(prompt: str) -> bytes:
        return HandoffWriter().encode(STREAM, 1, Prepare(TextRequest("m", prompt)))

    room = MAX_FRAME_BYTES - len(written("")) - 2  # the head's length takes two bytes more
    assert len(written("x" * room)) <= MAX_FRAME_BYTES
    largest = written("x" * (room + 1))
    assert len(largest) == MAX_FRAME_BYTES
    HandoffReader().decode(largest)
    with pytest.raises(TooLarge):
        written("x" * (room + 2))


@pytest.mark.parametrize("count", [2, 60_000, 2**16 + 1, 2**40])
def test_a_count_is_checked_before_anything_is_allocated(count: int) -> None:
    writer = Writer()
    writer.varint(0)
    writer.varint(count)
    writer.out += b"\1"
    with pytest.raises(ProtocolError) as caught:
        read_tokens(Reader(bytes(writer.out), "Tokens"))
    assert caught.value.field == "count"


def test_pieces_alternatives_and_texts_at_their_bounds() -> None:
    def sent(token: Token) -> tuple[Token, ...]:
        writer = Writer()
        write_tokens(writer, 0, [token])
        return read_tokens(Reader(bytes(writer.out), "Tokens"))[1]

    longest = Token(0, None, b"x" * MAX_PIECE_BYTES)
    assert sent(longest) == (longest,)
    with pytest.raises(ProtocolError):
        sent(evolve(longest, data=longest.data + b"x"))
    many = Token(0, 1, b"", alternatives=((b"a", -1.0),) * MAX_ALTERNATIVES)
    assert sent(many) == (many,)
    with pytest.raises(ProtocolError):
        sent(evolve(many, alternatives=((b"a", -1.0),) * (MAX_ALTERNATIVES + 1)))
    decode_body(*encode_body(Embed("m", ("",) * MAX_EMBED_TEXTS)))
    with pytest.raises(ProtocolError):
        decode_body(*encode_body(Embed("m", ("",) * (MAX_EMBED_TEXTS + 1))))


@pytest.mark.parametrize(
    "tokens",
    [
        (Token(1, 1, b"a"),),
        (Token(0, 1, b"a"), Token(2, 1, b"a")),
        (Token(0, 1, b"a", finish="stop"), Token(1, 1, b"b")),
    ],
)
def test_runs_with_gaps_or_an_early_finish_are_not_sent(tokens: tuple[Token, ...]) -> None:
    with pytest.raises(ProtocolError):
        encode_body(Tokens(0, tokens))


@pytest.mark.parametrize("value", [0, 127, 128, 2**63 - 1])
def test_varints(value: int) -> None:
    writer = Writer()
    writer.varint(value)
    assert Reader(bytes(writer.out), "x").varint("v") == value


@pytest.mark.parametrize("value", [-1, 2**63])
def test_varints_out_of_range(value: int) -> None:
    with pytest.raises(ProtocolError):
        Writer().varint(value)


def test_a_varint_that_never_ends_is_refused() -> None:
    with pytest.raises(ProtocolError):
        Reader(b"\xff" * 20, "x").varint("v")


def test_infinite_and_unknown_logprobs_are_told_apart() -> None:
    tokens = (Token(0, 1, b"", logprob=-math.inf), Token(1, 1, b"", logprob=None))
    found: Any = decode_body(*encode_body(Tokens(0, tokens)))
    assert [t.logprob for t in found.tokens] == [-math.inf, None]


def test_ids_alone_are_smaller_than_the_text_they_stand_for() -> None:
    """English text has about 4.5 bytes a token; ids of a 49k vocabulary take 2-3."""
    pieces = [b"The", b" weather", b" in", b" the", b" mountains", b" changes", b" quickly", b"."]
    tokens = tuple(Token(n, 500 + 5000 * n, b"") for n in range(len(pieces) * 8))
    size = len(encode_body(Tokens(0, tokens))[1]) - len(encode_body(Tokens(0, ()))[1])
    assert size < 0.65 * 8 * len(b"".join(pieces))


def test_half_a_surrogate_pair_is_not_sent() -> None:
    with pytest.raises(ProtocolError):
        encode_body(Prepare(TextRequest("m", "\ud800")))


def test_a_frame_with_nan_is_not_sent() -> None:
    with pytest.raises(ProtocolError):
        encode_body(Ready(0, None, math.nan, 0.0))


def test_fields_of_a_newer_release_are_ignored() -> None:
    assert decode_body(16, b'{"model":"m","colour":"red"}') == Query("m")

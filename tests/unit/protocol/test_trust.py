"""Join strings: round trips, damage, bounds."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.errors import ConfigError
from protocol.trust import JoinToken, decode_join, encode_join

TOKEN = JoinToken("192.168.1.5", 8791, "ab" * 32, bytes(range(32)), "one-time")

tokens = st.builds(
    JoinToken,
    host=st.from_regex(r"[A-Za-z0-9][A-Za-z0-9.:-]{0,80}", fullmatch=True),
    port=st.integers(1, 65535),
    ca_fingerprint=st.binary(min_size=32, max_size=32).map(bytes.hex),
    policy_key=st.binary(min_size=32, max_size=32),
    secret=st.text(min_size=1, max_size=40),
)


@settings(max_examples=100)
@given(tokens)
def test_a_join_string_comes_back(token: JoinToken) -> None:
    text = encode_join(token)
    assert decode_join(f"  {text}\n") == token
    assert text.startswith("mj1.")
    assert set(text) <= set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_.")


@settings(max_examples=200)
@given(st.data())
def test_any_typing_error_is_noticed(data: st.DataObject) -> None:
    text = encode_join(TOKEN)
    at = data.draw(st.integers(4, len(text) - 1))
    letter = data.draw(st.sampled_from("Aa0-_"))
    damaged = data.draw(st.sampled_from([text[:at], text[:at] + text[at + 1 :], text[:at] + letter + text[at + 1 :]]))
    if damaged != text:
        with pytest.raises(ConfigError):
            decode_join(damaged)


@settings(max_examples=100)
@given(st.text(max_size=100))
def test_any_text_is_judged(text: str) -> None:
    for candidate in (text, "mj1." + text):
        with pytest.raises(ConfigError):
            decode_join(candidate)


def test_a_string_of_another_version_or_length() -> None:
    for text in ("", "mj2." + encode_join(TOKEN)[4:], "mj1." + "A" * 2000):
        with pytest.raises(ConfigError) as caught:
            decode_join(text)
        assert caught.value.next_step


@pytest.mark.parametrize(
    "token",
    [
        JoinToken("", 1, "ab" * 32, bytes(32), "s"),
        JoinToken("a b", 1, "ab" * 32, bytes(32), "s"),
        JoinToken("h", 0, "ab" * 32, bytes(32), "s"),
        JoinToken("h", 65536, "ab" * 32, bytes(32), "s"),
        JoinToken("h", 1, "ab" * 31, bytes(32), "s"),
        JoinToken("h", 1, "xy" * 32, bytes(32), "s"),
        JoinToken("h", 1, "ab" * 32, bytes(31), "s"),
        JoinToken("h", 1, "ab" * 32, bytes(32), ""),
        JoinToken("h", 1, "ab" * 32, bytes(32), "s" * 256),
    ],
)
def test_tokens_without_a_form(token: JoinToken) -> None:
    with pytest.raises(ConfigError):
        encode_join(token)


def test_the_longest_secret() -> None:
    token = JoinToken("h", 1, "ab" * 32, bytes(32), "s" * 255)
    assert decode_join(encode_join(token)) == token


def test_a_fingerprint_may_have_colons() -> None:
    colons = ":".join(["AB"] * 32)
    assert decode_join(encode_join(JoinToken("h", 1, colons, bytes(32), "s"))).ca_fingerprint == "ab" * 32


def test_secrets_do_not_show_in_logs() -> None:
    assert "one-time" not in repr(TOKEN)

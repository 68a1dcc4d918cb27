"""Detectors of private values: what is found, what is left alone, and that no text makes them slow."""

from __future__ import annotations

import random
from collections.abc import Sequence
from datetime import date
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway import privacy_checks as checks
from gateway.detectors import Detectors, Span, look
from gateway.secrets_found import SAID, after_words, values
from gateway.secrets_found import said as said_near
from protocol.policy_privacy import PrivacyPolicy

DETECTORS = Detectors(PrivacyPolicy(names=("Alice Zhang", "张伟", "张伟民", "Ali")))


def found(text: str) -> list[tuple[str, str]]:
    return [(span.kind, text[span.start : span.end]) for span in DETECTORS.spans(text)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("mail a.b+c@mail.example.com, please", [("email", "a.b+c@mail.example.com")]),
        ("邮箱a.b@example.cn。", [("email", "a.b@example.cn")]),
        ("电话13812345678或+86 139 1234 5678", [("phone", "13812345678"), ("phone", "+86 139 1234 5678")]),
        ("call (415) 555-2671 or 1-415-555-2671", [("phone", "(415) 555-2671"), ("phone", "415-555-2671")]),
        ("+44 20 7946 0958 and 010-62345678", [("phone", "+44 20 7946 0958"), ("phone", "010-62345678")]),
        ("１３８１２３４５６７８", [("phone", "１３８１２３４５６７８")]),
        ("身份证11010519491231002X号", [("id_card", "11010519491231002X")]),
        ("id 110105 19491231 002x", [("id_card", "110105 19491231 002x")]),
        ("ssn 078-05-1120", [("id_card", "078-05-1120")]),
        ("card 4111 1111 1111 1111.", [("card", "4111 1111 1111 1111")]),
        ("378282246310005", [("card", "378282246310005")]),
        ("to DE89 3704 0044 0532 0130 00 IS", [("iban", "DE89 3704 0044 0532 0130 00")]),
        ("GB29NWBK60161331926819", [("iban", "GB29NWBK60161331926819")]),
        ("host 192.168.1.20, fe80::1ff:fe23:4567:890a", [("ip", "192.168.1.20"), ("ip", "fe80::1ff:fe23:4567:890a")]),
        ("key sk-proj-abcdEFGH1234567890abcd", [("secret", "sk-proj-abcdEFGH1234567890abcd")]),
        ("AKIAIOSFODNN7EXAMPLE", [("secret", "AKIAIOSFODNN7EXAMPLE")]),
        ("Authorization: Bearer abcdefghij0123456789", [("secret", "abcdefghij0123456789")]),
        ("postgres://u:pw9x@db/x", [("secret", "pw9x")]),
        ("password: hunter22x", [("secret", "hunter22x")]),
        ("密码是abc12345", [("secret", "abc12345")]),
        ("联系张伟民或 ALICE ZHANG", [("name", "张伟民"), ("name", "ALICE ZHANG")]),
    ],
)
def test_private_values_are_found(text: str, expected: list[tuple[str, str]]) -> None:
    assert found(text) == expected


@pytest.mark.parametrize(
    "value",
    [
        "sk-" + "a1" * 12, "sk_live_" + "a1" * 10, "rk_test_" + "a1" * 10, "ghp_" + "a1" * 12,
        "github_pat_" + "a1" * 12, "glpat-" + "a1" * 10, "xoxb-" + "12" * 8, "ASIA" + "AB12" * 4, "LTAI" + "a1" * 8,
        "AKID" + "a1" * 8, "AIza" + "a1b2c" * 7, "hf_" + "a1" * 12, "npm_" + "a1b2" * 9, "pypi-" + "a1" * 10,
        "eyJ" + "a1" * 8 + "." + "b2" * 6 + "." + "c3" * 6,
    ],
)  # fmt: skip
@pytest.mark.parametrize("around", ["{}", "is this {} or what", "Schlüssel {} 密"])
def test_every_makers_mark_is_found(value: str, around: str) -> None:
    assert found(around.format(value)) == [("secret", value)]


def test_a_private_key_is_found_whole() -> None:
    block = "-----BEGIN RSA PRIVATE KEY-----\nMIIabc\n-----END RSA PRIVATE KEY-----"
    assert found(f"see {block} ok") == [("secret", block)]


@pytest.mark.parametrize(
    "text",
    [
        "4111 1111 1111 1112",  # one digit off
        "110105194912310021",  # a wrong check character
        "110105194913310021",  # there is no month 13
        "DE89 3704 0044 0532 0130 02",
        "127.0.0.1 and 0.0.0.0 and ::1",
        "version 1.2.3.4.5, pi is 3.14159, at 12:30:45",
        "token = get_token() # the token budget",
        "Alignment of the realisation",  # Ali is a name, not here
        "in 2024 and 2025 we sold 12345 units",
        "user@localhost",
    ],
)
def test_what_only_looks_alike_is_left(text: str) -> None:
    assert found(text) == []


def test_kinds_that_policy_does_not_name_are_not_looked_for() -> None:
    only = Detectors(PrivacyPolicy(redact_kinds=("phone",), local_only_kinds=("card",)))
    kinds = {span.kind for span in only.spans("a@b.com 13812345678 4111111111111111 10.1.2.3")}
    assert kinds == {"phone", "card"}


def test_overlaps_become_one_span_so_that_no_part_stays() -> None:
    text = "password: a1@example.com"
    assert found(text) == [("email", "a1@example.com")]


@given(st.text(alphabet="0123456789", min_size=12, max_size=18))
def test_luhn_takes_one_check_digit_of_ten(digits: str) -> None:
    assert sum(checks.luhn(digits + last) for last in "0123456789") == 1


@given(st.integers(0, 9999), st.dates(min_value=date(1900, 1, 1), max_value=date(2100, 12, 31)), st.integers(0, 999))
def test_a_resident_number_has_one_check_character_of_eleven(region: int, born: date, serial: int) -> None:
    head = f"11{region:04d}{str(born).replace('-', '')}{serial:03d}"
    assert sum(checks.resident_id(head + last) for last in "0123456789X") == 1


@given(st.text(max_size=300))
def test_spans_lie_in_the_text_apart_and_in_order(text: str) -> None:
    place = 0
    for span in DETECTORS.spans(text + " a@b.com 13812345678"):
        assert place <= span.start < span.end
        place = span.end


def in_order(found: Sequence[Span], text: str) -> int:
    """Each within the text, behind the one before; returns how many."""
    assert all(before.end <= after.start for before, after in pairwise(found))
    assert all(0 <= one.start < one.end <= len(text) for one in found)
    return len(found)


@pytest.mark.parametrize(
    "piece",
    ["@", "a@", "1 ", "1111 ", "a", "+1", ":", "AB12 ", "password", "password is ", "key ", "-----BEGIN PRIVATE KEY ",
     "eyJ", "sk-", "a.", "1.1.1.", "张", "://a:", "token:", "Bearer ", "12345678901234567890 ", "1:2:3:4:5:6:7:",
     "(1) "],
)  # fmt: skip
@pytest.mark.timeout(30)
def test_no_text_makes_detection_slow(piece: str) -> None:
    """A pattern that backtracks over a text of this size would take minutes or for ever."""
    text = piece * ((128 << 10) // len(piece))
    in_order(DETECTORS.spans(text), text)


@pytest.mark.timeout(30)
def test_random_mixtures_are_not_slow_either() -> None:
    rng = random.Random(5)
    alphabet = "0123456789 ()-+.@:/=eyJskAKIA密码是token"
    text = "".join(rng.choice(alphabet) for _ in range(128 << 10))
    assert in_order(DETECTORS.spans(text), text) > 0


_BITS = (
    "key", "api", "API-", "access ", "secret", "Token", "password", "passwd", "passphrase", "pwd", "\u5bc6\u7801", " ",
    ": ", "=", " is ", "\u662f", "'", "x", "abc123", "hunter22x!", "\u0130", "a" * 210,
)  # fmt: skip


def test_words_for_secrets_are_found_in_any_case_and_script() -> None:
    value = "abc12345"
    for said in (f"API-KEY={value}", f"Secret_Key: {value}", f"口令：{value}", f"令牌是{value}", f"密钥为 {value}",
                 f"to\u212aen: {value}", f"İ passwd = {value}"):  # fmt: skip
        assert found(said) == [("secret", value)], said
    assert found("password: 'swordfish'") == [("secret", "swordfish")] and found("password: swordfish") == []


@settings(max_examples=400)
@given(st.lists(st.sampled_from(_BITS), max_size=14).map("".join))
def test_looking_around_words_finds_what_looking_everywhere_finds(text: str) -> None:
    assert [found.span() for found in after_words(text, text.encode("ascii", "replace"))] == [
        found.span() for found in SAID.finditer(text)
    ]


@settings(max_examples=400)
@given(
    st.lists(st.sampled_from((*_BITS, '"', "7", "south " * 40, "\u53e3\u4ee4", "v" * 199)), max_size=14).map("".join)
)
def test_values_near_digits_and_quotes_are_all_there_are(text: str) -> None:
    seen = look(text)
    assert list(said_near(text, seen.plain, seen.shape)) == list(values(text, SAID.finditer(text)))


@pytest.mark.parametrize("value", ["v" * 199 + "1", "1" + "v" * 199, "v" * 100 + "7" + "v" * 99])
def test_a_value_is_found_wherever_its_only_digit_stands(value: str) -> None:
    before = "south " * 50 + "secret key'   is    "
    text = before + value + " north" * 50
    assert [(span.start, span.end) for span in DETECTORS.spans(text)] == [(len(before), len(before) + len(value))]

"""Two questions that lie close together: which ask the same."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.likeness import difference, fingerprint


def apart(one: str, other: str) -> str:
    return difference(fingerprint(one), fingerprint(other))


@pytest.mark.parametrize(
    ("one", "other", "why"),
    [
        ("Convert 10 miles to km", "Convert 12 miles to km", "numbers"),
        ("Hello world", "1+1", "numbers"),
        ("the plan for three people", "the plan for four people", "numbers"),
        ("三个苹果多少钱", "五个苹果多少钱", "numbers"),
        ("Is it safe to eat raw eggs?", "Is it not safe to eat raw eggs?", "negation"),
        ("Why does it work?", "Why doesn't it work?", "negation"),
        ("这个药能和酒一起吃吗", "这个药不能和酒一起吃吗", "negation"),
        ("What is the weather in Paris tomorrow?", "What is the weather in London tomorrow?", "names"),
        ("what is the weather in paris today", "what is the weather in rome today", "edit"),
        ("What is the weather in Paris today?", "What is the weather in Paris tomorrow?", "closed set"),
        ("北京明天天气怎么样", "上海明天天气怎么样", "edit"),
        ("How do I enable dark mode?", "How do I disable dark mode?", "opposites"),
        ("Who is the CEO of Apple?", "Who is the CFO of Apple?", "names"),
        ("who founded it and how many work there", "when was it founded", "question"),
        ("convert 5 dollars to euros", "convert 5 euros to dollars", "order"),
        ("Is Python faster than Java?", "Is Java faster than Python?", "order"),
    ],
)
def test_small_edits_that_change_the_answer_are_told_apart(one: str, other: str, why: str) -> None:
    assert apart(one, other) == why
    assert apart(other, one) == why


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("How do I reset my password?", "What is the way to reset my password?"),
        ("Gradio lets you build web apps in Python.", "With Gradio, web apps in Python can be built."),
        ("Datasets are a platform to share datasets.", "Datasets provide a means to share datasets."),
        ("what's the capital city of France", "What is the capital of France?"),
        ("No, there is an alternative.", "There is an alternative."),
        ("怎么重置密码", "密码怎样重置才对呢"),
    ],
)
def test_paraphrases_are_not_told_apart(one: str, other: str) -> None:
    assert apart(one, other) == ""


@given(st.text(max_size=200))
def test_a_question_is_never_told_apart_from_itself(text: str) -> None:
    assert apart(text, text) == ""


@given(st.text(max_size=120), st.text(max_size=120))
def test_the_comparison_has_no_direction(one: str, other: str) -> None:
    assert bool(apart(one, other)) == bool(apart(other, one))

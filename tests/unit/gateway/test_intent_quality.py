"""What the classifier and the rules are worth on labelled prompts that nothing was fitted on."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from benchmarks.routing import Shelf, accuracy, coverage
from benchmarks.routing_load import requests
from benchmarks.routing_prompts import generated, halves, labelled
from cloud_stub.publishing import compile_policy
from gateway import complexity, intents
from gateway.context import LOCAL
from gateway.ports import Findings
from gateway.prompt_features import MAX_FEATURES, features, key_of, phrase_of
from gateway.routing import PolicyRouter

EXAMPLE = Path(__file__).parents[3] / "docs" / "routing.example.yaml"


def test_there_are_enough_labelled_prompts_in_both_languages() -> None:
    prompts = labelled()
    assert len(prompts) >= 300 and len({prompt.text for prompt in prompts}) == len(prompts)
    count = Counter((prompt.intent, prompt.chinese) for prompt in prompts)
    assert len(count) == 2 * len(intents.default_model().names) and min(count.values()) >= 10


def test_the_halves_and_the_templates_have_nothing_in_common() -> None:
    fit, test = halves(labelled())
    assert abs(len(fit) - len(test)) <= 1
    kept = {prompt.text for prompt in test}
    assert not kept & {prompt.text for prompt in fit}
    assert not {text.lower() for text in kept} & {prompt.text.strip().lower() for prompt in generated(30, 1)}


def test_the_classifier_is_right_on_the_test_half() -> None:
    _, test = halves(labelled())
    right, kept, right_of_kept = accuracy(test)
    assert right >= 0.85 and kept >= 0.8 and right_of_kept >= right
    assert min(accuracy([p for p in test if p.chinese is chinese])[0] for chinese in (True, False)) >= 0.8


def test_rules_decide_most_prompts_of_the_test_half() -> None:
    _, test = halves(labelled())
    assert coverage(test, compile_policy(EXAMPLE.read_bytes(), "yaml")) >= 0.70


def test_each_level_decides_some_prompts_of_the_benchmark() -> None:
    policy, router, shelf = compile_policy(EXAMPLE.read_bytes(), "yaml"), PolicyRouter(), Shelf()
    chats = requests(None, 1500)
    levels = Counter(router.route(chat, LOCAL, Findings(), shelf, policy, 0.5).level for chat in chats)
    assert set(levels) == {"rules", "heuristic", "dynamic"}


def test_no_prompt_has_more_features_than_a_lane_can_count() -> None:
    for text in (
        "(" * 5000,
        "中" * 5000,
        "abcdefgh " * 900,
        "{;" * 3000,
        "é" * 4000,
        "a(" * 900,
        "a中" * 900,
        "\ud800" * 9,
    ):
        assert len(list(features(text).keys())) <= MAX_FEATURES
        assert 0 < intents.default_model().classify(features(text)).probability <= 1


def test_words_signs_and_characters_are_told_apart() -> None:
    found = features("Don't use f(x) = 2x+10, use g")
    assert found.words == [b"don", b"t", b"use", b"f", b"x", b"0x", b"00", b"use", b"g"]
    assert found.signs == b"()=+" and found.tokens == 13 and not found.chinese
    keys = set(found.keys())
    assert {b"use", (b"use", b"g"), ord("("), key_of("( )")} <= keys and (b"g", b"use") not in keys
    mixed = features("用Python写一个排序，谢谢")
    assert mixed.words == [b"python"] and mixed.chinese and mixed.tokens == 9
    assert {key_of("排序"), key_of("谢谢"), key_of("用写")} <= set(mixed.keys())


def test_a_document_in_the_middle_is_not_read() -> None:
    for question, document in (("Summarize the text below, please.", "harvest "), ("请总结下面的文字。", "季")):
        asked = set(features(question).keys())
        assert asked <= set(features(question + document * 500).keys())
        assert asked <= set(features(document * 500 + question).keys())


def test_every_mark_has_a_key_of_its_own_that_a_sentence_with_it_has_too() -> None:
    for phrases in complexity.MARKS.values():
        for phrase in phrases.split("|"):
            key = key_of(phrase)
            assert key_of(phrase_of(key)) == key and key in set(features(f"So {phrase}, 这里{phrase}。").keys()), phrase

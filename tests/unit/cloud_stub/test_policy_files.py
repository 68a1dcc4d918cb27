"""Policy files as people write them: the routing file unchanged, what is refused, and what is remarked on."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent.cli.main import main
from cloud_stub.policy_files import form_of, remarks
from cloud_stub.publishing import compile_policy
from gateway.intents import default_model
from protocol.errors import BadRequest
from protocol.policy_routing import RouteFallback, RouteRule, RouteWhen

GIVEN = """\
route:
  rules:
    - when: { intent: [summarize, intent_classify, extract_entity], estimated_complexity: low }
      target: edge
    - when: { intent: [code_gen, multi_hop_reasoning, math] }
      target: cloud
  fallback: { enable: true, confidence_threshold: 0.6, upgrade_target: cloud }
"""

GUIDE = Path(__file__).parents[3] / "docs" / "routing.md"


def test_the_routing_file_is_taken_unchanged() -> None:
    routing = compile_policy(GIVEN.encode(), "yaml").routing
    assert routing.rules == (
        RouteRule("edge", RouteWhen(("summarize", "intent_classify", "extract_entity"), ("low",))),
        RouteRule("cloud", RouteWhen(("code_gen", "multi_hop_reasoning", "math"))),
    )
    assert routing.fallback == RouteFallback(True, 0.6, "cloud")
    assert GIVEN in GUIDE.read_text(encoding="utf-8")


def test_other_forms_say_the_same() -> None:
    toml = """
[[routing.rules]]
when = { intent = "summarize", estimated_complexity = "low" }
target = "edge"
[routing.fallback]
enable = true
"""
    as_json = b"""{"route": {"rules": [{"target": "edge", "when": {"intent": "summarize",
        "estimated_complexity": ["low"]}}], "fallback": {"enable": true}}}"""
    assert compile_policy(toml.encode(), "toml") == compile_policy(as_json, "json")
    assert [form_of(Path(name)) for name in ("a.yml", "a.YAML", "a.json", "a.toml", "a")] == [
        "yaml", "yaml", "json", "toml", "toml",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("old", "new", "field"),
    [
        ("enable: true", "enable: false", "routing.fallback"),
        ("upgrade_target: cloud", "upgrade_target: edge", "routing.fallback"),
        ("  fallback: { enable: true, confidence_threshold: 0.6, upgrade_target: cloud }\n", "", "routing.fallback"),
        ("route:", "privacy: { local_only: true }\nroute:", "routing.fallback"),
        ("upgrade_target: cloud", "upgrade_target: elsewhere", "routing.fallback"),
        ("target: edge", "target: nowhere", "routing.rules[0].target"),
        ("target: edge", "target: edge\n      strict: true", "routing.rules[0].strict"),
        ("estimated_complexity: low", "estimated_complexity: tiny", "routing.rules[0].when.estimated_complexity[0]"),
        ("intent: [code_gen", "intend: [code_gen", "routing.rules[1].when.intend"),
        ("0.6", "1.6", "routing.fallback.confidence_threshold"),
        ("route:", "routing: {}\nroute:", "route"),
        ("  fallback:", "  intent: { threshold: 0.5 }\n  fallback:", "routing.intent.threshold"),
        ("  fallback:", "  low_below: 0.9\n  fallback:", "routing.low_below"),
        ("  fallback:", "  dynamic: { budget_lifts: [] }\n  fallback:", "routing.dynamic.budget_lifts"),
    ],
)
def test_what_makes_no_sense_is_refused_by_field(old: str, new: str, field: str) -> None:
    assert old in GIVEN
    with pytest.raises(BadRequest) as refused:
        compile_policy(GIVEN.replace(old, new, 1).encode(), "yaml")
    assert refused.value.field == field


@pytest.mark.parametrize(
    "text",
    [
        "route: &a { rules: [] }\nlimits: *a",
        "route: {}\nroute: {}",
        "route: !!python/object/apply:os.getcwd []",
        "route: [",
        "[" * 5000,
        "{a: {[1, 2]: 3}}",
        "- 1",
    ],
)
def test_yaml_is_plain_data(text: str) -> None:
    with pytest.raises(BadRequest):
        compile_policy(text.encode(), "yaml")


def test_policy_check_answers_at_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "route.yaml"
    file.write_text(GIVEN)
    assert main(["policy", "check", str(file)]) == 0
    assert "2 routing rules, fallback to cloud under 0.6" in capsys.readouterr().out
    file.write_text(GIVEN.replace("enable: true", "enable: false"))
    assert main(["policy", "check", str(file)]) == 1
    assert "without an armed fallback" in capsys.readouterr().err


def test_what_will_not_do_what_it_seems_to_is_remarked_on() -> None:
    """R1: a threshold of another encoder is told, not used in silence."""
    assert remarks(compile_policy(GIVEN.encode(), "yaml")) == []
    odd = GIVEN.replace("summarize", "sumarize") + "  intent: { threshold: 0.5, encoder: words-of-last-year }\n"
    found = remarks(compile_policy(odd.encode(), "yaml"))
    assert "'sumarize'" in found[0] and "words-of-last-year" in found[1]
    same = GIVEN + f"  intent: {{ threshold: 0.5, encoder: {default_model().id} }}\n"
    assert remarks(compile_policy(same.encode(), "yaml")) == []

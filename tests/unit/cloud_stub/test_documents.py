"""What the documents of this room say is what the code does."""

from __future__ import annotations

import re

import attrs
import pytest

from cloud_stub.config import CoordinatorConfig
from cloud_stub.publishing import compile_policy
from protocol.acceptance import AcceptCode, RefusalCode
from protocol.policy import Policy
from tests.conftest import ROOT

POLICY = (ROOT / "docs" / "policy.md").read_text(encoding="utf-8")
COORDINATOR = (ROOT / "docs" / "coordinator.md").read_text(encoding="utf-8")


def example() -> str:
    found = re.search(r"```toml\n(.*?)```", POLICY, re.DOTALL)
    assert found is not None
    return found[1]


def test_the_example_is_a_policy_and_shows_the_defaults() -> None:
    policy = compile_policy(example().encode(), "toml")
    shown = attrs.evolve(policy, selector={}, split=attrs.evolve(policy.split, deadline_s=None))
    assert shown == Policy()


def test_the_example_names_every_field() -> None:
    text = example()
    for section in attrs.fields(attrs.resolve_types(Policy)):
        if section.name in ("schema", "fleet", "epoch", "version"):
            continue
        assert section.name in text
        if section.type is not None and attrs.has(section.type):
            for field in attrs.fields(section.type):
                assert field.name in text, f"{section.name}.{field.name}"


@pytest.mark.parametrize("code", [*RefusalCode.__args__, *AcceptCode.__args__])  # type: ignore[attr-defined]
def test_every_reason_code_is_listed(code: str) -> None:
    assert f"`{code}`" in POLICY


@pytest.mark.parametrize("field", [a.name for a in attrs.fields(CoordinatorConfig) if a.name != "source"])
def test_every_setting_is_listed(field: str) -> None:
    assert f"`{field}`" in COORDINATOR

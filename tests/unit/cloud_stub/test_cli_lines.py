"""What `midstream policy` prints for people."""

from __future__ import annotations

import pytest

from cloud_stub.cli import sent_line


@pytest.mark.parametrize(
    ("devices", "selector", "line"),
    [
        (["pi"], {}, "version 2 sent to 1 device"),
        (["pi", "pj"], {"room": "kitchen"}, "version 2 sent to 2 devices"),
        (
            [],
            {"room": "kitchen"},
            "version 2 sent to 0 devices: none has the labels room=kitchen ([labels] in agent.toml)",
        ),
        ([], {}, "version 2 sent to 0 devices: none is registered yet; each gets it when it registers"),
    ],
)
def test_a_publish_that_reaches_nobody_says_why(devices: list[str], selector: dict[str, str], line: str) -> None:
    assert sent_line({"version": 2, "devices": devices, "policy": {"selector": selector}}) == line

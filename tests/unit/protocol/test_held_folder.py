"""Two processes never share one state folder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from protocol.errors import ConfigError
from protocol.held_folder import hold_folder

HOLDER = """
import sys
from pathlib import Path
from protocol.held_folder import hold_folder
with hold_folder(Path(sys.argv[1]), "agent"):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_folder_is_held_by_one_process_and_free_after_its_kill(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=Path.cwd()
    ) as other:
        assert other.stdout is not None and other.stdout.readline() == b"held\n"
        with pytest.raises(ConfigError, match="another agent is running") as raised, hold_folder(folder, "agent"):
            pass
        assert "state_dir" in raised.value.next_step
        other.kill()
    with hold_folder(folder, "agent"):
        pass
    with hold_folder(folder, "agent"):
        pass


def test_a_folder_that_cannot_be_made_is_a_configuration_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError, match="cannot use"), hold_folder(tmp_path / "file" / "state", "agent"):
        pass

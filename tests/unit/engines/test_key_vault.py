"""Sealed keys: nothing readable on disk, rotation while running, and files that do not fit."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.key_vault import KEY_FILE, SEALED_FILE, KeyVault
from protocol.errors import BadRequest, ConfigError, NotFound

SECRET = "sk-very-secret-123456"


def test_no_key_can_be_read_in_any_file_and_all_are_private(tmp_path: Path) -> None:
    vault = KeyVault(tmp_path)
    vault.add("openai", SECRET)
    vault.add("openai", SECRET + "2")
    for file in tmp_path.iterdir():
        assert SECRET.encode() not in file.read_bytes(), file
        assert file.stat().st_mode & 0o077 == 0, file
    assert SECRET not in repr(vault.listed())
    assert KeyVault(tmp_path).keys("openai") == (SECRET, SECRET + "2")


def test_a_tenant_with_keys_of_its_own_never_uses_the_houses(tmp_path: Path) -> None:
    vault = KeyVault(tmp_path)
    vault.add("openai", "house")
    vault.add("openai", "theirs", tenant="acme")
    assert vault.keys("openai", "acme") == ("theirs",)
    assert vault.keys("openai", "other") == ("house",)
    assert vault.keys("anthropic", "acme") == ()


def test_keys_change_while_a_house_runs(tmp_path: Path) -> None:
    now_s = 0.0
    running, desk = KeyVault(tmp_path, lambda: now_s), KeyVault(tmp_path)
    assert running.keys("openai") == ()
    first = desk.add("openai", "one")
    assert running.keys("openai") == (), "not looked at again yet"
    now_s = 1.0
    assert running.keys("openai") == ("one",)
    desk.add("openai", "two")
    desk.remove("openai", first)
    now_s = 2.0
    assert running.keys("openai") == ("two",)
    with pytest.raises(NotFound):
        desk.remove("openai", first)


def test_a_removed_key_is_in_no_copy(tmp_path: Path) -> None:
    vault = KeyVault(tmp_path)
    gone = vault.add("openai", "one")
    vault.add("openai", "two")
    vault.remove("openai", gone)
    (tmp_path / SEALED_FILE).unlink()
    (tmp_path / (SEALED_FILE + ".prev")).rename(tmp_path / SEALED_FILE)
    assert KeyVault(tmp_path).keys("openai") == ("two",)


def test_files_that_do_not_fit_are_a_clear_error(tmp_path: Path) -> None:
    KeyVault(tmp_path).add("openai", "one")
    (tmp_path / KEY_FILE).write_bytes(bytes(32))
    with pytest.raises(ConfigError, match="cannot be opened"):
        KeyVault(tmp_path).keys("openai")
    (tmp_path / KEY_FILE).unlink()
    with pytest.raises(ConfigError, match="missing"):
        KeyVault(tmp_path).keys("openai")
    (tmp_path / KEY_FILE).write_bytes(b"short")
    (tmp_path / KEY_FILE).chmod(0o644)
    with pytest.raises(ConfigError, match="read by others"):
        KeyVault(tmp_path).keys("openai")


@pytest.mark.parametrize("key", ["", "two words", "umläut", "x" * 5000, "line\n"])
def test_what_is_no_key(tmp_path: Path, key: str) -> None:
    with pytest.raises(BadRequest):
        KeyVault(tmp_path).add("openai", key)


@settings(max_examples=30)
@given(st.data())
def test_one_changed_byte_is_always_noticed(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("vault")
    KeyVault(folder).add("openai", "one")
    file = folder / SEALED_FILE
    sealed = bytearray(file.read_bytes())
    at = data.draw(st.integers(0, len(sealed) - 1))
    sealed[at] ^= data.draw(st.integers(1, 255))
    file.write_bytes(sealed)
    with pytest.raises(ConfigError):
        KeyVault(folder).keys("openai")

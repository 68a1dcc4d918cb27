"""The shipped catalogue and the user's file over it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path

import pytest

from engines.catalogue import check_filename, load_catalogue, parse_catalogue, shipped_catalogue
from engines.digest import file_sha256
from protocol.errors import ConfigError

GOOD = """
[models.mine]
format = "onnx"
filename = "m.onnx"
sha256 = "{sha}"
size_bytes = 10
[models.mine.source]
kind = "url"
url = "https://example.org/m.onnx"
"""
SHA = "0" * 64


def good(**changes: str) -> str:
    text = GOOD.format(sha=SHA)
    for old, new in changes.items():
        text = text.replace(old, new)
    return text


def test_the_shipped_entries_are_complete() -> None:
    found = shipped_catalogue()
    assert {"ppocr-v4-det", "ppocr-v4-rec", "ppocr-v2-cls", "smollm2-135m", "gemma3-270m", "minilm-int8"} <= set(found)
    assert {"face-short-range", "sample-page", "sample-text"} <= set(found)
    assert found["ppocr-v4-det"].recipe == "ppocr-det"
    assert found["ppocr-v2-cls"].recipe == "ppocr-cls"
    assert found["ppocr-v4-det"].input_shapes == {"x": (1, 3, 480, 480)}
    assert len(found["gemma3-270m"].source.parts) == 4
    assert all(entry.licence and entry.description for entry in found.values())


@pytest.mark.parametrize("name", sorted(shipped_catalogue()))
def test_shipped_digests_are_those_of_the_files(name: str, model_file: Callable[[str], Path]) -> None:
    entry = shipped_catalogue()[name]
    file = model_file(name)
    assert file.name == entry.filename
    assert file.stat().st_size == entry.size_bytes
    if entry.size_bytes < 30_000_000:
        assert file_sha256(file) == entry.sha256


def test_the_gemma_template_writes_its_turns() -> None:
    jinja2 = importlib.import_module("jinja2")
    template = shipped_catalogue()["gemma3-270m"].chat_template
    assert template is not None
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": " Hello "},
        {"role": "assistant", "content": "Hi."},
        {"role": "user", "content": "Why?"},
    ]
    text = jinja2.Template(template).render(messages=messages, bos_token="<bos>", add_generation_prompt=True)
    assert text == (
        "<bos><start_of_turn>user\nBe brief.\n\nHello<end_of_turn>\n<start_of_turn>model\nHi.<end_of_turn>\n"
        "<start_of_turn>user\nWhy?<end_of_turn>\n<start_of_turn>model\n"
    )


def test_the_users_file_adds_and_replaces(tmp_path: Path) -> None:
    file = tmp_path / "catalogue.toml"
    assert load_catalogue(file) == shipped_catalogue()
    file.write_text(good() + good().replace("models.mine", "models.smollm2-135m"))
    found = load_catalogue(file)
    assert found["mine"].filename == "m.onnx"
    assert found["smollm2-135m"].size_bytes == 10
    assert "ppocr-v4-det" in found


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("models = [", "not TOML"),
        ("[model.x]\n", "'model'"),
        ("models = 3\n", "models"),
        ("[models]\nx = 1\n", "not a table"),
        (good(filename="fillename"), "filename"),
        (good(onnx="pickle"), "pickle"),
        (good(**{"= 10": '= "ten"'}), "size_bytes"),
        (good(**{"= 10": "= 0"}), "size_bytes"),
        (good(**{SHA: "xyz"}), "sha256"),
        (good(**{"m.onnx\"\nsha": "../m.onnx\"\nsha"}), "file name"),
        (good(**{"m.onnx\"\nsha": ".hidden\"\nsha"}), "file name"),
        (good(**{"models.mine": 'models."a/b"'}), "cannot be a name"),
        (good(**{'kind = "url"': 'kind = "hub"'}), "hub"),
        (good(**{"size_bytes = 10": "size_bytes = 10\nrecpie = \"x\""}), "recpie"),
    ],
)  # fmt: skip
def test_errors_name_the_file_and_the_field(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as err:
        parse_catalogue(text, "mine.toml")
    assert said in str(err.value)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a\\b", ".x", "entry.json", "x" * 129, "a b"])
def test_file_names_stay_in_their_folder(name: str) -> None:
    with pytest.raises(ConfigError):
        check_filename(name)

"""The command line: cheap help, one clear line per error, exit codes, output that scripts can read."""

from __future__ import annotations

import io
import json
import os
import signal
import struct
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from agent.cli.answers import ChatStream, labels_of, painted
from agent.cli.main import GROUPS, VERBS, describe, main, usage
from agent.cli.progress import ProgressBar
from agent.cli.run import status_lines
from agent.doctor import (
    EXIT_BROKEN,
    EXIT_COULD_BE_BETTER,
    EXIT_OK,
    Finding,
    check_clock,
    check_packages,
    exit_code,
    run,
)
from protocol.clock import FakeClock, WallTime
from protocol.errors import ConfigError, LinkError
from protocol.oip import InferResponse
from protocol.tensors import Tensor

ROOT = Path(__file__).resolve().parents[3]
MAIN = [sys.executable, "-m", "agent.cli.main"]


def call(*arguments: str, home: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the command line with an empty home."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("MIDSTREAM_")}
    clean |= {"HOME": str(home), "XDG_CONFIG_HOME": str(home / ".config"), **env}
    return subprocess.run([*MAIN, *arguments], capture_output=True, text=True, cwd=ROOT, env=clean, check=False)


def test_help_imports_neither_aiohttp_nor_numpy() -> None:
    script = (
        "import sys; from agent.cli.main import main; code = main(['--help'])\n"
        "print(code, [m for m in ('aiohttp', 'numpy', 'attrs', 'asyncio') if m in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stderr.strip() == "0 []"
    assert all(verb in done.stdout for verb in VERBS)


def test_every_verb_of_the_table_exists() -> None:
    import importlib

    for target, _ in VERBS.values():
        module, _, name = target.partition(":")
        assert callable(getattr(importlib.import_module(module), name))


def test_unknown_verbs_and_no_verb_are_wrong_use(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sing"]) == 2
    assert "unknown verb 'sing'" in capsys.readouterr().err
    assert main([]) == 2
    assert capsys.readouterr().out.strip() == usage()
    assert main(["--version"]) == 0


def test_an_error_is_one_line_with_the_next_step(tmp_path: Path) -> None:
    done = call("agent", "--port", "http", home=tmp_path)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "flag --port" in done.stderr
    assert describe(ConfigError("a\nb", next_step="do c")) == "a b - do c"


def test_without_an_agent_clients_say_how_to_start_one(tmp_path: Path) -> None:
    done = call("status", "--url", "http://127.0.0.1:9", home=tmp_path)
    assert done.returncode == 1
    assert "`midstream agent`" in done.stderr
    assert "Traceback" not in done.stderr


def test_ctrl_c_in_a_client_is_130_without_a_traceback(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [*MAIN, "chat", "-", "--model", "m", "--url", "http://127.0.0.1:9"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a job in the background is born deaf to it
    )  # fmt: skip
    time.sleep(1.0)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 130
    assert "Traceback" not in err


@pytest.mark.parametrize("given", [b"", b" \n", b"\xff\xfeq"])
def test_a_prompt_that_is_empty_or_no_text_is_named(tmp_path: Path, given: bytes) -> None:
    done = subprocess.run(
        [*MAIN, "chat", "-", "--model", "m", "--url", "http://127.0.0.1:9"],
        input=given, capture_output=True, cwd=ROOT, env=os.environ | {"HOME": str(tmp_path)}, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert (b"not text in UTF-8" if b"q" in given else b"nothing to ask") in done.stderr
    assert done.stderr.count(b"\n") == 1


@pytest.mark.parametrize("template", ["absent", "folder", "binary"])
def test_a_chat_template_that_cannot_be_read_is_one_line(tmp_path: Path, template: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "binary").write_bytes(b"\xff\xd0")
    done = call(
        "models", "add", "m.gguf", "--models-dir", str(tmp_path / "m"), "--chat-template", str(tmp_path / template),
        home=tmp_path,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and template in done.stderr


def test_a_recipe_that_nobody_has_is_refused_before_the_file_is_read(tmp_path: Path) -> None:
    done = call("models", "add", "m.onnx", "--recipe", "nonsense", "--models-dir", str(tmp_path / "m"), home=tmp_path)
    assert done.returncode == 2
    assert "nonsense" in done.stderr and "ppocr-det" in done.stderr


def test_an_image_without_an_end_is_refused(tmp_path: Path) -> None:
    done = call("infer", "m", "/dev/zero", "--url", "http://127.0.0.1:9", home=tmp_path)
    assert done.returncode == 2
    assert "larger than 16 MiB" in done.stderr


def answered_by(body: bytes, *arguments: str, home: Path) -> subprocess.CompletedProcess[str]:
    """Run one verb against a server on the agent's port that answers every request with `body`."""

    class Stranger(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            return None

    with HTTPServer(("127.0.0.1", 0), Stranger) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        done = call(*arguments, "--url", f"http://127.0.0.1:{server.server_port}", home=home)
        thread.join()
    return done


def test_a_stranger_on_the_agents_port_is_named(tmp_path: Path) -> None:
    done = answered_by(b"<html>", "status", home=tmp_path)
    assert done.returncode == 1
    assert "check what listens there" in done.stderr and "Traceback" not in done.stderr


def test_chat_says_why_the_text_model_is_not_served(tmp_path: Path) -> None:
    warning = {"name": "text_model", "text": "m: it does not begin with GGUF", "next_step": ""}
    done = answered_by(json.dumps({"text_model": None, "warnings": [warning]}).encode(), "chat", "hi", home=tmp_path)
    assert done.returncode == 2
    assert "does not begin with GGUF - midstream models verify" in done.stderr


def test_chat_without_a_text_model_names_the_setting(tmp_path: Path) -> None:
    done = answered_by(json.dumps({"text_model": None, "warnings": []}).encode(), "chat", "hi", home=tmp_path)
    assert done.returncode == 2
    assert "the agent serves no text model - start it with --text-model NAME" in done.stderr


@pytest.mark.parametrize(("place", "shown"), [("device", "words"), ("cloud", "words (cloud only)")])
def test_status_says_where_the_text_model_is(place: str, shown: str) -> None:
    assert f"text         {shown}" in status_lines({"text_model": "words", "text_place": place})


def test_models_alone_lists_them(tmp_path: Path) -> None:
    store = ["--models-dir", str(tmp_path / "m")]
    listed = call("models", "list", *store, home=tmp_path)
    alone = call("models", home=tmp_path, MIDSTREAM_MODELS=str(tmp_path / "m"))
    assert (alone.returncode, alone.stdout) == (0, listed.stdout)
    assert "smollm2-135m" in alone.stdout


def test_an_agent_process_says_ready_and_drains_on_sigterm(tmp_path: Path) -> None:
    events = tmp_path / "events.jsonl"
    process = subprocess.Popen(
        [
            *MAIN, "agent", "--json", "--port", "0", "--mdns", "off", "--benchmark", "off", "--events", str(events),
            "--state-dir", str(tmp_path / "state"), "--models-dir", str(tmp_path / "models"),
        ],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    ready = json.loads(process.stdout.readline())
    assert ready["event"] == "ready"
    done = call("status", "--json", "--url", ready["url"], home=tmp_path)
    assert json.loads(done.stdout)["life"]["serving"] == "ready"
    process.terminate()
    process.communicate(timeout=20)
    assert process.returncode == 0
    assert events.exists()


@pytest.mark.parametrize("name", ["smollm2-135n", "ppocr-v4-det"])
def test_a_text_model_that_nobody_knows_is_wrong_use_with_the_names_that_are(tmp_path: Path, name: str) -> None:
    arguments = ["--state-dir", str(tmp_path / "s"), "--models-dir", str(tmp_path / "m"), "--port", "0"]
    done = call("agent", *arguments, "--text-model", name, home=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"there is no text model '{name}'" in done.stderr and "gemma3-270m" in done.stderr
    assert ("did you mean smollm2-135m?" in done.stderr) == name.startswith("smollm2")


@pytest.mark.parametrize("verb", sorted(GROUPS))
def test_a_verb_that_needs_another_one_shows_which_there_are(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([verb]) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.startswith(f"usage: midstream {verb}")
    with pytest.raises(SystemExit) as asked:
        main([verb, "--help"])
    assert asked.value.code == 0 and capsys.readouterr().out == shown.err


def test_doctor_names_missing_models_and_ends_with_its_code(tmp_path: Path) -> None:
    arguments = ["doctor", "--json", "--state-dir", str(tmp_path / "s"), "--models-dir", str(tmp_path / "m")]
    done = call(*arguments, "--text-model", "nope", "--port", "0", home=tmp_path)
    found = {f["check"]: f for f in json.loads(done.stdout) if f["level"] != "ok"}
    assert done.returncode == EXIT_BROKEN
    assert found["models"]["next"].startswith("known: ") and "models add" in found["models"]["next"]
    assert "midstream join" in found["coordinator"]["next"]


def test_foreign_owners_of_our_folders_are_an_error() -> None:
    owners = {"agent": ["midstream", "google-adk"], "links": ["midstream"]}
    (finding,) = check_packages(owners)
    assert finding.level == "error"
    assert "google-adk" in finding.text
    assert [f.level for f in check_packages({"agent": ["midstream"]})] == ["ok"]


def test_doctor_checks_and_codes() -> None:
    assert [f.level for f in check_clock(lambda: WallTime(0, False))] == ["error"]

    def broken() -> list[Finding]:
        raise OSError("no /proc here")

    assert run([("x", broken)])[0].level == "error"
    ok, warning, error = (Finding("c", level, "") for level in ("ok", "warning", "error"))  # type: ignore[arg-type]
    assert exit_code([ok]) == EXIT_OK
    assert exit_code([ok, warning]) == EXIT_COULD_BE_BETTER
    assert exit_code([warning, error]) == EXIT_BROKEN


def chunk(text: str, side: str | None = None, tokens: int = 1, **extra: object) -> str:
    midstream = {"midstream": {"side": side, "index": 0, "tokens": tokens}} if side else {}
    return json.dumps({"choices": [{"delta": {"content": text}, "finish_reason": None}], **midstream, **extra})


def test_chat_output_shows_where_the_seam_moved() -> None:
    stream = ChatStream()
    sent = (chunk("a", "device"), chunk("bcd", "device", 3), chunk("", "device"), chunk("e", "cloud"), chunk(""))
    pieces = [piece for data in sent for piece in stream.take(data)]
    assert pieces == [("device", "a"), ("device", "bcd"), ("cloud", "e")]
    list(stream.take(json.dumps({"choices": [], "usage": {"completion_tokens": 6}})))
    assert list(stream.take("[DONE]")) == []
    assert stream.footer() == "[5 on the device, at 5 to the cloud: 1; 6 tokens; unfinished]"
    assert stream.summary("m")["sides"] == [["device", 5], ["cloud", 1]]
    assert painted("cloud", "x") != painted("device", "x")


def test_a_server_that_is_no_agent_counts_chunks_under_its_own_name() -> None:
    stream = ChatStream()
    assert [*stream.take(chunk("a")), *stream.take(chunk("b"))] == [("server", "a"), ("server", "b")]
    assert stream.footer() == "[2 on the server; unfinished]"


@pytest.mark.parametrize("data", ["{", '{"error": {"message": "lost"}}', '{"error": "lost"}'])
def test_a_broken_stream_is_a_link_error(data: str) -> None:
    with pytest.raises(LinkError):
        list(ChatStream().take(data))


def test_boxes_and_labels_are_read_from_binary_outputs() -> None:
    boxes = Tensor("boxes", "FP32", (1, 4, 2), struct.pack("<8f", *range(8)))
    scores = Tensor("scores", "FP32", (1,), struct.pack("<f", 0.5))
    found = labels_of(InferResponse("det", (boxes, scores)))
    assert found["boxes"] == [[[0, 1], [2, 3], [4, 5], [6, 7]]]
    label = Tensor("label", "INT64", (1,), struct.pack("<q", 1))
    assert labels_of(InferResponse("cls", (label,)))["labels"] == [1]
    assert labels_of(InferResponse("x", (Tensor("y", "FP16", (1,), b"\0\0"),)))["outputs"] == ["y FP16[1]"]


def test_progress_is_silent_for_two_seconds_and_plain_without_a_terminal() -> None:
    clock, out = FakeClock(), io.StringIO()
    with ProgressBar("pull m", out=out, clock=clock) as bar:
        bar.update(1, 10)
        assert out.getvalue() == ""
        clock.advance(2.5)
        bar.update(5_000_000, 10_000_000)
        bar.update(6_000_000, 10_000_000)
    assert out.getvalue().count("\n") == 1
    assert "50 %" in out.getvalue()
    assert "\r" not in out.getvalue()


def test_status_shows_both_ways_to_the_coordinator() -> None:
    ways = {
        "cloud": {"state": "down", "bytes_per_s": 160_000_000, "rtt_ms": 22.0, "samples": 4},
        "webrtc": {"state": "up", "path": "host-relay", "bytes_per_s": 2_500_000, "rtt_ms": 12.4, "samples": 9},
    }
    shown = [line for line in status_lines({"links": ways}) if line.startswith("link")]
    assert shown == ["link         cloud: down", "link         webrtc: up (host-relay), 20.0 Mbit/s up, 12 ms"]

"""An agent that serves nothing yet has loaded only what it serves with: memory that every device pays for."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]

ABSENT = (
    # engines and their arithmetic
    "numpy", "onnx", "onnxruntime", "onnxruntime_genai", "ai_edge_litert", "xllamacpp", "llama_cpp", "PIL",
    "tokenizers",
    # what a setting or a request asks for first
    "usearch", "opentelemetry", "jinja2", "yaml", "redis", "uvloop", "aiortc", "amqtt", "cryptography",
    # what a library of ours looks for and nothing here uses
    "dns",
    # of this house, for those who ask
    "agent.doctor_board", "cloud_stub", "engines.worker", "gateway.report", "split_models.replay",
)  # fmt: skip

MODULES = """
import sys
from agent.cli.main import main
code = main(sys.argv[1:])
print("modules", *sorted(sys.modules), file=sys.stderr)
sys.exit(code)
"""


def test_an_idle_agent_loads_only_what_it_serves_with(tmp_path: Path) -> None:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MIDSTREAM_")}
    options = ["agent", "--json", "--state-dir", str(tmp_path / "state"), "--models-dir", str(tmp_path / "models")]
    with subprocess.Popen(
        [sys.executable, "-c", MODULES, *options, "--port", "0", "--mdns-interfaces", "127.0.0.1"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, env={**clean, "HOME": str(tmp_path)},
    ) as process:  # fmt: skip
        assert process.stdout is not None
        events = (json.loads(line)["event"] for line in process.stdout)
        assert "ready" in events
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=30)
    loaded = next(line.split()[1:] for line in said.splitlines() if line.startswith("modules "))
    assert "agent.house" in loaded
    assert [name for name in ABSENT if name in loaded] == []


def test_the_control_channel_comes_without_what_its_library_looks_for() -> None:
    script = "import links.mqtt, sys; print([name for name in sys.modules if name.split('.')[0] == 'dns'])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "[]"

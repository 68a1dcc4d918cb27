#!/usr/bin/env bash
# Write the lock files of the test set-up anew from pyproject.toml (needs the .venv of `make setup`).
set -euo pipefail
cd "$(dirname "$0")/.."
compile() {
  .venv/bin/pip-compile -q --upgrade --no-emit-index-url --no-emit-find-links --no-header --no-annotate --strip-extras "$@" pyproject.toml
}
compile --extra dev -o requirements/test.lock
compile --extra llama-native -o requirements/llama-native.lock
sed -i '/^midstream @/d; /^# The following/d; /^$/d' requirements/test.lock requirements/llama-native.lock

#!/usr/bin/env bash
# Set up everything that `make demo` or `make test` needs, on a fresh Debian or Ubuntu with Python 3.11+, root or not.
# Nothing outside this folder and the user's cache is changed: packages that Python cannot bring are unpacked in .setup/.
# Usage: .ci/setup.sh demo|test|lint, or .ci/setup.sh venv FOLDER for an empty virtual environment
set -euo pipefail
cd "$(dirname "$0")/.."
lane=${1:-test}
say() { printf '== %s\n' "$*"; }

find_python() {
  for name in ${PYTHON:-} python3.11 python3 python3.12 python3.13 python3.14; do
    if command -v "$name" >/dev/null && "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      command -v "$name"; return
    fi
  done
  echo "Python 3.11 or later is needed: install it (for example the package python3) or set PYTHON=/path/to/python3" >&2
  exit 2
}

# A private apt state, so that lists can be fetched and packages unpacked without root.
apt_private() {
  local state=$PWD/.setup/apt
  mkdir -p "$state/lists/partial" "$state/cache/archives/partial"
  (cd .setup/debs && apt-get -q -o Dir::State::lists="$state/lists" -o Dir::Cache="$state/cache" \
    -o Debug::NoLocking=1 -o APT::Sandbox::User="$(id -un)" "$@")
}

unpack_packages() {  # unpack_packages NAME...: into .setup/root, with the libraries that the system lacks
  local names deb
  mkdir -p .setup/debs .setup/root
  if [ -z "${lists_fresh:-}" ]; then apt_private update >.setup/apt.log 2>&1 || return 1; fi
  lists_fresh=1
  names=$(apt_private -s --no-install-recommends install "$@" 2>>.setup/apt.log | awk '/^Inst/ {print $2}')
  [ -n "$names" ] || names=$*
  # shellcheck disable=SC2086
  apt_private download $names >>.setup/apt.log 2>&1 || return 1
  for deb in .setup/debs/*.deb; do dpkg -x "$deb" .setup/root; done
}

unpacked_command() {  # unpacked_command usr/bin/NAME: .setup/bin/NAME runs it with the unpacked libraries
  local command=.setup/bin/${1##*/}
  mkdir -p .setup/bin
  cat >"$command" <<WRAP
#!/bin/sh
root=\$(CDPATH= cd -- "\$(dirname -- "\$0")/../root" && pwd)
libs=\$(find "\$root/usr/lib" "\$root/lib" -name '*.so*' -exec dirname {} + 2>/dev/null | sort -u | tr '\n' ':')
LD_LIBRARY_PATH="\$libs\${LD_LIBRARY_PATH:-}" exec "\$root/$1" "\$@"
WRAP
  chmod +x "$command"
}

make_venv() {  # make_venv PYTHON FOLDER
  local python=$1 folder=$2 pip_wheel
  if "$python" -c 'import ensurepip' 2>/dev/null; then
    "$python" -m venv "$folder"
    return
  fi
  say "this Python has no ensurepip; unpacking the distribution's pip wheel"
  if ! command -v apt-get >/dev/null || ! unpack_packages python3-pip-whl; then
    echo "no pip can be had: install the package python3-venv (see .setup/apt.log), or set PYTHON to another Python" >&2
    exit 2
  fi
  "$python" -m venv --without-pip "$folder"
  pip_wheel=$(ls .setup/root/usr/share/python-wheels/pip-*.whl | head -1)
  "$folder/bin/python" "$pip_wheel/pip" install -q --no-index "$pip_wheel"
}

install() {  # pip install in .venv: with bars for people, without a word for logs
  local quiet=-q
  [ -t 1 ] && quiet=--progress-bar=on
  .venv/bin/python -m pip install --disable-pip-version-check "$quiet" "$@"
}

set_up_python() {
  local python stamp
  python=$(find_python)
  stamp=$("$python" -c 'import sys; print(sys.version)' | cat - pyproject.toml requirements/test.lock | sha256sum | cut -c1-16)
  if [ -f ".venv/.stamp-$stamp" ] && .venv/bin/python -c 'import attrs' 2>/dev/null; then return; fi
  say "Python packages into .venv with $python (about a minute)"
  rm -rf .venv
  make_venv "$python" .venv
  install --upgrade 'pip>=25.1'
  if "$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))'; then
    install -r requirements/test.lock
    install --no-deps -e .
  else
    say "the lock file is for Python 3.11; resolving anew for this one (untested)"
    install -e '.[dev]'
  fi
  touch ".venv/.stamp-$stamp"
}

set_up_mosquitto() {
  if command -v mosquitto >/dev/null || [ -x /usr/sbin/mosquitto ] || [ -x .setup/bin/mosquitto ]; then return; fi
  if ! command -v apt-get >/dev/null; then
    say "no mosquitto and no apt-get here: the tests that need a broker are skipped (failed with CI set)"; return
  fi
  say "mosquitto, unpacked into .setup (the system is not changed)"
  if ! unpack_packages mosquitto; then
    say "could not fetch mosquitto (see .setup/apt.log): the tests that need a broker are skipped (failed with CI set)"; return
  fi
  unpacked_command usr/sbin/mosquitto
}

set_up_redis() {
  if command -v redis-server >/dev/null || [ -x .setup/bin/redis-server ]; then return; fi
  say "redis-server, unpacked into .setup (the system is not changed)"
  if ! command -v apt-get >/dev/null || ! unpack_packages redis-server; then
    say "could not fetch it (see .setup/apt.log): the tests of shared limits are skipped (failed with CI set)"; return
  fi
  unpacked_command usr/bin/redis-server
}

set_up_postgres() {
  if compgen -G '/usr/lib/postgresql/*/bin/initdb' >/dev/null || [ -x .setup/bin/initdb ]; then return; fi
  say "postgresql, unpacked into .setup (the system is not changed)"
  local name folder=
  if command -v apt-get >/dev/null && unpack_packages postgresql; then
    folder=$(cd .setup/root && compgen -G 'usr/lib/postgresql/*/bin' | sort -V | tail -1) || folder=
  fi
  if [ -z "$folder" ]; then
    say "could not fetch it (see .setup/apt.log): the tests of shared conversations are skipped (failed with CI set)"; return
  fi
  for name in initdb postgres; do unpacked_command "$folder/$name"; done
}

set_up_systemd_analyze() {
  if command -v systemd-analyze >/dev/null || [ -x .setup/bin/systemd-analyze ]; then return; fi
  say "systemd-analyze, unpacked into .setup (the system is not changed)"
  if ! command -v apt-get >/dev/null || ! unpack_packages systemd; then
    say "could not fetch systemd (see .setup/apt.log): the checks of the unit file are skipped (failed with CI set)"; return
  fi
  unpacked_command usr/bin/systemd-analyze
}

set_up_clean_debian() {  # for the slow test of the installer
  if [ "$(id -u)" != 0 ] || [ -x .setup/bin/debootstrap ]; then return; fi
  say "debootstrap and systemd-nspawn, unpacked into .setup (the system is not changed)"
  if ! command -v apt-get >/dev/null || ! unpack_packages debootstrap systemd-container; then
    say "could not fetch them (see .setup/apt.log): the test of the installer is skipped (failed with CI set)"; return
  fi
  unpacked_command usr/bin/systemd-nspawn
  cat >.setup/bin/debootstrap <<'WRAP'
#!/bin/sh
root=$(CDPATH= cd -- "$(dirname -- "$0")/../root" && pwd)
PATH="$PATH:$root/usr/bin" DEBOOTSTRAP_DIR="$root/usr/share/debootstrap" exec "$root/usr/sbin/debootstrap" "$@"
WRAP
  chmod +x .setup/bin/debootstrap
}

set_up_models() {
  .venv/bin/midstream models pull "$@"
}

mkdir -p .setup
if [ "$lane" = venv ]; then
  make_venv "$(find_python)" "${2:?which folder?}"
  exit
fi
set_up_python
case $lane in
  lint) ;;
  demo) set_up_models ppocr-v4-det smollm2-135m sample-page sample-text ;;
  test)
    set_up_mosquitto
    set_up_redis
    set_up_postgres
    set_up_systemd_analyze
    set_up_clean_debian
    set_up_models ppocr-v4-det ppocr-v4-rec ppocr-v2-cls smollm2-135m gemma3-270m minilm-int8 minilm-tokenizer \
      face-short-range face-long-range face-full-range face-full-range-sparse face-landmarks iris-landmarks \
      basic-pitch basic-pitch-tflite sample-page sample-text
    ;;
  *) echo "usage: .ci/setup.sh demo|test|lint" >&2; exit 2 ;;
esac

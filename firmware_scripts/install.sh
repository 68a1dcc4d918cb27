#!/bin/sh
# Install midstream's agent as a systemd service, repair or update it, or take it away.
#
# Usage: install.sh [--offline BUNDLE] [--extras onnx,llama] [--no-start] [--dry-run]
#        install.sh --uninstall [--keep-state] [--dry-run]
#
#   --offline BUNDLE  use a bundle of `make bundle` (the .tar, or the folder it unpacks to); no package index is asked
#   --extras LIST     which engines: onnx, tflite, llama, webrtc, zstd; or none (default: the bundle's, else onnx,llama,zstd)
#   --no-start        install only
#   --dry-run         say what would be done, and do nothing
#   --uninstall       stop it and remove all of it: program, state, identity, models, configuration, user
#   --keep-state      with --uninstall: leave identity, models, configuration, drop-ins and user for a later install
#
# Running it again is safe at any point. What is there is kept: configuration, identity, models. Its own Python
# environment is /opt/midstream; nothing is installed into the system's Python.
# Exit codes: 0 done, 1 failed, 2 wrong use, or something is missing that the text names.
set -eu
HOME_DIR=/opt/midstream
VENV=$HOME_DIR/venv
CONFIG=/etc/midstream
STATE=/var/lib/midstream
CACHE=/var/cache/midstream
UNIT=/etc/systemd/system/midstream.service
LINK=/usr/local/bin/midstream
OWNER=midstream
here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
offline='' extras='' start=yes dry='' uninstall='' keep='' work=''

say() { printf '%s\n' "$*"; }
stop_with() { code=$1; shift; printf 'install.sh: %s\n' "$*" >&2; exit "$code"; }
usage() { sed -n '2,19s/^# \{0,1\}//p' "$0"; }
act() {  # do it, or with --dry-run say it
  if [ -n "$dry" ]; then say "would run: $*"; else "$@"; fi
}
link_is_ours() { [ -L "$LINK" ] && [ "$(readlink "$LINK")" = "$HOME_DIR/bin/midstream" ]; }
has_systemd() { [ -d /run/systemd/system ] && command -v systemctl >/dev/null 2>&1; }

while [ $# -gt 0 ]; do
  case $1 in
    --offline) [ $# -gt 1 ] || stop_with 2 "--offline needs a bundle"; offline=$2; shift ;;
    --extras) [ $# -gt 1 ] || stop_with 2 "--extras needs a list"; extras=$2; shift ;;
    --no-start) start='' ;;
    --dry-run) dry=yes ;;
    --uninstall) uninstall=yes ;;
    --keep-state) keep=yes ;;
    -h|--help) usage; exit 0 ;;
    *) usage >&2; exit 2 ;;
  esac
  shift
done
[ -n "$dry" ] || [ "$(id -u)" = 0 ] || stop_with 2 "this changes the system: run it as root (sudo $0)"
trap '[ -z "$work" ] || rm -rf "$work"' EXIT
umask 022

remove_all() {
  if has_systemd && [ -e "$UNIT" ]; then
    act systemctl disable --now midstream.service
  fi
  act rm -rf "$UNIT" /etc/systemd/system/multi-user.target.wants/midstream.service
  if has_systemd; then
    act systemctl daemon-reload
    act systemctl reset-failed midstream.service 2>/dev/null || true
  fi
  act rm -rf "$HOME_DIR"
  if link_is_ours; then act rm -f "$LINK"; fi
  if [ -n "$keep" ]; then
    say "kept: $CONFIG, $STATE, $CACHE, $UNIT.d and the user $OWNER"
    return
  fi
  act rm -rf "$CONFIG" "$STATE" "$CACHE" /run/midstream "$UNIT.d"
  for secret in join_token text_key webrtc_credential; do act rm -f "/etc/credstore/midstream.$secret"; done
  if id "$OWNER" >/dev/null 2>&1; then act userdel "$OWNER"; fi
  if grep -q "^$OWNER:" /etc/group; then act groupdel "$OWNER"; fi
}

find_python() {  # the Python that the environment is made with
  for name in ${PYTHON:-} python3 python3.11 python3.12 python3.13 python3.14; do
    if command -v "$name" >/dev/null 2>&1 &&
      "$name" -c 'import struct, sys; sys.exit(sys.version_info < (3, 11) or struct.calcsize("P") < 8)' 2>/dev/null; then
      command -v "$name"; return 0
    fi
  done
  stop_with 2 "a 64-bit Python 3.11 or later is needed: apt-get install python3, or set PYTHON"
}

open_bundle() {  # sets bundle to a folder whose checksums are right
  [ -e "$offline" ] || stop_with 2 "no bundle at $offline"
  bundle=$offline
  if [ ! -d "$offline" ]; then
    work=$(mktemp -d)
    tar -C "$work" --no-same-owner -xf "$offline" || stop_with 1 "$offline cannot be unpacked: copy it again"
    bundle=$(find "$work" -mindepth 1 -maxdepth 1 -type d | head -n 1)
  fi
  [ -f "$bundle/bundle.txt" ] && [ -f "$bundle/SHA256SUMS" ] || stop_with 2 "$offline is no bundle of \`make bundle\`"
  (cd "$bundle" && sha256sum --quiet -c SHA256SUMS) || stop_with 1 "$offline is damaged: copy it again"
  for fact in python arch extras; do eval "bundle_$fact=\$(sed -n 's/^$fact=//p' \"\$bundle/bundle.txt\")"; done
  # shellcheck disable=SC2154
  [ "$bundle_arch" = "$(uname -m)" ] || stop_with 2 "the bundle is for $bundle_arch, this machine is $(uname -m)"
  has=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
  # shellcheck disable=SC2154
  [ "$bundle_python" = "$has" ] || stop_with 2 "the bundle is for Python $bundle_python, $python is $has: set PYTHON"
}

make_user() {
  if ! grep -q "^$OWNER:" /etc/group; then act groupadd --system "$OWNER"; fi
  if ! id "$OWNER" >/dev/null 2>&1; then
    act useradd --system --gid "$OWNER" --home-dir "$STATE" --no-create-home --shell /usr/sbin/nologin "$OWNER"
  fi
}

make_folders() {
  act install -d -m 755 "$HOME_DIR" "$HOME_DIR/bin"
  act install -d -m 750 -o root -g "$OWNER" "$CONFIG"
  act install -d -m 700 -o "$OWNER" -g "$OWNER" "$STATE"
  act install -d -m 755 -o "$OWNER" -g "$OWNER" "$CACHE" "$CACHE/models"
  [ ! -e "$CONFIG/agent.toml" ] || return 0
  if [ -n "$dry" ]; then say "would write: $CONFIG/agent.toml"; return 0; fi
  cat >"$CONFIG/agent.toml.new" <<TOML
# midstream's agent. All settings: midstream agent --help. After a change: systemctl reload midstream.
state_dir = "$STATE"
models_dir = "$CACHE/models"
TOML
  chgrp "$OWNER" "$CONFIG/agent.toml.new"
  chmod 640 "$CONFIG/agent.toml.new"
  mv "$CONFIG/agent.toml.new" "$CONFIG/agent.toml"
}

pip_to_venv() { "$VENV/bin/python" -m pip install --disable-pip-version-check --no-cache-dir -q "$@"; }

make_venv() {
  # A system upgrade to another Python minor leaves an environment that cannot start: it is made anew.
  if [ -e "$VENV" ] && ! "$VENV/bin/python" -c "import sys; sys.exit('$("$python" -c 'import sys; print(sys.version)')' != sys.version)" 2>/dev/null; then
    say "the environment was made by another Python: making it anew"
    act rm -rf "$VENV"
  fi
  if [ -n "$dry" ]; then say "would make $VENV with $python and install ${from}${extras:+[$extras]} into it"; return 0; fi
  if [ -n "$offline" ]; then
    [ -x "$VENV/bin/python" ] || "$python" -m venv --without-pip "$VENV"
    "$VENV/bin/python" "$(ls "$bundle"/wheels/pip-*.whl)/pip" install --disable-pip-version-check --no-cache-dir -q \
      --isolated --no-index --find-links "$bundle/wheels" pip
    pip_to_venv --isolated --no-index --find-links "$bundle/wheels" --upgrade "$from${extras:+[$extras]}"
    # The same version may hold other code: ours alone is laid anew.
    pip_to_venv --isolated --no-index --no-deps --force-reinstall "$from"
  else
    if [ ! -x "$VENV/bin/pip" ]; then
      "$python" -c 'import ensurepip' 2>/dev/null || stop_with 2 "pip is missing: apt-get install python3-venv"
      "$python" -m venv "$VENV"
    fi
    pip_to_venv --upgrade "$from${extras:+[$extras]}"
    pip_to_venv --no-deps --force-reinstall "$from"
  fi
  "$VENV/bin/midstream" --version >/dev/null || stop_with 1 "midstream does not start: see the lines above"
}

check_engines() {  # a small system may lack a library that a wheel expects; the service runs without that engine
  for engine in onnxruntime xllamacpp ai_edge_litert; do
    ls -d "$VENV"/lib/python3*/site-packages/$engine >/dev/null 2>&1 || continue
    why=$("$VENV/bin/python" -c "import $engine" 2>&1) || say "warning: $(printf '%s' "$why" | tail -n 1) - see midstream doctor"
  done
}

install_all() {
  python=$(find_python) || exit $?
  if [ -n "$offline" ]; then
    open_bundle
    from=$(ls "$bundle"/wheels/midstream-*.whl)
    unit=$bundle/midstream.service
    # shellcheck disable=SC2154
    extras=${extras:-$bundle_extras}
  else
    from=$(CDPATH='' cd -- "$here/.." && pwd)
    [ -f "$from/pyproject.toml" ] || stop_with 2 "run it from a clone of the project, or with --offline BUNDLE"
    unit=$here/midstream.service
    extras=${extras:-onnx,llama,zstd}
  fi
  [ "$extras" != none ] || extras=
  make_user
  make_folders
  make_venv
  act ln -sfn ../venv/bin/midstream "$HOME_DIR/bin/midstream"
  if { [ -e "$LINK" ] || [ -L "$LINK" ]; } && ! link_is_ours; then
    say "$LINK is not ours and stays; call $HOME_DIR/bin/midstream"
  else
    act install -d -m 755 /usr/local/bin
    act ln -sfn "$HOME_DIR/bin/midstream" "$LINK"
  fi
  act install -d -m 755 /etc/systemd/system
  act install -m 644 "$unit" "$UNIT"
  if has_systemd; then
    act systemctl daemon-reload
    act systemctl enable midstream.service
    [ -z "$start" ] || act systemctl restart midstream.service
  else
    say "systemd does not run here: after a boot with it, systemctl enable --now midstream"
  fi
  [ -n "$dry" ] || check_engines
  [ -n "$dry" ] || say "installed $("$HOME_DIR/bin/midstream" --version)"
  say "next: sudo -u $OWNER midstream join TOKEN; midstream doctor; systemctl status midstream"
}

if [ -n "$uninstall" ]; then remove_all; else install_all; fi

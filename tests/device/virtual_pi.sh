#!/usr/bin/env bash
# The shipped aarch64 wheels on an emulated Raspberry Pi 4 (Cortex-A72) and 5 (Cortex-A76): imports, facts, a short
# benchmark, one cut inference with a server on this machine, one short chat. No root, nothing outside the folder.
# Usage: tests/device/virtual_pi.sh [FOLDER] [LOG]   (default build/virtual-pi, FOLDER/log.jsonl; 10 to 20 minutes)
# Needs Debian or Ubuntu, and the .venv and models of `make setup`. What emulation cannot show: speed, and traps of real
# silicon that user-mode emulation does not model.
set -euo pipefail
cd "$(dirname "$0")/../.."
place=${1:-build/virtual-pi}
python=$(command -v "${PYTHON:-.venv/bin/python}")
mkdir -p "$place"
place=$(cd "$place" && pwd)
log=${2:-$place/log.jsonl}
models=${MIDSTREAM_MODELS:-$HOME/.cache/midstream/models}
minor=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
say() { printf '== %s\n' "$*"; }

private_apt() {  # private_apt ARCHITECTURE ARGUMENTS: lists and state of its own, nothing counts as installed
  local arch=$1 state=$place/apt-$1
  shift
  mkdir -p "$state/lists/partial" "$state/cache/archives/partial" "$place/debs-$arch"
  : >"$state/status"
  (cd "$place/debs-$arch" && apt-get -q -o Dir::State="$state" -o Dir::State::lists="$state/lists" \
    -o Dir::State::status="$state/status" -o Dir::Cache="$state/cache" -o APT::Architecture="$arch" \
    -o APT::Architectures="$arch" -o Debug::NoLocking=1 -o APT::Sandbox::User="$(id -un)" "$@")
}

fetch_debs() {  # fetch_debs ARCHITECTURE FOLDER WITH_DEPENDENCIES NAME...: unpacked into FOLDER
  local arch=$1 folder=$2 closure=$3 names
  shift 3
  private_apt "$arch" update >"$place/apt.log" 2>&1
  names=$*
  if [ "$closure" = yes ]; then
    names=$(private_apt "$arch" -s --no-install-recommends install "$@" 2>>"$place/apt.log" | awk '/^Inst/ {print $2}')
  fi
  # shellcheck disable=SC2086
  private_apt "$arch" download $names >>"$place/apt.log" 2>&1
  mkdir -p "$folder"
  for deb in "$place/debs-$arch"/*.deb; do dpkg -x "$deb" "$folder"; done
}

set_up() {
  if [ ! -x "$place/qemu/usr/bin/qemu-aarch64-static" ]; then
    say "the emulator"; fetch_debs "$(dpkg --print-architecture)" "$place/qemu" no qemu-user-static
  fi
  if [ ! -x "$place/sys/usr/bin/python$minor" ]; then
    say "Python $minor for arm64 and its libraries"
    fetch_debs arm64 "$place/sys" yes "python$minor" libstdc++6 libgomp1 ca-certificates
  fi
  say "the bundle for aarch64, as a device gets it"
  rm -rf "$place/dist" "$place/unpacked" "$place/packages"
  PYTHON=$python firmware_scripts/bundle.sh --arch aarch64 --out "$place/dist" >"$place/bundle.log" 2>&1 ||
    { tail -20 "$place/bundle.log"; exit 1; }
  tail -1 "$place/bundle.log"
  mkdir -p "$place/unpacked"
  tar -C "$place/unpacked" --strip-components=1 -xf "$place"/dist/*.tar
  (cd "$place/unpacked" && sha256sum --quiet -c SHA256SUMS)
  for wheel in "$place"/unpacked/wheels/*.whl; do "$python" -m zipfile -e "$wheel" "$place/packages"; done
}

fake_pi() {  # fake_pi MODEL CPU_PART: the files by which a Raspberry Pi is known, laid over this machine's
  local sys=$place/sys core
  mkdir -p "$sys/proc/device-tree" "$sys/sys/class/thermal/thermal_zone0" "$sys/sys/devices/platform/soc/soc:firmware"
  printf '%s\0' "$1" >"$sys/proc/device-tree/model"
  printf '48312\n' >"$sys/sys/class/thermal/thermal_zone0/temp"
  printf 'cpu-thermal\n' >"$sys/sys/class/thermal/thermal_zone0/type"
  printf '50000\n' >"$sys/sys/devices/platform/soc/soc:firmware/get_throttled"
  for core in 0 1 2 3; do
    printf 'processor\t: %s\nBogoMIPS\t: 108.00\nFeatures\t: fp asimd evtstrm crc32 cpuid\nCPU implementer\t: 0x41\n' "$core"
    printf 'CPU architecture: 8\nCPU variant\t: 0x0\nCPU part\t: %s\nCPU revision\t: 3\n\n' "$2"
  done >"$sys/proc/cpuinfo"
  printf 'Model\t\t: %s\n' "$1" >>"$sys/proc/cpuinfo"
}

run_on() {  # run_on CPU MODEL CPU_PART URL
  fake_pi "$2" "$3"
  say "$2 ($1)"
  printf '{"device": "%s", "cpu": "%s"}\n' "$2" "$1" >>"$log"
  "$place/qemu/usr/bin/qemu-aarch64-static" -cpu "$1" -L "$place/sys" -E PYTHONPATH="$place/packages" \
    -E PYTHONDONTWRITEBYTECODE=1 -E LC_ALL=C.UTF-8 "$place/sys/usr/bin/python$minor" tests/device/on_device.py \
    "$place/far/bundles/ppocr-v2-cls" "$4" "$models" | tee -a "$log"
}

set_up
: >"$log"
coproc FAR { exec "$python" -m tests.device.far_side "$place/far" 2>"$place/far.log"; }
far_pid=$FAR_PID
trap 'kill "$far_pid" 2>/dev/null || true' EXIT
read -r url <&"${FAR[0]}" || { tail -20 "$place/far.log"; exit 1; }
code=0
run_on cortex-a72 "Raspberry Pi 4 Model B Rev 1.4" 0xd08 "$url" || code=1
run_on cortex-a76 "Raspberry Pi 5 Model B Rev 1.0" 0xd0b "$url" || code=1
say "log: $log"
exit $code

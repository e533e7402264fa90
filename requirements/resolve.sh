#!/usr/bin/env bash
# `make pins`: resolves the ranges of pyproject.toml into cpu.txt and cuda.txt, with the SHA-256 of each file that an
# index has of a version; names no index. Keeps pinned versions that still fit; arguments go to uv, e.g. --upgrade or
# --upgrade-package NAME.
set -euo pipefail
cd "$(dirname "$0")/.."

common=$(mktemp)
trap 'rm -f "$common"' EXIT
resolve() {
    .venv/bin/uv pip compile pyproject.toml --extra train --extra tensorboard --extra local --extra browser --extra test --python-version 3.11 \
        --python-platform x86_64-manylinux_2_28 --no-header --no-annotate --quiet "$@"
}

# Resolve for both builds of vLLM at once, so that of the shared packages only torch differs between the lists. uv
# prefers the versions it finds in its output file.
cp requirements/cuda.txt "$common"
resolve --extra cpu --extra cuda --override requirements/override.txt --override <(grep -o 'torch>=[^"]*' pyproject.toml) \
    --output-file "$common" "$@"
sed -i '/^torch==/d' "$common"

find_links=$(.venv/bin/python -m pip config get global.find-links 2>/dev/null || true)
resolve --extra cpu --override requirements/override.txt --constraint "$common" --generate-hashes \
    ${find_links:+--find-links "$find_links"} --output-file requirements/cpu.txt "$@"
resolve --extra cuda --constraint "$common" --generate-hashes --output-file requirements/cuda.txt "$@"

# The installer itself, in the version that it has here.
printf 'uv==%s\n' "$(.venv/bin/uv --version | cut -d' ' -f2)" >"$common"
.venv/bin/uv pip compile "$common" --no-header --no-annotate --quiet --generate-hashes --output-file requirements/installer.txt

# What `make sbom` and `make audit` run, in an environment of their own.
.venv/bin/uv pip compile requirements/audit.in --python-version 3.11 --no-header --no-annotate --quiet --generate-hashes \
    --output-file requirements/audit.txt "$@"

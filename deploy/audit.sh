#!/usr/bin/env bash
# What is installed, and what is known against it. The tools are in an environment of their own, by hashes of a list.
#   audit.sh sbom FILE        writes a CycloneDX bill of materials of .venv: packages, versions, licences, who needs whom
#   audit.sh vulnerabilities  asks PyPI's JSON API about every pinned package of both devices; fails where it cannot
set -euo pipefail
cd "$(dirname "$0")/.."

list=requirements/audit.txt
tools=.venv/audit
want=$(sha256sum <"$list")
if [ "$(cat "$tools/.installed" 2>/dev/null || true)" != "$want" ]; then
    .venv/bin/uv venv --quiet --clear --python .venv/bin/python "$tools"
    index=$(.venv/bin/python -m pip config get global.index-url 2>/dev/null || true)
    .venv/bin/uv pip install --quiet --python "$tools/bin/python" ${index:+--default-index "$index"} --require-hashes \
        --requirement "$list"
    echo "$want" >"$tools/.installed"
fi

case ${1:-} in
    sbom)
        "$tools/bin/cyclonedx-py" environment --pyproject pyproject.toml --output-reproducible --output-format JSON \
            --output-file "${2:?audit.sh sbom FILE}" .venv
        echo "wrote $2"
        ;;
    vulnerabilities)
        pinned=$(mktemp)
        trap 'rm -f "$pinned"' EXIT
        # PyPI knows no local versions like +cpu.
        grep -ho '^[a-z0-9-]*==[^ +]*' requirements/{cpu,cuda,installer}.txt | sort -u >"$pinned"
        "$tools/bin/pip-audit" --strict --no-deps --disable-pip --progress-spinner off --requirement "$pinned"
        ;;
    *) echo "audit.sh sbom FILE | vulnerabilities" >&2 && exit 2 ;;
esac

"""Stand-ins for a machine with GPUs: nvidia-smi, and a vLLM that records how it was started."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MIB_PER_GIB = 1024
# Answers /health and /v1/models as vLLM does, once it has noted its arguments and variables.
_VLLM = """
import http.server, json, os, pathlib, sys, time
arguments = sys.argv[1:]
port = int(arguments[arguments.index("--port") + 1])
time.sleep(float(os.environ["STARTS_AFTER"]))
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *words):
        pass
server = http.server.HTTPServer(("127.0.0.1", port), Handler)
noted = {"arguments": arguments, "environment": dict(os.environ)}
pathlib.Path(os.environ["NOTES"], f"vllm {port}.json").write_text(json.dumps(noted))
server.serve_forever()
"""


def install(folder: Path, *sizes: float, used: float = 0.3, starts_after: float = 0) -> dict[str, str]:
    """Write the stand-ins into a folder; returns the variables with which programs find them.

    Args:
        sizes: GiB of each GPU.
        used: GiB of each that other programs hold.
        starts_after: seconds until vLLM answers.
    """
    programs, notes = folder / "bin", folder / "notes"
    package = folder / "python" / "vllm" / "entrypoints" / "openai"
    for made in (programs, notes, package):
        made.mkdir(parents=True)
    rows = [
        f"{index}, GPU-{index:08d}, {int(size * MIB_PER_GIB)}, {int((size - used) * MIB_PER_GIB)}"
        for index, size in enumerate(sizes)
    ]
    tool = programs / "nvidia-smi"
    tool.write_text("#!/bin/sh\ncat <<END\n" + "\n".join(rows) + "\nEND\n")
    tool.chmod(0o755)
    for inner in (package, package.parent, package.parents[1]):
        (inner / "__init__.py").touch()
    (package / "api_server.py").write_text(_VLLM)
    return {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "PYTHONPATH": str(folder / "python"),
        "NOTES": str(notes),
        "STARTS_AFTER": str(starts_after),
    }


def notes(environment: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """What each stand-in noted, by its name."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(Path(environment["NOTES"]).glob("*.json"))}

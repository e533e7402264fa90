"""The ways in which people set OpenClaw up for a gateway."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
ORIGINAL = ROOT / "deploy" / "openclaw" / "original.json"
NAMES = ("ours", "original", "bare")


def configuration(name: str, own: dict[str, Any], folder: Path, gateway: str, key: str) -> dict[str, Any]:
    """
    Args:
        name: `ours`: what `clawloop openclaw-config --merge` prints; `original`: OpenClaw-RL's, with only address and
            key filled in; `bare`: a provider and a model, nothing that names a session or a kind.
        own: what the person had before.
    """
    if name == "ours":
        return merged_by_command(own, folder, gateway, key)
    provider = json.loads(ORIGINAL.read_text())["models"]["providers"]["qwen"]
    provider |= {"baseUrl": f"{gateway}/v1", "apiKey": key}
    chosen = "qwen"
    if name == "bare":
        chosen = "home"
        provider["models"] = [provider["models"][0] | {"reasoning": False}]
    return own | {
        "models": {"providers": {chosen: provider}},
        "agents": {"defaults": own["agents"]["defaults"] | {"model": {"primary": f"{chosen}/qwen3-4b"}}},
    }


def merged_by_command(own: dict[str, Any], folder: Path, gateway: str, key: str) -> dict[str, Any]:
    """What `clawloop openclaw-config --merge` makes of a person's own configuration."""
    before = folder / "own.json"
    before.write_text(json.dumps(own))
    command = [sys.executable, "-m", "clawloop.app.cli.main", "openclaw-config", "--merge", str(before)]
    printed = subprocess.run([*command, "--url", gateway, "--key", key], check=True, capture_output=True, text=True)
    made: dict[str, Any] = json.loads(printed.stdout)
    return made

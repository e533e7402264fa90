"""Writes where the metrics of this folder's processes are, for Prometheus' `file_sd_configs`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from clawloop.app.local.supervision.supervisor import Part

FILE = "metric-targets.json"


def write_targets(data: Path, parts: Sequence[Part], *, further: bool = False) -> None:
    """Replace the file atomically; with `further`, keep what other processes it names.

    Args:
        parts: each serves `/metrics` at its address, or one page for each of its roles.
    """
    path = data / FILE
    targets = [target for part in parts for target in _targets(part)]
    if further:
        targets = [*json.loads(path.read_text(encoding="utf-8")), *targets]
    new = path.with_name(f"{FILE}.new")
    new.write_text(f"{json.dumps(targets, indent=2)}\n", encoding="utf-8")
    new.replace(path)


def _targets(part: Part) -> list[dict[str, object]]:
    """One for each role, labelled as the role's own process would be."""
    address = [urlsplit(part.address).netloc]
    if not part.roles:
        return [{"targets": address, "labels": {"process": part.name}}]
    return [
        {"targets": address, "labels": {"process": role, "__metrics_path__": f"/metrics/{role}"}} for role in part.roles
    ]

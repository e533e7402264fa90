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
        parts: each serves `/metrics` at its address.
    """
    path = data / FILE
    targets = [{"targets": [urlsplit(part.address).netloc], "labels": {"process": part.name}} for part in parts]
    if further:
        targets = [*json.loads(path.read_text(encoding="utf-8")), *targets]
    new = path.with_name(f"{FILE}.new")
    new.write_text(f"{json.dumps(targets, indent=2)}\n", encoding="utf-8")
    new.replace(path)

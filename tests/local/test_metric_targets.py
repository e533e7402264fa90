"""The file by which Prometheus finds the processes of a data folder."""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path

from clawloop.app.local.metric_targets import FILE, write_targets
from clawloop.app.local.supervision.supervisor import Launch, Part


async def ready() -> bool:
    return True


def part(name: str, port: int) -> Part:
    return Part(
        name=name,
        address=f"http://127.0.0.1:{port}",
        prepare=lambda: Launch((sys.executable,), {}),
        is_ready=ready,
        stop_within=timedelta(seconds=1),
        start_within=timedelta(seconds=1),
    )


def test_a_start_replaces_the_file_and_later_parts_are_added(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text("of an earlier start")
    write_targets(tmp_path, [part("gateway", 1), part("judge", 2)])
    write_targets(tmp_path, [part("trainer", 3)], further=True)
    assert json.loads((tmp_path / FILE).read_text()) == [
        {"targets": ["127.0.0.1:1"], "labels": {"process": "gateway"}},
        {"targets": ["127.0.0.1:2"], "labels": {"process": "judge"}},
        {"targets": ["127.0.0.1:3"], "labels": {"process": "trainer"}},
    ]
    assert [path.name for path in tmp_path.iterdir()] == [FILE]

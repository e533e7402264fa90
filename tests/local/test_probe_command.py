"""`clawloop probe` on real PostgreSQL."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from clawloop.app.processes.bootstrap import create_default_policy
from tests.verbs import clawloop, clawloop_process, refusal


@pytest.fixture
def here(postgres_url: str, tmp_path: Path) -> dict[str, str]:
    asyncio.run(create_default_policy(postgres_url, "tiny", [], []))
    return {"DATABASE_URL": postgres_url, "CLAWLOOP_DATA": str(tmp_path)}


def test_probes_come_and_go(here: dict[str, str], tmp_path: Path) -> None:
    file = tmp_path / "probes.jsonl"
    # As some editors write it: with a mark of the byte order.
    file.write_text('{"prompt": "2 + 2?", "contains": "4"}\n\n{"prompt": "Say hello."}\n', encoding="utf-8-sig")
    added = clawloop_process("probe", "add", str(file), **here)
    assert (added.returncode, added.stdout) == (0, "2 added; the next version is asked\n")
    assert clawloop("probe", "add", "--prompt", "3 + 3?", "--regex", r"\b6\b", **here).returncode == 0
    rows = json.loads(clawloop("probe", "list", "--json", **here).stdout)["probes"]
    asked = [(row["messages"][-1]["content"], row["contains"], row["regex"]) for row in rows]
    assert asked == [("2 + 2?", ["4"], None), ("Say hello.", [], None), ("3 + 3?", [], r"\b6\b")]
    listed = clawloop("probe", "list", **here, COLUMNS="80").stdout.splitlines()
    assert [line.split("  ")[-1].strip() for line in listed[1:3]] == ["contains '4'", "compared by the judge"]
    assert max(map(len, listed)) <= 80
    assert clawloop("probe", "remove", rows[0]["id"], **here).stdout == "removed\n"
    gone = refusal(clawloop("probe", "remove", rows[0]["id"], **here))
    assert gone == f"clawloop: policy 'default' has no probe {rows[0]['id']}; `clawloop probe list` shows them"


def test_a_file_with_bad_lines_names_them_and_adds_none(here: dict[str, str], tmp_path: Path) -> None:
    file = tmp_path / "probes.jsonl"
    file.write_text('{"prompt": "fine"}\n{"promt": "a"}\nnothing\n')
    said = refusal(clawloop("probe", "add", str(file), **here))
    assert "none was added, because 2 cannot be used: line 2: unknown key 'promt'" in said
    assert "; line 3: not JSON" in said
    file.write_text("\n")
    assert "has no probe: write one JSON object a line" in refusal(clawloop("probe", "add", str(file), **here))
    assert json.loads(clawloop("probe", "list", "--json", **here).stdout) == {"probes": []}
    assert "There is no policy 'other'" in refusal(clawloop("probe", "list", "--policy", "other", **here))
    assert clawloop("probe", "add", **here).returncode == 2

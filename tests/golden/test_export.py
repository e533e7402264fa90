"""Exports of a scripted ledger, read back: ids and counts are the ledger's, and nothing that was erased is in them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any
from uuid import UUID

from clawloop.core.ids import SessionId
from db.erasure import PostgresErasureStore
from tests.contract.learning import PostgresLearning
from tests.golden import script
from tests.ui.conftest import Page, page
from tests.verbs import clawloop

__all__ = ["page"]

# What each kind has a line for.
LEDGER = {
    "turns": "SELECT id FROM turns WHERE kind = 'main' AND outcome <> 'erased'",
    "judgements": """SELECT t.id FROM turns t WHERE t.kind = 'main' AND t.outcome <> 'erased' AND EXISTS (
        SELECT FROM judgements j WHERE j.turn_id = t.id AND j.decided_at IS NOT NULL)""",
    "samples": "SELECT id FROM samples",
    "steps": "SELECT policy || ' ' || n AS id FROM steps",
}


async def exported(page: Page, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """The lines of each kind, each parsed."""
    settings = {"DATABASE_URL": page.database_url, "CLAWLOOP_DATA": str(folder)}
    found = {}
    for kind in LEDGER:
        file = folder / f"{kind}.jsonl"
        done = await asyncio.to_thread(clawloop, "export", "--records", kind, "--out", str(file), **settings)
        found[kind] = [json.loads(line) for line in file.read_bytes().splitlines()]
        assert (done.returncode, done.stderr) == (0, f"{kind} written to {file}: {len(found[kind])}\n")
        file.unlink()
    return found


async def require_the_ledgers(learning: PostgresLearning, found: dict[str, list[dict[str, Any]]]) -> None:
    for kind, query in LEDGER.items():
        ids = [f"{line['policy']} {line['n']}" if kind == "steps" else line["id"] for line in found[kind]]
        assert sorted(ids) == sorted(str(row["id"]) for row in await learning.rows(query)), kind


async def test_exports_equal_the_ledger_also_after_an_erasure(page: Page, tmp_path: Path) -> None:
    learning = page.learning
    (engine,) = await learning.rows("SELECT id FROM engines")
    written = await script.write(learning, engine["id"])
    found = await exported(page, tmp_path)
    await require_the_ledgers(learning, found)
    assert all(found.values())
    in_steps = {sample for line in found["steps"] for sample in line["samples"]}
    steps = await learning.rows("SELECT sample_id, max(step) AS step FROM step_samples GROUP BY sample_id")
    assert in_steps == {str(row["sample_id"]) for row in steps}
    assert {line["id"]: line["step"] for line in found["samples"] if line["step"] is not None} == {
        str(row["sample_id"]): row["step"] for row in steps
    }
    hint = "Answer in one sentence"
    assert "Explain the tides." in str(found["turns"])
    assert hint in str(found["judgements"])
    assert "My number is 12." in str(found["turns"])  # of the reply before the one that was erased
    assert str(written.made["erased"]) not in str(found)

    tides = SessionId(UUID(str(written.made["tides"])))
    of_tides = {str(row["id"]) for row in await learning.rows("SELECT id FROM turns WHERE session_id = %s", tides)}
    assert {line["id"] for line in found["turns"] + found["judgements"]} & of_tides
    assert await PostgresErasureStore(learning.database).erase_session(tides) is not None
    found = await exported(page, tmp_path)
    await require_the_ledgers(learning, found)
    assert not {line["id"] for line in found["turns"] + found["judgements"]} & of_tides
    for word in ("tides", hint, "Shorter, please."):
        assert word not in str(found)

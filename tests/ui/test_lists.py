"""What commands list fits the terminal: six columns at most, and what names a row is whole."""

from __future__ import annotations

import asyncio
import re

import pytest

from tests.contract.episodes import run_group
from tests.contract.learning import publish, reject, step
from tests.ui.conftest import Page
from tests.ui.recorded import CHANGED, HINT
from tests.verbs import clawloop

MOST_COLUMNS = 6


@pytest.mark.parametrize("columns", [80, 120])
async def test_lists_fit_and_name_their_rows(page: Page, columns: int) -> None:
    first, _ = await page.recorder.chat("first", "Explain " + "the tides and all that moves them " * 5, CHANGED)
    await page.recorder.judge(first, -1, HINT)
    await step(page.learning, 1, count=3)
    [engine] = await page.learning.rows("SELECT id FROM engines")
    await publish(page.learning, 1, engine["id"])
    await reject(page.learning, 2, reason="it moved too far, and further than anything that was ever seen before")
    result, [good, _] = await run_group(page.learning, [1.0, 0.0], turns=2)
    [key] = await page.learning.rows("SELECT prefix FROM api_keys WHERE name = 'admin'")
    named = {
        ("session", "list", "--all"): "[0-9a-f]{8}",
        ("policy", "list"): "default",
        ("policy", "versions"): "2",
        ("policy", "events"): "",
        ("engine", "list"): re.escape(engine["id"]),
        ("key", "list"): key["prefix"],
        ("rollouts", "groups"): str(result.id)[:8],
        ("episode", "list"): str(good.id)[:8],
    }
    settings = {"DATABASE_URL": page.database_url, "COLUMNS": str(columns)}
    for made in ("soon", "gone"):
        await asyncio.to_thread(clawloop, "key", "create", "--name", made, "--days", "30", **settings)
    await asyncio.to_thread(clawloop, "key", "revoke", "gone", **settings)
    for verb, name in named.items():
        lines = (await asyncio.to_thread(clawloop, *verb, **settings)).stdout.splitlines()
        assert max(map(len, lines)) <= columns, verb
        # Two blanks stand between columns, and one within the names of some.
        assert 1 < len(re.split(r" {2,}", lines[0])) <= MOST_COLUMNS, verb
        assert any(re.match(name, line) for line in lines[1:]), verb
    keys = (await asyncio.to_thread(clawloop, "key", "list", **settings)).stdout
    assert re.search(r"  \d{4}-\d\d-\d\d +soon$", keys, re.MULTILINE)
    assert re.search(r"  revoked \d+ \w+ ago +gone$", keys, re.MULTILINE)

"""What a command prints with `--json` is what its route answers."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from tests.contract.learning import publish, step
from tests.ui.conftest import Page
from tests.ui.recorded import CHANGED, HINT
from tests.verbs import clawloop

SAME = {
    ("session", "list", "--all"): "sessions",
    ("session", "show", "first"): "sessions/first?content=true",
    ("why", "first:1"): "turns/first:1/why",
    ("policy", "list"): "policies",
    ("policy", "versions"): "policies/default/versions",
    ("policy", "events"): "policies/default/events",
    ("engine", "list"): "engines",
    ("key", "list"): "keys",
    ("status",): "status",
    ("training", "status"): "training",
}


# Problems are those of the process that is asked: the gateway here has no Temporal.
OF_THE_PROCESS = {"problems"}


def _comparable(found: Any) -> Any:
    if isinstance(found, dict):
        return {name: _comparable(value) for name, value in found.items() if name not in OF_THE_PROCESS}
    return [_comparable(one) for one in found] if isinstance(found, list) else found


@pytest.mark.parametrize("command", SAME, ids=" ".join)
async def test_a_command_prints_what_its_route_answers(page: Page, command: tuple[str, ...]) -> None:
    first, _ = await page.recorder.chat("first", "Explain the tides", CHANGED)
    await page.recorder.judge(first, -1, HINT)
    await step(page.learning, 1, count=3)
    [engine] = await page.learning.rows("SELECT id FROM engines")
    await publish(page.learning, 1, engine["id"])
    settings = {"DATABASE_URL": page.database_url}
    printed = json.loads((await asyncio.to_thread(clawloop, *command, "--json", **settings)).stdout)
    headers = {"Authorization": f"Bearer {page.admin_key}"}
    async with httpx.AsyncClient(base_url=page.url, headers=headers, timeout=60) as client:
        answer = await client.get(f"/admin/v1/{SAME[command]}")
    assert answer.status_code == 200, answer.text
    assert _comparable(printed) == _comparable(answer.json())

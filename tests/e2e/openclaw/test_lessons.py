"""OpenClaw's own memory beside lessons: a memory flush is told no lesson, and what it writes becomes none."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from clawloop.core.recipes.recipe import WITHOUT_JUDGE
from clawloop.serving.directory import REFRESH_SECONDS
from db.schema import migrate
from tests.conftest import database_address, execute
from tests.e2e.openclaw.configurations import configuration
from tests.e2e.openclaw.resident import running_openclaw
from tests.e2e.openclaw.script import MEMO, SAVED
from tests.e2e.openclaw.stack import Stack, running_stack
from tests.e2e.openclaw.test_sessions import FILLER, LONG_TURNS

LESSON = "Answer in one short sentence."
LESSONS = "/admin/v1/policies/default/lessons"
# The judge worker learns of the recipe, the reply is judged.
PATIENCE_SECONDS = 300


async def test_a_memory_flush_and_lessons_do_not_repeat_each_other(
    postgres_server: Any, temporal_address: str, tmp_path: Path
) -> None:
    execute(postgres_server.url, "CREATE DATABASE openclaw_lessons")
    url = database_address(postgres_server.url, "openclaw_lessons")
    await asyncio.to_thread(migrate, url)
    folder = tmp_path / "openclaw"
    async with running_stack(tmp_path / "stack", url, temporal_address, judging=True) as stack:
        await learn_by_lessons(stack)
        made = partial(configuration, "ours", folder=folder, gateway=stack.url, key=stack.key)
        async with running_openclaw(folder, made) as client:
            await client.say("This is ask-first-1.", "first")
            await comment_on_last(stack)
            await client.say("This is ask-first-2.", "first")  # what was said of the first reply is read now
            assert await lessons(stack, 1) == [LESSON]
            await asyncio.sleep(10 * REFRESH_SECONDS)  # by then each gateway has read it
            for number in range(1, LONG_TURNS + 1):
                await client.say(f"This is ask-long-{number}, {MEMO}. {FILLER}", "long")
            await client.say("This is ask-after-1.", "after")
        asked = stack.asked()
        kept = await lessons(stack, 1)
    [memory] = (folder / "workspace" / "memory").glob("*.md")
    assert SAVED in memory.read_text()
    assert kept == [LESSON]
    chores = [request for request in asked if request["what"] != "turn"]
    assert {"memory flush", "compaction"} <= {request["what"] for request in chores}
    assert {request["lessons"] for request in chores} == {0}
    held: dict[str, list[int]] = defaultdict(list)
    for request in asked:
        if request["what"] == "turn" and request["conversation"] is not None:
            held[request["conversation"]].append(request["lessons"])
    # A session keeps what it began with, and each prompt holds it once, behind a compaction too.
    assert held == {"first": [0, 0], "long": [1] * LONG_TURNS, "after": [1]}


async def learn_by_lessons(stack: Stack) -> None:
    recipe = WITHOUT_JUDGE.model_dump(mode="json")
    recipe["gate"]["general_probes"] = False
    recipe["lessons"] |= {"enabled": True, "from_corrections": True}
    async with stack.admin() as client:
        answer = await client.post("/admin/v1/policies/default/recipe", json=recipe)
        assert answer.status_code == 200, answer.text


async def comment_on_last(stack: Stack) -> None:
    async with httpx.AsyncClient(base_url=stack.url, headers={"Authorization": f"Bearer {stack.key}"}) as client:
        answer = await client.post("/v1/feedback", json={"turn": "last", "text": LESSON})
        assert answer.status_code in (200, 201, 202), answer.text


async def lessons(stack: Stack, count: int) -> list[str]:
    """The texts of the policy's lessons, once there are so many."""
    async with stack.admin() as client, asyncio.timeout(PATIENCE_SECONDS):
        while True:
            found = [each["text"] for each in (await client.get(LESSONS)).json()["lessons"]]
            if len(found) >= count:
                return found
            await asyncio.sleep(0.5)

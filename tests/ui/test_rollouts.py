"""What a policy practises, on the page and by commands: groups, episodes, and each episode as a conversation."""

from __future__ import annotations

import asyncio
import html
import re
from uuid import uuid4

import pytest

from clawloop.app.processes.operations import NoTemporal
from tests.contract.episodes import run_group
from tests.contract.learning import POLICY
from tests.ui.conftest import Page
from tests.verbs import clawloop


async def test_rollouts_are_started_and_paused(page: Page) -> None:
    plan = {"environment": "terminal", "size": "4", "groups": "1", "barren": "9"}
    async with page.visitor() as visitor:
        assert "Never started" in await visitor.get("/ui/rollouts")
        assert "Started." in (await visitor.post("/ui/rollouts/start", **plan)).text
        assert (await visitor.post("/ui/rollouts/start", **plan | {"size": "1"})).status_code == 400
        assert "too dear" in (await visitor.post("/ui/rollouts/pause", reason="too dear")).text
    status = await page.services[0].rollout_operations.status(POLICY)
    assert status.plan is not None
    assert (status.state.value, status.plan.size, status.plan.barren_limit) == ("paused", 4, 9)


async def test_an_environment_without_a_worker_is_said_on_the_page(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    async def no(self: NoTemporal, asked: object) -> bool:
        return False

    async with page.visitor() as visitor:
        await visitor.post("/ui/rollouts/start", environment="terminal", size="4", groups="1", barren="9")
        missing = "no worker serves the environment &#39;terminal&#39;"
        assert missing not in await visitor.get("/ui/rollouts")  # without Temporal nobody can say
        for question in ("asks_for_work", "has_work"):
            monkeypatch.setattr(NoTemporal, question, no)
        assert missing in await visitor.get("/ui/rollouts")


async def test_a_curriculum_is_shown_by_kind_and_is_off_unless_chosen(page: Page) -> None:
    plan = {"environment": "tool-call", "size": "4", "groups": "1", "barren": "9"}
    settings = {"DATABASE_URL": page.database_url, "COLUMNS": "100"}
    async with page.visitor() as visitor:
        assert "Table of kinds of tasks" not in (await visitor.post("/ui/rollouts/start", **plan)).text
        shown = (await visitor.post("/ui/rollouts/start", **plan, curriculum="on")).text
        assert re.search(r'<th scope="row">times</th><td>2 of 6</td>', shown)
        refused = await visitor.post("/ui/rollouts/start", **plan | {"environment": "tasks"}, curriculum="on")
        assert (refused.status_code, "kinds of tasks" in refused.text) == (400, True)
    by_command = (await asyncio.to_thread(clawloop, "rollouts", "status", **settings)).stdout
    assert re.search(r"^curriculum +3 kinds of tasks$", by_command, re.MULTILINE)
    assert re.search(r"^times +2 of 6 +1 +0 of 32", by_command, re.MULTILINE)


async def test_a_reason_that_is_too_long_or_missing_is_refused_and_never_cut(page: Page) -> None:
    plan = {"environment": "terminal", "size": "4", "groups": "1", "barren": "9"}
    async with page.visitor() as visitor:
        await visitor.post("/ui/rollouts/start", **plan)
        for place in ("rollouts", "training"):
            for reason in ("x" * 501, "  "):
                refused = await visitor.post(f"/ui/{place}/pause", reason=reason)
                assert (refused.status_code, "1 to 500 characters" in refused.text) == (400, True), place
            assert "x" * 500 in (await visitor.post(f"/ui/{place}/pause", reason="x" * 500)).text
    refused_by_command = await asyncio.to_thread(
        clawloop, "training", "pause", "x" * 501, DATABASE_URL=page.database_url
    )
    assert refused_by_command.returncode == 2


async def test_groups_and_episodes_are_listed_and_an_episode_reads_as_a_chat(page: Page) -> None:
    result, [good, lost] = await run_group(page.learning, [1.0, None], turns=2)
    other, _ = await run_group(page.learning, [0.5, 0.25])
    async with page.visitor() as visitor:
        listed = await visitor.get("/ui/rollouts")
        assert listed.count("?policy=default&amp;group=") == 2
        assert listed.count('href="/ui/episodes/') == 4
        assert "the verifier hung" in listed
        of_one = await visitor.get(f"/ui/rollouts?group={result.id}")
        assert of_one.count('href="/ui/episodes/') == 2
        assert f"/ui/rollouts?group={result.id}" in of_one  # it loads the same anew
        missing = await visitor.client.get(f"/ui/rollouts?group={uuid4()}")
        assert (missing.status_code, "there is no group" in html.unescape(missing.text)) == (404, True)
        shown = await visitor.get(f"/ui/episodes/{good.id}")
        for words in ("reward 1", "completed", "Turn 1", f"rollout-group/{result.id}"):
            assert words in shown, words
        assert shown.count("<article") == 1  # of its two sessions the first
        assert shown.count('href="/ui/sessions/') >= 2
        assert "rate turn" not in shown
        assert "no reward" in await visitor.get(f"/ui/episodes/{lost.id!s}")
        [row] = await page.learning.rows("SELECT session_id FROM turns WHERE episode_id = %s LIMIT 1", good.id)
        assert f'href="/ui/episodes/{good.id}"' in await visitor.get(f"/ui/sessions/{row['session_id']}")
        assert (await visitor.client.get(f"/ui/episodes/{uuid4()}")).status_code == 404
    assert other.mean_reward == 0.375


async def test_commands_list_groups_and_show_an_episode_as_a_conversation(page: Page) -> None:
    result, [good, _] = await run_group(page.learning, [1.0, 0.0], turns=2)
    for columns in (80, 120):
        settings = {"DATABASE_URL": page.database_url, "COLUMNS": str(columns)}
        groups = (await asyncio.to_thread(clawloop, "rollouts", "groups", **settings)).stdout
        assert str(result.id)[:8] in groups
        assert "2 of 2" in groups
        shown = (await asyncio.to_thread(clawloop, "episode", "show", str(good.id), **settings)).stdout
        assert re.search(r"^reward +1$", shown, re.MULTILINE)
        assert shown.count("Session ") == 2
        assert "assistant: " in shown
        for line in (groups + shown).splitlines():
            assert len(line) <= columns or str(result.id) in line or str(good.id) in line, line

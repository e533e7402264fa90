"""A version beside its parent, what happened to a policy, and the chart: on the page, by commands and over REST."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime

import httpx
import pytest

from api.ui.now import probes_of
from clawloop.core.contracts.training import CheckResult, GateCheck, VersionView
from db.training.policies import PostgresMeasurements
from tests.contract.learning import POLICY, publish, step
from tests.ui.conftest import Page
from tests.ui.recorded import CHANGED, HINT
from tests.verbs import clawloop


async def taught(page: Page) -> None:
    """A reply that the next step learns from."""
    first, _ = await page.recorder.chat("first", "Explain first", CHANGED)
    await page.recorder.judge(first, -1, HINT)


async def test_a_version_and_its_parent_answer_the_same_prompt_as_side_turns(
    page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("api.chat.comparison.LOAD_SECONDS", 0.1)
    await taught(page)
    await step(page.learning, 1, count=3)
    [engine] = await page.learning.rows("SELECT id FROM engines")
    async with page.visitor() as visitor:
        missing = await visitor.post("/ui/compare", version="1", prompt="Hello")
        assert "No engine has loaded it within 0.1 s" in missing.text
        # The engine's agent, which does not run here, was asked to.
        assert [ref.n for ref in await page.learning.publishing.wanted(engine["id"])] == [1]
        await publish(page.learning, 1, engine["id"])
        shown = (await visitor.post("/ui/compare", version="1", prompt="Hello")).text
        assert shown.count("Hello there, friend.") == 2
        assert shown.index("version 0, its parent") < shown.index(">version 1<")
        assert "Both answered the same, word for word." in shown
        assert "Both answered the same" not in missing.text
        assert (await visitor.post("/ui/compare", version="0", prompt="Hello")).status_code == 404
        assert (await visitor.post("/ui/compare", version="1", prompt=" ")).status_code == 400
    asked = [request["model"] for request in page.engine.requests]
    assert sorted(asked) == ["default-v1", "tiny", "tiny"]
    async with asyncio.timeout(60):
        while len(sides := await page.learning.rows("SELECT version FROM turns WHERE kind = 'side'")) < 3:
            await asyncio.sleep(0.05)
    assert sorted(row["version"] for row in sides) == [0, 0, 1]


async def test_a_version_is_compared_with_its_parent_over_rest_and_by_a_command(page: Page) -> None:
    await taught(page)
    await step(page.learning, 1, count=3)
    [engine] = await page.learning.rows("SELECT id FROM engines")
    await publish(page.learning, 1, engine["id"])
    path = "/admin/v1/policies/default/versions/{}/compare"
    headers = {"Authorization": f"Bearer {page.admin_key}"}
    async with httpx.AsyncClient(base_url=page.url, headers=headers, timeout=60) as client:
        found = (await client.post(path.format(1))).json()
        assert (found["version"], found["parent"]) == (1, 0)
        # Without prompts: what was asked in the replies it was trained on.
        assert "Explain first" in [compared["prompt"] for compared in found["prompts"]]
        assert [answer["version"] for answer in found["prompts"][0]["answers"]] == [0, 1]
        given = (await client.post(path.format(1), json={"prompts": ["One?", "Two?"]})).json()
        assert [compared["prompt"] for compared in given["prompts"]] == ["One?", "Two?"]
        for number, body, status in (
            (0, {}, 404),
            (7, {}, 404),
            (1, {"prompts": []}, 400),
            (1, {"prompts": [" "]}, 400),
        ):
            assert (await client.post(path.format(number), json=body)).status_code == status, (number, body)
        await page.services[0].training_operations.create_policy("anna", "default", None)
        foreign = await client.post("/admin/v1/policies/anna/versions/1/compare")
        assert (foreign.status_code, foreign.json()["code"]) == (409, "other_policy")
    asked = ("policy", "compare", "1", "--prompt", "Hello", "--url", page.url, "--key", page.admin_key)
    for columns in (80, 120):
        printed = (await asyncio.to_thread(clawloop, *asked, COLUMNS=str(columns))).stdout
        assert printed.count("Hello there, friend.") == 2
        assert printed.index("-- version 0, its parent") < printed.index("-- version 1\n")
        assert printed.splitlines()[-1] == "-- both answered the same, word for word"
        assert max(map(len, printed.splitlines())) <= columns


async def test_what_happened_to_a_policy_is_told_everywhere(page: Page) -> None:
    headers = {"Authorization": f"Bearer {page.admin_key}"}
    async with httpx.AsyncClient(base_url=page.url, headers=headers, timeout=60) as client:
        await client.post("/admin/v1/training/pause", json={"reason": "a holiday"})
        [event] = (await client.get("/admin/v1/policies/default/events")).json()["events"]
        assert (event["kind"], event["detail"]["reason"]) == ("paused", "a holiday")
        assert (await client.get("/admin/v1/policies/nobody/events")).status_code == 404
    settings = {"DATABASE_URL": page.database_url, "COLUMNS": "80"}
    assert "reason a holiday" in (await asyncio.to_thread(clawloop, "policy", "events", **settings)).stdout
    async with page.visitor() as visitor:
        assert "a holiday" in await visitor.get("/ui/now")


async def test_the_chart_has_a_mean_and_a_mark_for_each_version(page: Page) -> None:
    await page.recorder.chat("s1", "one", "two", version=0)
    turns = await page.recorder.chat("s2", "three", "four", version=1)
    await page.recorder.judge(turns[0], 1)
    async with page.visitor() as visitor:
        chart = (await visitor.client.get("/ui/chart")).json()
    assert chart["praise"] == [None, None, 1.0, 1.0]
    assert chart["length"] == [2.0] * 4
    assert chart["versions"] == [[0, 0], [2, 1]]
    assert chart["probes"] == chart["match"] == [None] * 4


def test_the_chart_has_the_match_of_probes_of_each_version() -> None:
    def version(n: int, parent: int | None, **figures: float | None) -> VersionView:
        gate = [GateCheck("probes", CheckResult.PASSED, "", figures)] if figures else []
        return VersionView(
            n=n,
            parent=parent,
            state="",
            active=False,
            pinned=False,
            engines=(),
            metrics=None,
            created_at=datetime.now(UTC),
            gate=gate,
        )

    measured = [version(0, None), version(1, 0, right=0.5, parent_right=0.25), version(2, 1, right=None)]
    assert probes_of(measured) == {0: 0.25, 1: 0.5}


async def test_what_an_evaluation_measured_is_told_everywhere(page: Page) -> None:
    await taught(page)
    await step(page.learning, 1, count=3)
    await page.recorder.chat("later", "Explain second", version=1)
    found = PostgresMeasurements(page.learning.database)
    for version, match in ((0, 0.25), (1, 0.5), (1, 0.75)):  # the newest of several counts
        await found.record(POLICY, version, match, 60)
    async with page.visitor() as visitor:
        chart = (await visitor.client.get("/ui/chart")).json()
        assert chart["match"] == [{0: 0.25, 1: 0.75}[reply] for reply in (0,) * (len(chart["match"]) - 1) + (1,)]
        assert chart["probes"] == [None] * len(chart["match"])
        assert "match 75%" in await visitor.get("/ui/now")
        assert "version measured" not in await visitor.get("/ui/now")
        assert "75% of an evaluation" in await visitor.get("/ui/versions/1")
    headers = {"Authorization": f"Bearer {page.admin_key}"}
    async with httpx.AsyncClient(base_url=page.url, headers=headers, timeout=60) as client:
        versions = (await client.get("/admin/v1/policies/default/versions")).json()["versions"]
        assert [version["match"] for version in versions] == [0.25, 0.75]
    settings = {"DATABASE_URL": page.database_url, "COLUMNS": "200"}
    for command in (("policy", "versions"), ("policy", "version", "1")):
        assert "match 75%" in (await asyncio.to_thread(clawloop, *command, **settings)).stdout, command
    assert "match 0.75, of 60" in (await asyncio.to_thread(clawloop, "policy", "events", **settings)).stdout

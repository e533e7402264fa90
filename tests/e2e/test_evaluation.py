"""The yardstick's own policies on a real gateway and PostgreSQL: made, chatted with in side turns, and retired."""

from __future__ import annotations

import asyncio
from pathlib import Path

import psycopg
import pytest

from clawloop.app.demo.admin_client import AdminClient
from clawloop.app.evaluation.figures import Row
from clawloop.app.evaluation.homework import own_homework
from clawloop.app.evaluation.lines import LineFile
from clawloop.app.evaluation.run import Evaluation, Plan, rows
from clawloop.app.evaluation.users import User
from clawloop.core.recipes.recipe import load_recipe
from tests.e2e.gateway import prepared, running_gateway
from tests.fakes.engine import fake_engine
from tests.fakes.replies import Reply
from tests.rules.tables import ROOT

pytestmark = pytest.mark.slow


async def test_policies_of_an_evaluation_are_made_and_retired(postgres_url: str, tmp_path: Path) -> None:
    plan = Plan(
        like="default",
        recipes={},
        notes=True,
        users=[User.STUDENT, User.TEACHER],
        homework=own_homework(),
        joint=True,
        seeds=2,
        limit=4,
        replies=2,
        answer_tokens=32,
        user_model=None,
    )
    lines = LineFile(tmp_path / "lines.jsonl", plan.settings())
    async with fake_engine() as engine:
        engine.script = lambda body: Reply("I will not say.")
        keys = await prepared(postgres_url, [engine.url], "tiny")
        async with (
            running_gateway(postgres_url, keys, tmp_path / "data") as gateway,
            AdminClient(gateway.url, gateway.admin_key) as admin,
        ):
            await Evaluation(plan, lines, gateway.url, admin, None, 1.0, lambda line: None).run()
            await _until_listed(admin, {"default"})

            binary = load_recipe(ROOT / "deploy" / "recipes" / "binary.toml").model_dump(mode="json")
            await admin.create_policy("evaluate-x-2-0-teacher", "default", binary)
            await _until_listed(admin, {"default", "evaluate-x-2-0-teacher"})
            assert (await admin.create_key("evaluate-x-2-0-teacher")).startswith("cl-")
            assert (await admin.training_status("evaluate-x-2-0-teacher")).is_done
            await admin.retire_policy("evaluate-x-2-0-teacher")
    found: dict[tuple[str, str | None], Row] = {(row.arm, row.user): row for row in rows(plan, lines)}
    student, teacher = found["notes", "student"], found["notes", "teacher"]
    assert (student.base_rate, student.reached, student.counted) == (1.0, 2, False)
    assert (teacher.base_rate, teacher.reached, teacher.counted) == (0.0, 0, True)
    with psycopg.connect(postgres_url) as connection:
        kinds = connection.execute("SELECT DISTINCT kind FROM turns").fetchall()
    assert kinds == [("side",)]


async def _until_listed(admin: AdminClient, names: set[str]) -> None:
    """Return once the gateway lists these policies: it reads them every few seconds."""
    async with asyncio.timeout(60):
        while await admin.policies() != names:
            await asyncio.sleep(0.1)

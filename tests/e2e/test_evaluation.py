"""`clawloop evaluate` with real parts: policies are made, their sessions judged and waited for, and retired."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psycopg
import pytest

from clawloop.app.demo.admin_client import AdminClient
from clawloop.app.demo.recipes import Method, demo_recipe
from clawloop.app.evaluation.homework import own_homework
from clawloop.app.evaluation.lines import LineFile
from clawloop.app.evaluation.run import Evaluation, Plan, is_complete, rows
from clawloop.app.evaluation.users import User
from tests.e2e.toy import outcomes, toy_gateway, toy_workers

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(1800)]


async def test_the_yardstick_on_the_toy(
    postgres_server: Any, temporal_address: str, toy_engine_url: str, toy_model_path: Path, tmp_path: Path
) -> None:
    plan = Plan(
        like="default",
        recipes={"binary": demo_recipe(Method.BINARY).model_dump(mode="json")},
        notes=True,
        users=[User.TEACHER],
        homework=own_homework(),
        joint=False,
        seeds=1,
        limit=4,
        replies=2,
        answer_tokens=32,
        user_model=None,
    )
    lines = LineFile(tmp_path / "lines.jsonl", plan.settings())
    async with (
        toy_gateway(postgres_server.url, "evaluated", tmp_path, toy_engine_url, temporal_address) as gateway,
        toy_workers(gateway, temporal_address, toy_engine_url, toy_model_path),
        AdminClient(gateway.url, gateway.admin_key) as admin,
    ):
        await Evaluation(plan, lines, gateway.url, admin, None, 10.0, lambda line: None).run()
        assert await admin.policies() == {"default"}
    told = outcomes(gateway.database_url)
    assert is_complete(plan, lines)
    found = {(row.arm, row.user): row for row in rows(plan, lines)}
    # The toy knows no kind words, in however many sessions.
    assert [(arm, row.sessions and row.sessions.mean) for (arm, user), row in found.items() if user] == [
        ("frozen", 4),
        ("notes", 4),
        ("binary", 4),
    ]
    with psycopg.connect(gateway.database_url) as connection:
        main = connection.execute(
            "SELECT sessions.policy, turns.outcome FROM turns JOIN sessions ON sessions.id = turns.session_id"
            " WHERE turns.kind = 'main' AND sessions.policy LIKE 'evaluate-%'"
        ).fetchall()
    # Four sessions of two replies, each ended by a message that is answered, too.
    assert len(main) == 4 * 3, told
    assert len({policy for policy, _ in main}) == 1
    # The toy knows too few facts to be asked at the end, so nothing waited for the last session.
    assert sum(outcome == "waiting" for _, outcome in main) <= 3, told

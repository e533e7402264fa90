"""`clawloop evaluate` with real parts in the toy's world: what it measures is what was learned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from clawloop.app.cli.evaluate import learned
from clawloop.app.demo.recipes import Method, demo_recipe
from clawloop.app.demo.world import CHAT, EVALUATION, Axis, draw_preference
from clawloop.app.evaluation.clients import ModelClient
from clawloop.app.evaluation.run import Models, evaluate
from tests.e2e.toy import admin, outcomes, toy_gateway, toy_workers
from tests.evaluation.toy_people import SETTING, tasks, toy_people

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(2400)]

# The base model answers a third of this user's requests in the style they like.
SEED = 4
SESSIONS = 16
# Not the default one, whose learning is another matter.
POLICY = "toy"
WAIT_MINUTES = 10


async def test_the_toy_is_graded_before_and_after_a_persona_taught_it(
    postgres_server: Any,
    temporal_address: str,
    toy_engine_url: str,
    toy_model_path: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    likes = draw_preference(SEED)
    chats = [CHAT[axis][number] for number in range(SESSIONS) for axis in [list(Axis)[number % 3]]]
    lines: list[str] = []
    async with (
        toy_gateway(postgres_server.url, "evaluated", tmp_path, toy_engine_url, temporal_address) as gateway,
        toy_workers(gateway, temporal_address, toy_engine_url, toy_model_path),
        toy_people(SEED, likes) as people,
        ModelClient("the persona", people, "persona", None) as persona,
        ModelClient("the grader", people, "grader", None) as grader,
    ):
        recipe = demo_recipe(Method.COMBINED).model_dump()
        await admin(gateway, "policies", {"name": POLICY, "recipe": recipe})
        key = (await admin(gateway, "keys", {"policy": POLICY, "name": "the evaluation"}))["key"]
        async with ModelClient("the policy", gateway.url, "policy", key) as policy:
            found = await evaluate(
                SETTING,
                Models(policy, persona, grader),
                tasks(chats),
                tasks(EVALUATION),
                lambda: learned(gateway.url, gateway.admin_key, POLICY, WAIT_MINUTES),
                lines.append,
            )
        trained = await admin(gateway, f"training?policy={POLICY}")
    with capsys.disabled():
        print("\n" + "\n".join([lines[0], lines[-1]]))  # noqa: T201
    told = outcomes(gateway.database_url)
    assert (found.sessions, found.completed, found.held_out) == (SESSIONS, SESSIONS, len(EVALUATION))
    assert trained["version"] == trained["head"] > 0, told
    assert trained["ready"] < trained["needed"], told
    style = found.changes["by_model"]
    assert style.count == len(EVALUATION)
    assert style.low is not None
    assert style.low > 0, (found, told)

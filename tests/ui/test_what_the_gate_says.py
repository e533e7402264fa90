"""What keeps a policy from learning is told by the command, over REST and on the page alike."""

from __future__ import annotations

import asyncio
import html

import httpx

from clawloop.core.contracts.training import CheckResult, GateCheck, StepState
from clawloop.core.recipes.recipe import Gate
from tests.contract.learning import POLICY, RECIPE, reject, step, trained
from tests.ui.conftest import Page
from tests.verbs import clawloop


async def told(page: Page, command: list[str], rest: str, shown: str) -> dict[str, str]:
    """What the three say, without line breaks.

    Args:
        command: of the command line; rest: a path of the admin API; shown: one of the page.
    """
    printed = await asyncio.to_thread(clawloop, *command, DATABASE_URL=page.database_url, COLUMNS="1000")
    assert printed.returncode == 0, printed.stderr
    async with httpx.AsyncClient(
        base_url=page.url, headers={"Authorization": f"Bearer {page.admin_key}"}, timeout=60
    ) as client:
        answered = (await client.get(f"/admin/v1/{rest}")).text
    async with page.visitor() as visitor:
        seen = html.unescape(await visitor.get(shown))
    texts = {"command": printed.stdout, "REST": answered, "page": seen}
    return {where: " ".join(text.split()) for where, text in texts.items()}


async def status(page: Page) -> dict[str, str]:
    return await told(page, ["training", "status"], "training", "/ui/now")


async def test_a_canary_with_no_traffic_is_told(page: Page) -> None:
    await page.learning.set_recipe(RECIPE.model_copy(update={"gate": Gate(canary_share=0.25)}))
    await step(page.learning, 1)
    lacking = "no traffic: 0 judged sessions of the canary and 0 of the version before, 8 of each are needed"
    for where, text in (await status(page)).items():
        assert f"version 1 is a canary, and its verdicts have not decided yet: {lacking}" in text, where


async def test_a_held_out_share_that_leaves_no_batch_is_told(page: Page) -> None:
    learning = page.learning
    await step(learning, 1)
    await learning.add_samples(4)
    await learning.execute("UPDATE samples SET state = 'held_out' WHERE state = 'fresh'")
    said = "0 of 4 samples; 4 since the last step are held out with their sessions: lower gate.held_out"
    for where, text in (await status(page)).items():
        assert said in text, where


async def test_a_gate_that_no_version_can_pass_is_told(page: Page) -> None:
    for n in (1, 2, 3):
        await reject(
            page.learning, n, reason="numbers: distance to the parent 0.02, limit 1e-06 (gate.parent_distance)"
        )
    said = (
        "paused: 3 steps in a row without an accepted version, the last one step 3: rejected: numbers: distance to the "
        "parent 0.02, limit 1e-06 (gate.parent_distance); see `clawloop policy versions`"
    )
    for where, text in (await status(page)).items():
        assert said in text, where


async def test_how_long_a_gate_took_is_told(page: Page) -> None:
    learning = page.learning
    await learning.add_samples(4)
    assert (await learning.steps.claim(POLICY, 1)).state is StepState.CLAIMED
    batch = await learning.steps.batch(POLICY, 1)
    numbers = GateCheck("numbers", CheckResult.PASSED, "within limits", {}).timed(0.25)
    replay = GateCheck("replay", CheckResult.PASSED, "no change", {}).timed(1.5)
    await learning.steps.commit(batch, trained(batch), [numbers, replay])
    made = await told(page, ["policy", "versions"], f"policies/{POLICY}/versions", "/ui/versions/1")
    command, rest, shown = made.values()
    assert "replay passed: no change; its gate took 1.75 s" in command
    assert '"gate_seconds":1.75' in rest.replace(": ", ":")
    assert '"seconds":1.5' in rest.replace(": ", ":")
    assert "Its checks took 1.75 s." in shown
    assert "<dt>seconds</dt><dd>0.25</dd>" in shown

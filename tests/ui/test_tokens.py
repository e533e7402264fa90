"""A trained reply's tokens, by the advantage that its step gave each."""

from __future__ import annotations

import asyncio
import html

from clawloop.core.contracts.training import StepState
from tests.contract.learning import POLICY, commit, recipe, trained
from tests.ui.conftest import Page
from tests.ui.recorded import CHANGED, HINT


async def test_a_trained_reply_shows_its_tokens_by_their_advantage(page: Page) -> None:
    turn, _ = await page.recorder.chat("s1", "Explain the tides", CHANGED)
    await page.recorder.judge(turn, -1, HINT)
    await page.learning.set_recipe(recipe(batch_samples=1))
    steps = page.learning.steps
    assert (await steps.claim(POLICY, 1)).state is StepState.CLAIMED
    batch = await steps.batch(POLICY, 1)
    [sample] = batch.samples
    count = len(sample.response_ids)
    advantages = {sample.sample_id: [0.5, -2.0, None, *[0.0] * count][:count]}
    moves = {sample.sample_id: [0.25, -0.125, None, *[0.0] * count][:count]}
    async with page.visitor() as visitor:
        path = f"/ui/turns/{turn}/tokens"
        assert (await visitor.client.get(path)).status_code == 404
        assert (
            await commit(page.learning, batch, trained(batch, advantages=advantages, moves=moves))
            is StepState.COMMITTED
        )
        [row] = await page.learning.rows("SELECT session_id FROM turns WHERE id = %s", turn)
        assert f'hx-get="{path}"' in await visitor.get(f"/ui/sessions/{row['session_id']}")
        shown = html.unescape(await visitor.get(path))
        first, second = sample.response_ids[:2]
        assert f'<span class="token up-1" title="advantage +0.500, moved +0.250"><{first}></span>' in shown
        assert f'<span class="token down-3" title="advantage -2.000, moved -0.125"><{second}></span>' in shown
        assert "<td>-2.000</td><td>-0.125</td>" in shown
        assert "which the gate needs anyway, took 0.5 s of the step" in shown
        stored = (await page.services[0].reading.detail(str(turn), tokens=True)).tokens
        assert stored is not None
        assert (stored.step, stored.moves_seconds, list(stored.moves or ())) == (1, 0.5, moves[sample.sample_id])
        assert shown.count('<span class="token') == count + 2  # the legend has two
        page.engine.healthy = False
        while page.services[0].engines.healthy():
            await asyncio.sleep(0.05)
        assert "No engine gave the texts" in await visitor.get(path)
        await visitor.post(f"/ui/turns/{turn}/erase")
        assert (await visitor.client.get(path)).status_code == 404
    assert await page.learning.rows("SELECT FROM step_samples WHERE advantages IS NOT NULL OR moves IS NOT NULL") == []

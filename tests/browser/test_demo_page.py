"""The page on a real run of the demo: the turn that taught the model to be shorter, its step, the roll-back.

Everything is real: `clawloop demo run --keep` with its engine, trainer, Temporal and PostgreSQL.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.async_api import Browser, Locator, Page, expect

from clawloop.app.demo.world import HINTS, Axis, Style, draw_preference

pytestmark = [
    pytest.mark.long,
    pytest.mark.slow,
    pytest.mark.engine,
    pytest.mark.timeout(2700),
]

# A run takes 2 minutes on two idle cores; tests share theirs, and set-up compiles.
DEMO_SECONDS = 1500
PATIENT_MILLISECONDS = 180_000
SEED = 3
SHORTER = HINTS[Style.CONCISE][0]
PROMPTS = ("Describe glass please.", "I want to know about a tree.", "Can you explain the wind to me?")


@dataclass(frozen=True)
class Demo:
    url: str
    key: str

    async def answers(self, model: str) -> list[str]:
        """The likeliest answers, as side turns, which nothing is trained on."""
        headers = {"Authorization": f"Bearer {self.key}", "X-Turn-Type": "side"}
        async with httpx.AsyncClient(base_url=self.url, headers=headers, timeout=120) as client:
            replies = []
            for prompt in PROMPTS:
                asked: dict[str, Any] = {"messages": [{"role": "user", "content": prompt}], "temperature": 0}
                answer = await client.post("/v1/chat/completions", json=asked | {"model": model})
                assert answer.status_code == 200, answer.text
                replies.append(str(answer.json()["choices"][0]["message"]["content"]))
            return replies


@asynccontextmanager
async def learned_demo(folder: Path) -> AsyncIterator[Demo]:
    """A demo that has learned, and still runs."""
    printed = folder / "printed.txt"
    options = ("--quick", "--seed", str(SEED), "--keep", "--data", "data")
    command = ("-m", "clawloop.app.cli.main", "demo", "run", *options)
    with printed.open("wb") as written:
        process = subprocess.Popen(
            [sys.executable, *command],
            cwd=folder,
            env=dict(os.environ) | {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=written,
            stderr=subprocess.STDOUT,
        )
    try:
        deadline = time.monotonic() + DEMO_SECONDS
        while "Ctrl-C stops everything" not in printed.read_text():
            assert process.poll() is None, printed.read_text()
            assert time.monotonic() < deadline, printed.read_text()
            await asyncio.sleep(1)
        found = re.search(r"see it learn: (http\S+)/ui, key (cl-\S+)", printed.read_text())
        assert found is not None, printed.read_text()
        yield Demo(found[1], found[2])
    finally:
        process.send_signal(signal.SIGINT)
        await asyncio.to_thread(process.wait, 60)


async def test_the_turn_that_taught_shorter_its_step_a_comparison_and_a_roll_back(
    tmp_path: Path, browser: Browser
) -> None:
    assert draw_preference(SEED)[Axis.LENGTH] is Style.CONCISE
    async with learned_demo(tmp_path) as demo:
        learned = await demo.answers("policy")
        assert sum(reply.startswith("In short, ") for reply in learned) >= 2, learned
        context = await browser.new_context(base_url=demo.url, locale="en-US")
        context.set_default_timeout(PATIENT_MILLISECONDS)
        tab = await context.new_page()
        tab.on("dialog", lambda dialog: dialog.accept())
        await tab.goto("/ui/login")
        await tab.locator("input[name=key]").fill(demo.key)
        await tab.keyboard.press("Enter")
        await tab.wait_for_url(lambda address: not address.endswith("/login"))

        chart = await (await tab.request.get("/ui/chart")).json()
        matches = [match for match in chart["match"] if match is not None]
        assert matches[0] < matches[-1], chart["match"]
        await tab.goto("/ui")
        await expect(tab.locator("#chart")).to_contain_text("match", timeout=PATIENT_MILLISECONDS)

        turn = await _blamed_turn_with_hint(tab)
        reply = await turn.locator(".bubble.reply .said").first.inner_text()
        await turn.get_by_text("The judges' words").click()
        await expect(turn.locator(".vote").first).to_be_visible(timeout=PATIENT_MILLISECONDS)
        await turn.get_by_text("Its tokens, as the step trained them").click()
        await expect(turn.locator(".tokens .token").first).to_be_visible(timeout=PATIENT_MILLISECONDS)
        await turn.get_by_role("link", name=re.compile(r"^step \d+$")).click()
        await expect(tab.get_by_role("heading", name=re.compile(r"^Version \d+"))).to_be_visible()
        taught = int((await tab.locator("h1").inner_text()).split()[1])
        await expect(tab.locator(".batch")).to_contain_text(SHORTER)
        assert reply.split("\n")[0][:40] in await tab.locator(".batch").inner_text()

        # Both versions answer the same prompt: what goes on from one, and what is pinned, stays loaded.
        await tab.get_by_role("button", name="Go on from here").click()
        await _stands(tab, f"Rolled back: training goes on from version {taught}")
        if taught > 1:
            await tab.goto(f"/ui/versions/{taught - 1}")
            await tab.get_by_role("button", name="Pin it").click()
            await _stands(tab, f"Version {taught - 1} answers until you unpin it")
        await _answers(tab, f"version {max(taught - 1, 1)}")
        await tab.goto(f"/ui/versions/{taught}")
        await tab.get_by_label("Prompt for both").fill(PROMPTS[0])
        await tab.get_by_role("button", name="Ask both").click()
        await expect(tab.locator("#compared .bubble")).to_have_count(2)
        for place in range(2):
            await expect(tab.locator("#compared .bubble").nth(place)).to_contain_text("lass")
        if taught > 1:
            await tab.goto("/ui")
            await tab.get_by_role("button", name=f"Unpin version {taught - 1}").click()
            await expect(tab.locator("#steering")).to_contain_text("The newest version answers again")

        # Back to the base model, seen without loading the page again; the next replies are the base model's.
        await tab.goto("/ui")
        await tab.evaluate("window.stays = true")
        await tab.get_by_label("Roll back to version").fill("0")
        await tab.keyboard.press("Enter")
        await _stands(tab, "Rolled back: training goes on from version 0")
        await expect(tab.locator(".tile").first).to_contain_text("version 0", timeout=PATIENT_MILLISECONDS)
        assert await tab.evaluate("window.stays") is True
        rolled_back = await demo.answers("policy")
        assert rolled_back == await demo.answers("clawloop-demo")
        assert sum(before != after for before, after in zip(learned, rolled_back, strict=True)) >= 2, rolled_back
        await tab.get_by_role("link", name="Try it").click()
        await tab.get_by_label("Message").fill(PROMPTS[1])
        await tab.keyboard.press("Enter")
        await expect(tab.locator("#try-log .reply")).not_to_be_empty()
        await tab.get_by_role("link", name="The whole session").click()
        await expect(tab.locator("#chat .bubble.reply")).to_contain_text("version 0")
        await context.close()


async def _blamed_turn_with_hint(tab: Page) -> Locator:
    """A blamed turn that a step was trained on with the hint to be shorter."""
    await tab.get_by_role("link", name="Sessions", exact=True).click()
    async with tab.expect_response(lambda answer: "verdict=blamed" in answer.url):
        await tab.get_by_label("Verdict").select_option("blamed")
    await expect(tab.locator(".cover").first).to_be_visible()
    addresses = [await cover.get_attribute("href") for cover in await tab.locator(".cover").all()]
    for address in addresses:
        await tab.goto(address or "")
        hinted = tab.locator("article.turn").filter(has=tab.locator(".hint", has_text=SHORTER))
        trained = hinted.filter(has=tab.get_by_role("link", name=re.compile(r"^step \d+$")))
        if await trained.count():
            return trained.first
    raise AssertionError(f"no turn of {len(addresses)} sessions with a blamed reply taught it to be shorter")


async def _stands(tab: Page, note: str) -> None:
    await expect(tab.locator("#steering")).to_contain_text(note, timeout=PATIENT_MILLISECONDS)


async def _answers(tab: Page, version: str) -> None:
    await tab.goto("/ui")
    await expect(tab.locator(".tile").first).to_contain_text(version, timeout=PATIENT_MILLISECONDS)

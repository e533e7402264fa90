"""A page that is open for long, or while something is away, says what is so."""

from __future__ import annotations

import asyncio
import html
import re
from collections.abc import AsyncIterator

import httpx
import pytest

from api.ui.changes import Changes
from tests.fakes.away_browser import AwayBrowser
from tests.ui.conftest import Page


class Standing(AwayBrowser):
    """A database in which nothing changes."""

    async def mark(self) -> str:
        return "same"


async def events_of(lines: AsyncIterator[str], count: int) -> list[str]:
    found: list[str] = []
    async for line in lines:
        if line.startswith("event: "):
            found.append(line.removeprefix("event: "))
        if len(found) == count:
            break
    return found


async def test_what_is_shown_is_looked_at_again_although_nothing_changes(
    page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("api.ui.events.AGING_SECONDS", 0.0)
    async with page.visitor() as visitor, visitor.client.stream("GET", "/ui/events") as events, asyncio.timeout(60):
        assert await events_of(events.aiter_lines(), 3) == ["changed"] * 3


async def test_what_a_gateway_alone_knows_is_a_change_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("api.ui.changes.CHECK_SECONDS", 0.0)
    healthy = ["e0"]
    changes = Changes(Standing(), lambda: healthy)
    first = await changes.mark()
    assert await changes.mark() == first
    healthy.clear()
    assert await changes.mark() != first


async def test_without_temporal_the_page_says_so(page: Page) -> None:
    async with page.visitor() as visitor:
        for path in ("/ui?policy=default", "/ui/engines"):
            assert "No Temporal is configured: turns are recorded and not judged" in await visitor.get(path), path
        now = await visitor.get("/ui?policy=default")
        assert '<div class="card tile warn">\n    <h2>Not learning</h2>' in now
        # The remedy is not one for a Temporal that died; what is to be typed stands as code.
        remedies = await visitor.get("/ui/engines")
        assert "restarts its own" not in remedies
        assert "<code>clawloop up</code> brings one along" in remedies
        assert "`" not in remedies.split("<main")[1]


async def test_the_first_visit_tells_what_is_not_ready_and_now_can_be_looked_at(page: Page) -> None:
    async with page.visitor() as visitor:
        ready = await visitor.get("/ui/start")
        assert "Not ready" not in ready
        assert "No Temporal is configured" in ready
        assert "<h2>Serving</h2>" in await visitor.get(_address_of(ready, "Now"))
        page.draining.append(True)
        assert "<b>Not ready:</b> this gateway is being stopped." in await visitor.get("/ui/start")
        assert "<b>This gateway is being stopped.</b>" in await visitor.get("/ui/engines")


def _address_of(shown: str, link: str) -> str:
    found = re.search(rf'<a href="([^"]+)"[^>]*>{link}</a>', shown)
    assert found is not None, shown
    return html.unescape(found[1])


async def test_an_engine_that_is_away_is_named_once(page: Page) -> None:
    async with page.visitor() as visitor:
        assert "<td>base</td>" in await visitor.get("/ui/engines")
    page.engine.healthy = False
    [row] = await page.learning.rows("UPDATE engines SET problem = 'does not answer' WHERE true RETURNING id")
    async with asyncio.timeout(60):
        while page.services[0].engines.healthy():
            await asyncio.sleep(0.05)
    async with page.visitor() as visitor:
        away = await visitor.get("/ui/engines")
        assert "<td>base" not in away
        assert "not known while it is away" in away
    headers = {"Authorization": f"Bearer {page.admin_key}"}
    async with httpx.AsyncClient(base_url=page.url, headers=headers, timeout=60) as client:
        problems = (await client.get("/admin/v1/status")).json()["problems"]
    assert [problem for problem in problems if problem.startswith("engine ")] == [
        f"engine {row['id']}: does not answer"
    ]


async def test_a_session_is_found_as_elsewhere_and_by_its_own_id_first(page: Page) -> None:
    [turn] = await page.recorder.chat("first", "Words of the first")
    [row] = await page.learning.rows("SELECT session_id FROM turns WHERE id = %s", turn)
    # A client may give its session any name, and so the id of another one.
    await page.recorder.chat(str(row["session_id"]), "Words of the second")
    async with page.visitor() as visitor:
        for reference in ("first", row["session_id"], f"chatcmpl-{turn.hex}"):
            assert "Words of the first" in await visitor.get(f"/ui/sessions/{reference}"), reference
        assert "Words of the second" in await visitor.get("/ui/sessions/last")
        missing = await visitor.client.get("/ui/sessions/nobody")
        assert (missing.status_code, "There is no session" in html.unescape(missing.text)) == (404, True)

"""`/docs` in headless Chromium: it shows the routes under its policy, and asks no other server for anything."""

from __future__ import annotations

import pytest
from playwright.async_api import Browser

from tests.ui.conftest import Page

pytestmark = [pytest.mark.long, pytest.mark.slow]


async def test_the_docs_show_the_routes_and_break_no_policy(page: Page, browser: Browser) -> None:
    context = await browser.new_context()
    tab = await context.new_page()
    said: list[str] = []
    asked: list[str] = []
    tab.on("console", lambda message: said.append(message.text) if message.type == "error" else None)
    tab.on("pageerror", lambda error: said.append(str(error)))
    tab.on("request", lambda request: asked.append(request.url))
    await tab.goto(f"{page.url}/docs", wait_until="commit")
    # Ten seconds on a machine that does much else.
    await tab.get_by_text("/v1/chat/completions", exact=True).first.wait_for(timeout=200_000)
    await context.close()
    assert said == []
    assert [url for url in asked if not url.startswith((page.url, "data:"))] == []
